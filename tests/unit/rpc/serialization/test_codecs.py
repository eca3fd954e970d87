"""A message says which codec it is in: beside pickle there can be others."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from rpc.serialization.codecs import PICKLE, Codec
from rpc.serialization.payload import Payload
from rpc.serialization.serializer import Serializer
from tests.unit.rpc.serialization.callees import add
from tests.unit.rpc.serialization.journey import CALLEE, CALLER, raise_remotely


class MsgpackCodec:
    """Calls of functions that are known by a word, as another language could make them."""

    id = 7

    def __init__(self, **functions: Any) -> None:
        self.functions = functions

    def dump_call(self, func: Any, args: Any, kwargs: Any, to: Any, *, tracked: Any = None) -> Payload:
        return Payload({}, [msgpack.packb([func.__name__, args, kwargs])], self.id)

    def load_call(self, header: Any, buffers: Any, arrivals: Any, source: Any, *, connect: Any = None) -> Any:
        name, args, kwargs = msgpack.unpackb(buffers[0])
        return self.functions[name], tuple(args), kwargs

    def dumps(self, value: Any, to: Any, *, what: object = None, tracked: Any = None) -> Payload:
        return Payload({}, [msgpack.packb(value)], self.id)

    def loads(self, header: Any, buffers: Any, arrivals: Any, source: Any, *, connect: Any = None) -> Any:
        return msgpack.unpackb(buffers[0])


@pytest.fixture
def serializer() -> Serializer:
    serializer = Serializer()
    serializer.register_codec(MsgpackCodec(add=add))
    return serializer


def test_exception_that_a_codec_cannot_write_is_described(serializer: Serializer) -> None:
    payload = serializer.dump_exception(ValueError("x"), "callee", CALLER, codec=7)
    arrived = serializer.load_exception(payload.header, payload.buffers, None, CALLEE, codec=7)
    assert "ValueError, raised by worker 'callee': x" in str(arrived)
    assert type(raise_remotely(ValueError("x"), by=serializer)) is ValueError


@pytest.mark.parametrize("number", [PICKLE, 7, -1, 256])
def test_number_is_free_and_fits_a_byte(serializer: Serializer, number: int) -> None:
    codec = MsgpackCodec()
    codec.id = number
    neutral: Codec = codec
    with pytest.raises(ValueError, match="taken, or not in 0 to 255"):
        serializer.register_codec(neutral)
