"""A message says which codec it is in: beside pickle there can be others."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from rpc.errors import SerializationError
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


def test_call_and_value_in_another_codec(serializer: Serializer) -> None:
    call = serializer.codecs[7].dump_call(add, (1, 2), {}, CALLEE)
    func, args, kwargs = serializer.codecs[call.codec].load_call({}, call.buffers, None, CALLER)
    value = serializer.codecs[call.codec].dumps(func(*args, **kwargs), CALLER)
    assert serializer.codecs[value.codec].loads({}, value.buffers, None, CALLEE) == 3
    assert call.codec == value.codec == 7


def test_messages_are_in_pickle_unless_they_say_otherwise(serializer: Serializer) -> None:
    payload = serializer.between(peer_is_safe=False).dumps(3, CALLEE)
    assert payload.codec == PICKLE
    assert serializer.codecs[PICKLE].loads({}, payload.buffers, None, CALLER) == 3


def test_exception_that_a_codec_cannot_write_is_described(serializer: Serializer) -> None:
    payload = serializer.dump_exception(ValueError("x"), "callee", CALLER, codec=7)
    arrived = serializer.load_exception(payload.header, payload.buffers, None, CALLEE, codec=7)
    assert "ValueError, raised by worker 'callee': x" in str(arrived)
    assert type(raise_remotely(ValueError("x"), by=serializer)) is ValueError


def test_codec_that_is_missing_here_is_an_error(serializer: Serializer) -> None:
    with pytest.raises(SerializationError, match="codec 9, which this worker does not have"):
        _ = serializer.codecs[9]


@pytest.mark.parametrize("number", [PICKLE, 7, -1, 256])
def test_number_is_free_and_fits_a_byte(serializer: Serializer, number: int) -> None:
    codec = MsgpackCodec()
    codec.id = number
    neutral: Codec = codec
    with pytest.raises(ValueError, match="taken, or not in 0 to 255"):
        serializer.register_codec(neutral)
