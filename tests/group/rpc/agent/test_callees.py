"""What can be called on another worker: every kind of callable that Python and PyTorch have."""

from __future__ import annotations

import asyncio
import functools
import math
import operator
import os
import runpy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rpc
from tests.support.serving import in_standing_group
from tests.support.workers import RunWorkers, Worker

ONES = torch.ones(3)
OFFSET = 40


def add(x: Any, y: Any = 1) -> Any:
    return x + y


async def add_later(x: Any, y: Any = 1) -> Any:
    await asyncio.sleep(0)
    return x + y


def twice(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return 2 * function(*args)

    return wrapper


@twice
def add_twice(x: Any, y: Any) -> Any:
    return x + y


@functools.cache
def add_cached(x: int, y: int) -> int:
    return x + y


class Counter:
    """Knows in which process it was made."""

    made = "by the class"

    def __init__(self, start: int = 0) -> None:
        self.count = start
        self.made_in = os.getpid()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counter) and other.count == self.count

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, amount: int) -> int:
        return self.count + amount

    def increase(self, amount: int) -> int:
        self.count += amount
        return self.count

    async def increase_later(self, amount: int) -> int:
        await asyncio.sleep(0)
        return self.increase(amount)

    @staticmethod
    def static(x: int) -> str:
        return f"static {x}"

    @classmethod
    def of_class(cls, x: int) -> str:
        return f"{cls.__name__} {cls.made} {x}"

    class Nested:
        @staticmethod
        def static(x: int) -> str:
            return f"nested {x}"


class Heir(Counter):
    made = "by the heir"


class Doubler(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def local_scale() -> Callable[[torch.Tensor, int], torch.Tensor]:
    def scale(x: torch.Tensor, factor: int) -> torch.Tensor:
        return x * factor

    return scale


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript; its functions are still about

    @torch.jit.script
    def script_add(x: torch.Tensor, y: int) -> torch.Tensor:
        return x + y

    script_scale = torch.jit.script(local_scale())
    script_doubler = torch.jit.script(Doubler())


def local_function(offset: int) -> Callable[[int], int]:
    def inner(x: int) -> int:
        return x + offset + OFFSET

    return inner


def local_class() -> type:
    class Local:
        def __init__(self, x: int) -> None:
            self.x = x

        def method(self, y: int) -> int:
            return self.x + y

    return Local


CALLEES: dict[str, tuple[Any, tuple[Any, ...], Any]] = {
    "function": (add, (1, 2), 3),
    "function with default": (add, (1,), 2),
    "decorated function": (add_twice, (1, 2), 6),
    "cached function": (add_cached, (1, 2), 3),
    "async def function": (add_later, (1, 2), 3),
    "class": (Counter, (4,), Counter(4)),
    "builtin class": (dict, ([("a", 1)],), {"a": 1}),
    "bound method": (Counter(4).increase, (3,), 7),
    "async def method": (Counter(4).increase_later, (3,), 7),
    "static method of the class": (Counter.static, (1,), "static 1"),
    "static method of an object": (Counter().static, (1,), "static 1"),
    "static method of a nested class": (Counter.Nested.static, (1,), "nested 1"),
    "class method": (Counter.of_class, (1,), "Counter by the class 1"),
    "class method of an heir": (Heir.of_class, (1,), "Heir by the heir 1"),
    "class method of an object": (Heir().of_class, (1,), "Heir by the heir 1"),
    "method as function": (Counter.increase, (Counter(4), 3), 7),
    "callable object": (Counter(4), (3,), 7),
    "partial": (functools.partial(add, y=5), (1,), 6),
    "partial of a lambda": (functools.partial(lambda x, y: x - y, 1), (2,), -1),
    "lambda": (lambda x, y: x * y, (6, 7), 42),
    "closure": (local_function(1), (1,), 42),
    "method of an object of a local class": (local_class()(3).method, (4,), 7),
    "builtin": (len, ([1, 2, 3],), 3),
    "builtin of a C module": (math.gcd, (12, 18), 6),
    "builtin method of an object": ("a b c".split, (), ["a", "b", "c"]),
    "builtin method as function": (str.upper, ("loud",), "LOUD"),
    "builtin class method": (dict.fromkeys, ("ab", 0), {"a": 0, "b": 0}),
    "operator": (operator.mul, (6, 7), 42),
    "itemgetter": (operator.itemgetter(1), ("abc",), "b"),
    "methodcaller": (operator.methodcaller("upper"), ("loud",), "LOUD"),
    "torch function": (torch.add, (ONES, 1), ONES + 1),
    "torch function in Python": (torch.nn.functional.relu, (-ONES,), ONES * 0),
    "torch operator": (torch.ops.aten.add, (ONES, 1), ONES + 1),
    "torch operator's overload": (torch.ops.aten.mul.Tensor, (ONES, ONES + 2), ONES * 3),
    "method of tensors": (torch.Tensor.mul, (ONES, 3), ONES * 3),
    "method of a tensor": (ONES.mul, (3,), ONES * 3),
    "script function": (script_add, (ONES, 1), ONES + 1),
    "local script function": (script_scale, (ONES, 2), ONES * 2),
    "module": (Doubler(), (ONES,), ONES * 2),
    "script module": (script_doubler, (ONES,), ONES * 2),
    "method of a module": (Doubler().forward, (ONES,), ONES * 2),
}


@pytest.mark.parametrize("kind", CALLEES)
@in_standing_group()
def test_every_kind_of_callable_can_be_called_each_way(kind: str) -> None:
    callee, args, expected = CALLEES[kind]
    for value in (
        rpc.rpc_sync("worker1", callee, args=args),
        rpc.rpc_async("worker1", callee, args=args).wait(),
        rpc.remote("worker1", callee, args=args).to_here(),
        rpc.rpc_sync("worker0", callee, args=args),
    ):
        assert type(value) is type(expected)
        assert torch.equal(value, expected) if isinstance(value, torch.Tensor) else value == expected


@in_standing_group()
def test_an_object_is_made_on_the_callee() -> None:
    made = rpc.rpc_sync("worker1", Counter)
    assert (made.made_in == os.getpid(), made.made_in == rpc.rpc_sync("worker1", os.getpid)) == (False, True)


@in_standing_group()
def test_the_object_of_a_method_is_a_copy() -> None:
    counter = Counter()
    assert [rpc.rpc_sync("worker1", counter.increase, args=(1,)) for _ in range(3)] + [counter.count] == [
        1,
        1,
        1,
        0,
    ]


# ---- functions of the script itself

SCRIPT = """
import torch
import rpc

calls = 0

def predict():
    return "stub"

def count():
    global calls
    calls += 1
    return calls

class Model:
    weight = 2.0
    def forward(self, x):
        return self.weight * x

def run(worker):
    with worker.group():
        if worker.rank == 0:
            return {
                to: (
                    [rpc.rpc_sync(to, count) for _ in range(3)],
                    rpc.remote(to, Model).rpc_sync().forward(torch.ones(2)).tolist(),
                    isinstance(rpc.rpc_sync(to, Model), Model),
                    rpc.rpc_sync(to, lambda: calls + 100),
                    rpc.rpc_sync(to, predict),
                )
                for to in ("worker1", "worker2")
            }, calls

from tests.support.workers import current_worker
result = run(current_worker())
"""


def run_script(worker: Worker, *scripts: str) -> Any:
    """Runs this worker's script as Python runs a program: as ``__main__``."""
    return runpy.run_path(scripts[worker.rank], run_name="__main__")["result"]


def test_functions_of_the_script_are_the_callees_own_and_sent_to_a_script_without_them(
    run_workers: RunWorkers, tmp_path: Path
) -> None:
    script, other = tmp_path / "train.py", tmp_path / "evaluate.py"
    script.write_text(SCRIPT)
    other.write_text(
        "from tests.support.serving import serve\nfrom tests.support.workers import current_worker\n"
        "def predict():\n    return 'the real one'\n"
    )
    with other.open("a") as file:
        file.write("result = serve(current_worker())\n")
    answers, calls = run_workers(run_script, 3, args=[str(script), str(script), str(other)])[0]
    assert answers["worker1"] == (
        [1, 2, 3],
        [2.0, 2.0],
        True,
        100,
        "stub",
    )  # its own global counts; the lambda's do not
    assert answers["worker2"] == (
        [1, 1, 1],
        [2.0, 2.0],
        True,
        100,
        "the real one",
    )  # each call brings `count` along
    assert calls == 0
