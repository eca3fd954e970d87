from __future__ import annotations

import enum
import re
import threading
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import torch

from rpc.errors import RpcError, SerializationError
from tests.unit.rpc.serialization.callees import DropsLock, FailsToLoad, Plain, Tagged, null
from tests.unit.rpc.serialization.journey import CALLEE, CALLER, PICKLES, deliver, send_call

ARGUMENTS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((1, "a", 2.5, None, True, b"x", 3j), {}),
    (([1, 2], (3, "b")), {}),
    ((), {"a": 1, "b": [None]}),
    (([[1]], {"x": {1, 2}}), {"k": frozenset([1])}),
    ((list(range(1000)),), {}),
]


@pytest.mark.parametrize(("args", "kwargs"), ARGUMENTS)
def test_arguments_of_a_function_by_value_arrive(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    func, received_args, received_kwargs = send_call(lambda *a, **k: (a, k), args, kwargs)
    assert func(*received_args, **received_kwargs) == (args, kwargs)


def test_callers_arguments_are_left_alone() -> None:
    tensor = torch.ones(2)
    args, kwargs = (tensor, 1), {"k": tensor + 1}
    PICKLES.dump_call(null, args, kwargs, CALLEE)
    assert args[0] is tensor
    assert isinstance(kwargs["k"], torch.Tensor)


def test_null_call_has_no_header_and_one_small_segment() -> None:
    payload = PICKLES.dump_call(null, (), {}, CALLEE)
    assert payload.header == {}
    assert len(payload.buffers) == 1
    assert len(payload.buffers[0]) < 80


# ---- what cannot be sent


def cannot_call(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(SerializationError) as caught:
        PICKLES.dump_call(null, args, kwargs, CALLEE)
    assert isinstance(caught.value, TypeError)
    assert caught.value.__cause__ is not None
    return str(caught.value)


def test_error_names_the_variable_of_a_closure() -> None:
    lock = threading.Lock()
    assert "because of its variable 'lock' in it" in cannot_call(lambda: lock)


def test_error_names_the_global_that_a_function_by_value_uses() -> None:
    scope: dict[str, Any] = {"lock": threading.Lock(), "__name__": "nowhere"}
    exec("def function(): return lock", scope)
    assert "because of its variable 'lock' in it" in cannot_call(scope["function"])


def test_error_names_the_function_itself() -> None:
    lock = threading.Lock()
    with pytest.raises(SerializationError, match="the function, of type function"):
        PICKLES.dump_call(lambda: lock, (), {}, CALLEE)


def test_error_does_not_blame_what_getstate_leaves_out() -> None:
    text = cannot_call([DropsLock(), threading.Lock()])
    assert "because of [1] in it" in text


def test_error_for_a_generator_says_what_to_send() -> None:
    async def numbers() -> AsyncGenerator[int, None]:
        yield 1

    assert re.search(
        r"Send a list of its items, or a reference .* rref\.rpc_sync\(\)\.__next__\(\) returns the next",
        cannot_call({"a": (i for i in range(3))}),
    )
    assert cannot_call(numbers()).endswith("Send a list of its items")


def test_future_cannot_be_sent_and_says_what_pytorch_says() -> None:
    text = cannot_call(torch.futures.Future())
    assert "Can not pickle torch.futures.Future" in text
    assert text.endswith("Send its value: future.wait() returns it")


def test_open_file_cannot_be_sent() -> None:
    with open(__file__) as file:
        text = cannot_call(file)
    assert "TextIOWrapper" in text
    assert "Create it on the worker that uses it" in text
    assert "reference" in text


def test_deep_nesting_is_a_clear_error() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    assert "argument 0, of type list, cannot be sent: it is nested too deeply" in cannot_call(nested)


def test_interrupt_while_pickling_is_not_taken_for_an_error() -> None:
    class Interrupted:
        def __reduce__(self) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        PICKLES.dump_call(null, (Interrupted(),), {}, CALLEE)


# ---- what cannot be read


def test_failure_in_unpickling_says_who_sent_it_and_why() -> None:
    _, buffers = deliver(PICKLES.dump_call(null, (FailsToLoad(),), {}, CALLEE))
    with pytest.raises(SerializationError, match=r"worker 'caller'.*ValueError: cannot be rebuilt") as caught:
        PICKLES.load_call({}, buffers, None, CALLER)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("data", [b"", b"nonsense", b"\x80\x05N.", b"\x80\x05]."])
def test_malformed_pickle_is_an_rpc_error(data: bytes) -> None:
    with pytest.raises(RpcError):
        PICKLES.load_call({}, [data], None, CALLER)
    with pytest.raises(RpcError):
        PICKLES.loads({}, [data], None, CALLER)


def test_missing_buffer_is_an_rpc_error() -> None:
    _, buffers = deliver(PICKLES.dumps([torch.ones(200, 200)], CALLEE))
    with pytest.raises(SerializationError):
        PICKLES.loads({}, buffers[:1], None, CALLER)


# ---- what is serialized on the agent's loop: little, and never by code of the user's


class Level(enum.IntEnum):
    LOW = 1


@pytest.mark.parametrize("obj", [None, True, 3, 2.5, 1j, "a" * 1000, b"x", torch.arange(6).view(2, 3)])
def test_small_plain_objects_are_dumped_at_once(obj: Any) -> None:
    payload = PICKLES.dump_quickly(obj)
    assert payload is not None
    header, buffers = deliver(payload)
    arrived = PICKLES.loads(header, buffers, None, CALLER)
    assert torch.equal(arrived, obj) if isinstance(obj, torch.Tensor) else arrived == obj


@pytest.mark.parametrize(
    "obj",
    [
        [1],
        Plain(1),
        Level.LOW,
        "a" * 2000,
        torch.ones(1000),
        torch.nn.Parameter(torch.ones(1)),
        torch.ones(1).as_subclass(Tagged),
        torch.eye(2).to_sparse(),
    ],
    ids=lambda obj: type(obj).__name__,
)
def test_all_others_are_left_to_other_threads(obj: Any) -> None:
    assert PICKLES.dump_quickly(obj) is None
