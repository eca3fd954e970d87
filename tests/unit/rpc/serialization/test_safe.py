from __future__ import annotations

import datetime as dt
from collections import OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch

from rpc.errors import RemoteError, RpcTimeoutError, SerializationError, WorkerLostError
from rpc.serialization import tensor_kinds
from rpc.serialization.codecs import NEUTRAL, PICKLE
from rpc.serialization.safe import AllowList
from rpc.serialization.serializer import Serializer
from rpc.serialization.settings import Settings, allow_class, allow_function, process_settings
from tests.unit.rpc.serialization import callees
from tests.unit.rpc.serialization.callees import Color, Pair, Plain, Point, Slotted
from tests.unit.rpc.serialization.journey import (
    CALLER,
    raise_remotely,
    safely,
    send,
    send_call,
)
from tests.unit.rpc.serialization.test_tensor_kinds import COMPRESSED, SPARSE_COO


@pytest.fixture
def allow() -> AllowList:
    return AllowList()


@pytest.mark.parametrize(
    "value",
    [
        [-(2**2000), "é\udc80", b"x" * 300, bytearray(b"y")],
        [["x" * 70_000], ("y",) * 5, list(range(3000)), {i: i for i in range(3000)}],
        OrderedDict([("b", 1), ("a", 2)]),
        deque([1, 2, 3], maxlen=3),
        [dt.date(2020, 1, 2), dt.datetime(2020, 1, 2, 3, tzinfo=dt.UTC), dt.timedelta(3)],
        [torch.float32, torch.device("cuda:1"), torch.Size([2, 3]), torch.strided],
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_values(allow: AllowList, value: Any) -> None:
    arrived = send(value, at=safely(allow))
    assert arrived == value
    assert type(arrived) is type(value)


# ---- what is admitted


@pytest.mark.parametrize("tensor", [*SPARSE_COO.values(), *COMPRESSED.values()], ids=str)
def test_sparse_tensors(allow: AllowList, tensor: torch.Tensor) -> None:
    arrived = send(tensor, at=safely(allow))
    assert arrived.layout is tensor.layout
    assert torch.equal(arrived.to_dense(), tensor.to_dense())


def test_instances_of_admitted_classes(allow: AllowList) -> None:
    for kind in (Plain, Point, Slotted, Color, Pair):
        allow.cls(kind)
    arrived = send(
        [Plain(torch.ones(2)), Point(1, tags=["a"]), Slotted(3), Color.RED, Pair(1, 2)], at=safely(allow)
    )
    assert torch.equal(arrived[0].value, torch.ones(2))
    assert arrived[1] == Point(1, tags=["a"])
    assert arrived[2].value == 3
    assert arrived[3] is Color.RED
    assert arrived[4] == Pair(1, 2)


def test_decorators_admit_to_the_list_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_settings, "allowed", AllowList())
    assert allow_function(callees.null) is callees.null
    reader = Serializer(safe=True)
    assert allow_class(Plain) is Plain  # also after there is an agent
    assert send_call(callees.null, ([Plain(1)],), at=reader)[1][0][0].value == 1


def test_what_has_no_name_cannot_be_admitted(allow: AllowList) -> None:
    with pytest.raises(ValueError, match="no name"):
        allow.function(lambda: 0)
    with pytest.raises(ValueError, match=r"use cls\(\)"):
        allow.function(Plain)


# ---- failures


class OurError(Exception):
    pass


class StubbornError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def failed(allow: AllowList, error: Exception) -> Exception:
    return raise_remotely(error, at=safely(allow))


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("wrong"), "wrong"),
        (KeyError("key"), "'key'"),
        (FileNotFoundError(2, "No such file", "x"), "[Errno 2] No such file: 'x'"),
        (RpcTimeoutError("late"), "late"),
        (WorkerLostError("gone", "worker1", "why"), "gone"),
        (OurError("ours"), "ours"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_failure_is_made_of_its_type_and_text(allow: AllowList, error: Exception, text: str) -> None:
    allow.cls(OurError)
    arrived = failed(allow, error)
    assert type(arrived) is type(error)
    assert arrived.args == (text,)
    assert "Traceback on worker" in arrived.__notes__[0]


@pytest.mark.parametrize(
    "error",
    [
        UnicodeDecodeError("utf-8", b"x", 0, 1, "why"),
        ExceptionGroup("several", [ValueError("a")]),
        StubbornError(1, 2),
        OurError("whose?"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_failure_that_cannot_be_made_so_is_told_of(allow: AllowList, error: Exception) -> None:
    allow.cls(StubbornError)
    arrived = failed(allow, error)
    assert type(arrived) is RemoteError
    assert str(error) in str(arrived)


def test_a_failure_in_safe_mode_is_itself_where_pickles_are_read() -> None:
    settings = Settings()
    settings.allowed.cls(OurError)
    reader = Serializer(settings)
    header = reader.dump_exception(OurError("ours"), "worker", codec=NEUTRAL).header
    assert type(reader.load_exception(header, [], None, CALLER, codec=NEUTRAL)) is OurError


def test_the_pickle_of_a_failure_is_not_read(allow: AllowList) -> None:
    header = {"!": ["ValueError", "text", "trace", "worker"]}
    pickled = [memoryview(b"not even a pickle")]
    told = safely(allow).load_exception(header, pickled, None, CALLER, codec=NEUTRAL)
    assert (type(told), str(told)) == (ValueError, "text")
    told = safely(allow).load_exception(header, pickled, None, CALLER, codec=PICKLE)
    assert type(told) is RemoteError
    assert "which this worker does not have" in str(told)


# ---- methods of what others refer to


class Base:
    def method(self) -> None: ...


class Derived(Base):
    def another(self) -> None: ...


def test_methods_are_admitted_by_class_and_for_those_derived_from_it(allow: AllowList) -> None:
    allow.methods(Base, "method")
    allow.methods(Derived, "another")
    reader = AllowList(allow)
    allow.methods(Base, "__call__")  # also after there is an agent
    obj: Any
    for obj, name in (
        (Base(), "method"),
        (Derived(), "method"),
        (Derived(), "another"),
        (Base(), "__call__"),
    ):
        reader.check_method(obj, name)
    for obj, name in ((Base(), "another"), (Base, "method"), (Derived(), "__init__"), ([], "append")):
        with pytest.raises(
            SerializationError, match=f"the method '{name}' of objects of type .*allow_methods"
        ):
            reader.check_method(obj, name)


def wide(values: torch.Tensor) -> torch.Tensor:
    """Of one sparse element, which is as wide as they are."""
    return torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.int64), values[None], (1, *values.shape))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1).expand(1 << 40),
        torch.nn.Parameter(torch.zeros(2, 1).expand(2, 1 << 40)),
        torch.empty(1 << 40, 0),
        torch.zeros(8 << 20).as_strided((1 << 20, 1 << 20), (1, 1)),
        wide(torch.zeros(1).expand(1 << 40)),
    ],
    ids=["expanded", "parameter", "empty", "overlapping", "sparse"],
)
@pytest.mark.parametrize("name", ["clone", "tolist"])
def test_no_copy_of_a_tensor_is_made_that_takes_more_memory_than_it_does(
    allow: AllowList, tensor: torch.Tensor, name: str
) -> None:
    reader = AllowList(allow)
    with pytest.raises(SerializationError, match=f"the method '{name}' of a tensor of shape .* more memory"):
        reader.check_method(tensor, name)
    reader.check_method(tensor, "size")


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(4 << 20), torch.zeros(1).expand(9), torch.empty(9, 0)],
    ids=["large", "expanded", "empty"],
)
@pytest.mark.parametrize("name", ["clone", "tolist"])
def test_a_copy_of_a_tensor_is_made_that_takes_as_much_as_it_does_or_little(
    allow: AllowList, tensor: torch.Tensor, name: str
) -> None:
    AllowList(allow).check_method(tensor, name)


# ---- what is refused, though its sender means no harm


@pytest.mark.parametrize(
    "value",
    [
        Plain(1),
        callees.null,
        lambda: 0,
        Plain(1).get,
        np.ones(3),
        torch.nn.Linear(2, 2),
        torch.ones(2).as_subclass(callees.Tagged),
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        torch.ones(2).untyped_storage(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_everything_else_is_refused_by_name(allow: AllowList, value: Any) -> None:
    with pytest.raises(SerializationError, match=r"'[\w.]+' is not on this worker's allow-list"):
        send([value], at=safely(allow))


@pytest.mark.parametrize("function", [tensor_kinds.constant, set, torch.Size])
def test_what_rebuilds_values_is_no_callee(allow: AllowList, function: Any) -> None:
    with pytest.raises(SerializationError, match="is not a function"):
        send_call(function, ("float32",), at=safely(allow))
