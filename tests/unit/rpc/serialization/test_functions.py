from __future__ import annotations

import enum
import operator
import os
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from rpc.errors import FunctionNotFoundError
from rpc.serialization import functions
from rpc.serialization.functions import main_identity
from rpc.serialization.safe import AllowList
from tests.unit.rpc.serialization import callees
from tests.unit.rpc.serialization.callees import Color, Pair, Plain, Point
from tests.unit.rpc.serialization.journey import (
    CALLEE,
    CALLER,
    PICKLES,
    Worker,
    deliver,
    safely,
    send,
    send_call,
)

BY_NAME: list[Any] = [
    callees.null,
    callees.decorated,
    callees.scripted,
    Plain,
    Plain.triple,
    Color.RED,
    type(None),
    len,
    operator.add,
    np.add,
    torch.add,
    torch.nn.functional.relu,
    torch.Tensor.add,
    torch.Tensor.__add__,
    torch.ops.aten.add,
    torch.ops.aten.add.Tensor,
]


@pytest.mark.parametrize("callee", BY_NAME, ids=repr)
def test_what_can_be_imported_goes_by_name(callee: Any) -> None:
    assert send([callee])[0] is callee
    if callable(callee):
        assert send_call(callee)[0] is callee
        payload = PICKLES.dump_call(callee, (), {}, CALLEE)
        assert len(payload.buffers[0]) < 250


def test_method_that_its_object_does_not_have_under_its_name() -> None:
    plain = Plain(3)
    plain.value = types.MethodType(lambda self: type(self).__name__, plain)
    assert send(plain).value() == "Plain"


def test_objects_of_importable_classes() -> None:
    point = Point(1, torch.ones(2), ["a"])
    slotted = callees.Slotted(Color.BLUE)
    arrived = send({"point": point, "pair": Pair(1, point), "slotted": slotted})
    assert type(arrived["point"]) is Point
    assert arrived["pair"].right is arrived["point"]
    assert arrived["slotted"].value is Color.BLUE


def test_recursive_structure() -> None:
    loop: dict[str, Any] = {"list": []}
    loop["list"].append(loop)
    plain = Plain(None)
    plain.value = plain
    assert send(loop)["list"][0]["list"][0]["list"] is not None
    arrived = send(plain)
    assert arrived.value is arrived


# ---- members of enumerations


class Level(enum.IntEnum):
    """A number as well."""

    LOW = 1
    HIGH = 2


class Access(enum.Flag):
    """Members that combine."""

    READ = enum.auto()
    WRITE = enum.auto()


class Planet(enum.Enum):
    """Values of several parts, and a constructor."""

    EARTH = (1, 2.5)
    MARS = (2, 0.5)

    def __init__(self, place: int, radius: float) -> None:
        self.place = place
        self.radius = radius


class Named(enum.Enum):
    """Says itself how it is pickled."""

    ONLY = 1

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return named, (self.name,)


def named(name: str) -> Named:
    """The member of that name."""
    return Named[name]


@pytest.mark.parametrize(
    "member", [Level.HIGH, Access.READ, Access.READ | Access.WRITE, Access(0), Planet.MARS, Named.ONLY]
)
def test_a_member_arrives_as_itself(member: enum.Enum) -> None:
    assert send(member) is member


@pytest.mark.parametrize("member", [Level.HIGH, Access.READ | Access.WRITE, Planet.MARS])
def test_safe_mode_needs_nothing_but_the_class(member: enum.Enum) -> None:
    allow = AllowList()
    allow.cls(type(member))
    assert send(member, at=safely(allow)) is member


# ---- by value


def test_closures_of_one_message_share_their_variable() -> None:
    count = [0]

    def increment() -> None:
        count[0] += 1

    def read() -> int:
        return count[0]

    remote_increment, remote_read = send((increment, read))
    remote_increment()
    assert remote_read() == 1
    assert read() == 0


def test_tensor_in_a_closure_travels_as_a_segment() -> None:
    large = torch.arange(100_000.0)
    payload = PICKLES.dump_call(lambda x: large.sum() + x, (), {}, CALLEE)
    assert [len(segment) for segment in payload.buffers[1:]] == [400_000]


def test_module_registered_with_cloudpickle_goes_by_value() -> None:
    cloudpickle.register_pickle_by_value(callees)
    try:
        func, args, _ = send_call(callees.add, (1, 2))
        assert func is not callees.add
        assert func(*args) == 3
    finally:
        cloudpickle.unregister_pickle_by_value(callees)


# ---- what is missing on the receiver


def test_module_that_fails_to_import_is_no_missing_function(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "imports_in_vain.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        functions.resolve("imports_in_vain", "func")


# ---- __main__


@pytest.fixture
def run_as_main(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes this process run a script as its ``__main__``, or an interactive session."""

    def run(source: str, *, interactive: bool = False, name: str = "__main__") -> Any:
        module = types.ModuleType(name)
        if not interactive:
            path = tmp_path / "train.py"
            path.write_text(source)
            module.__file__ = str(path)
        exec(textwrap.dedent(source), module.__dict__)
        for alias in {"__main__", name}:
            monkeypatch.setitem(sys.modules, alias, module)
        monkeypatch.setattr(functions, "_identity", (0, ""))
        return module

    yield run
    functions._identity = (0, "")


SCRIPT = """
STATE = []

class Model:
    def forward(self):
        return helper()

def helper():
    STATE.append(1)
    return len(STATE)
"""


def identity_of(run_as_main: Any, source: str) -> str:
    run_as_main(source)
    return main_identity()


@pytest.mark.parametrize(
    "source",
    [
        "def helper(): ...",
        "if True:\n  from os import getpid as helper",
        "other = helper = 1",
        "class helper: ...",
    ],
)
def test_a_script_names_what_it_defines_anywhere_at_its_top(run_as_main: Any, source: str) -> None:
    peer = Worker(main=identity_of(run_as_main, source))
    main = run_as_main(SCRIPT)
    assert send_call(main.helper, to=peer)[0] is main.helper


@pytest.mark.parametrize("source", ["def f():\n  helper = 1", "print(len('helper'))"])
def test_a_script_does_not_name_what_it_only_uses(run_as_main: Any, source: str) -> None:
    peer = Worker(main=identity_of(run_as_main, source))
    main = run_as_main(SCRIPT)
    assert send_call(main.helper, to=peer)[0] is not main.helper


def test_copies_of_globals_are_told_of_once(run_as_main: Any, caplog: pytest.LogCaptureFixture) -> None:
    main = run_as_main("import torch\nTABLE = torch.zeros(1_000_000)\nread = lambda: float(TABLE.sum())")
    for _ in range(2):
        send_call(main.read, to=Worker("server"))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "is sent to worker 'server' by value" in record.getMessage()
    assert "carries copies of TABLE (4.0 MB)" in record.getMessage()


def test_nothing_is_told_of_a_lambda_that_copies_little(caplog: pytest.LogCaptureFixture) -> None:
    offset = 3
    assert send_call(lambda x: torch.add(x, offset).numel(), to=CALLEE)[0](torch.ones(2)) == 2
    assert caplog.records == []


def test_a_large_closure_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    large = torch.zeros(1_000_000)
    send_call(lambda x: large + x, to=CALLEE)
    assert "carries copies of large (4.0 MB)" in caplog.text


def test_lambda_of_a_shared_main_refers_to_the_receivers_main(run_as_main: Any) -> None:
    main = run_as_main(SCRIPT + "\ncall = lambda: helper()\n")
    func, _, _ = send_call(main.call, to=Worker(main=main_identity()))
    func()
    assert main.STATE == [1]


def test_what_only_the_callers_main_has_is_not_found(run_as_main: Any) -> None:
    main = run_as_main(SCRIPT)
    _, buffers = deliver(PICKLES.dump_call(main.helper, (), {}, Worker(main=main_identity())))
    del main.helper
    with pytest.raises(FunctionNotFoundError, match="if __name__ =="):
        PICKLES.load_call({}, buffers, None, CALLER)


def test_spawned_child_calls_its_main_by_the_parents_name(run_as_main: Any) -> None:
    main = run_as_main(SCRIPT, name="__mp_main__")
    peer = Worker(main=main_identity())
    for value in (main.helper, main.Model, [main.helper], main.Model()):
        payload = PICKLES.dump_call(callees.null, (value,), {}, peer)
        assert b"__mp_main__" not in bytes(payload.buffers[0])
    assert b"__mp_main__" not in bytes(PICKLES.dump_call(main.helper, (), {}, peer).buffers[0])
    assert send_call(main.helper, to=peer)[0] is main.helper


def test_identity_is_the_scripts_name_and_content(run_as_main: Any) -> None:
    run_as_main(SCRIPT)
    first = main_identity()
    run_as_main(SCRIPT)
    assert main_identity() == first
    run_as_main(SCRIPT + "\nMORE = 1\n")
    assert main_identity() != first
    assert first.startswith("script:train.py:")


def test_interactive_main_is_shared_with_nobody_but_oneself(run_as_main: Any) -> None:
    main = run_as_main(SCRIPT, interactive=True)
    first = main_identity()
    assert first == main_identity()
    assert send_call(main.helper, to=Worker(main=first))[0] is main.helper
    run_as_main(SCRIPT, interactive=True)
    assert main_identity() != first


@pytest.mark.parametrize("interactive", [True, False])
def test_forked_child_has_the_identity_of_a_script_and_one_of_its_own_without(
    run_as_main: Any, monkeypatch: pytest.MonkeyPatch, interactive: bool
) -> None:
    run_as_main(SCRIPT, interactive=interactive)
    parent = main_identity()
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert (main_identity() == parent) is not interactive
