from __future__ import annotations

from typing import Any

import pytest
import torch

from rpc.errors import FunctionNotFoundError, SerializationError
from rpc.serialization import pickler as messages
from rpc.serialization.portable import PortablePickler, PythonUDF
from tests.unit.rpc.serialization import callees
from tests.unit.rpc.serialization.callees import Plain, add
from tests.unit.rpc.serialization.journey import CALLEE, CALLER, SERIALIZER, deliver, replaced_by, send


def test_tensors_are_left_as_they_are() -> None:
    tensors = [torch.ones(2), torch.eye(3).to_sparse(), torch.nn.Parameter(torch.ones(3))]
    data, table = PortablePickler().serialize({"a": tensors, "b": tensors[0]})
    arrived = PortablePickler().deserialize(data, table)
    assert [id(tensor) for tensor in table] == [id(tensor) for tensor in tensors]
    assert arrived["a"][2] is tensors[2]
    assert arrived["b"] is tensors[0]


def test_reducers_of_its_own() -> None:
    pickler = PortablePickler()
    pickler.reducers = {Plain: lambda obj: (str, (obj.value,))}
    data, table = pickler.serialize([Plain(1)])

    assert pickler.deserialize(data, table) == ["1"]


def test_missing_function_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    data, table = PortablePickler().serialize(add)
    monkeypatch.delattr(callees, "add")
    with pytest.raises(FunctionNotFoundError, match="RPC pickler does not serialize"):
        PortablePickler().deserialize(data, table)


class Nested:
    """Pickles a call with a pickler of its own, and makes it when it arrives."""

    result: Any = None

    def __getstate__(self) -> Any:
        return PortablePickler().serialize(PythonUDF(add, (torch.ones(2, 2), torch.ones(2, 2)), {}))

    def __setstate__(self, state: Any) -> None:
        call = PortablePickler().deserialize(*state)
        self.result = call.func(*call.args)


def test_used_inside_getstate_and_setstate() -> None:
    arrived = send([Nested(), torch.ones(2), Nested()])
    assert torch.equal(arrived[0].result, torch.full((2, 2), 2.0))
    assert torch.equal(arrived[2].result, torch.full((2, 2), 2.0))
    assert messages.sending.pickler is None


class Counting(PortablePickler):
    """A replacement."""

    def __init__(self) -> None:
        self.serialized: list[Any] = []
        self.deserialized = 0

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        self.serialized.append(obj)
        return super().serialize(obj)

    def deserialize(self, data: Any, tensors: Any) -> Any:
        self.deserialized += 1
        return super().deserialize(data, tensors)


@pytest.mark.parametrize("on_both_sides", [True, False])
def test_replacement_pickler_serializes_calls(on_both_sides: bool) -> None:
    pickler = Counting()
    large = torch.rand(100, 100)
    payload = replaced_by(pickler).between(peer_is_safe=False).dump_call(add, (1, large), {}, CALLEE)
    header, buffers = deliver(payload)
    reader = replaced_by(pickler) if on_both_sides else SERIALIZER
    func, args, kwargs = reader.between(peer_is_safe=False).load_call(header, buffers, None, CALLER)
    assert pickler.serialized == [PythonUDF(add, (1, large), {})]
    assert pickler.deserialized == on_both_sides
    assert len(buffers) == 2
    assert (func, args[0], kwargs) == (add, 1, {})
    assert torch.equal(args[1], large)


def test_replacement_pickler_that_fails() -> None:
    class Failing(PortablePickler):
        def serialize(self, obj: Any) -> Any:
            raise OSError("disk full")

    with pytest.raises(SerializationError, match=r"cannot call .*add on worker 'callee'.*disk full"):
        replaced_by(Failing()).between(peer_is_safe=False).dump_call(add, (1, 2), {}, CALLEE)
