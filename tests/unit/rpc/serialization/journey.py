"""Takes objects from one end to the other, as a frame would: through memory that only the receiver has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from rpc.serialization.codecs import Call
from rpc.serialization.payload import Connect, Payload
from rpc.serialization.portable import ReplacementPickler
from rpc.serialization.safe import AllowList
from rpc.serialization.serializer import Serializer
from rpc.serialization.settings import Settings


@dataclass
class Worker:
    """One end of a message."""

    name: str = "worker1"
    main: str = ""


CALLER = Worker("caller")
CALLEE = Worker("callee")
SERIALIZER = Serializer()
"""That of workers which nothing extends."""

PICKLES = SERIALIZER.between(peer_is_safe=False)
"""Its usual codec."""


def replaced_by(pickler: ReplacementPickler) -> Serializer:
    """A serializer whose user has put a pickler in place of ours."""
    settings = Settings()
    settings.pickler = pickler
    return Serializer(settings)


def safely(allow: AllowList) -> Serializer:
    """A serializer that reads in safe mode."""
    settings = Settings()
    settings.allowed = allow
    return Serializer(settings, safe=True)


def deliver(payload: Payload) -> tuple[dict[str, Any], list[memoryview]]:
    """What arrives of a payload: header and buffers, these in one block and aligned to 16 bytes."""
    header = msgpack.unpackb(msgpack.packb(payload.header))
    block = bytearray()
    places = []
    for buffer in payload.buffers:
        block += bytes(-len(block) % 16)
        places.append((len(block), len(block) + len(buffer)))
        block += buffer
    return header, [memoryview(block)[start:end] for start, end in places]


def send(
    obj: Any,
    to: Worker = CALLEE,
    source: Worker = CALLER,
    *,
    by: Serializer = SERIALIZER,
    at: Serializer | None = None,
) -> Any:
    """An object as it arrives at ``at``, or at who serialized it."""
    at = at or by
    payload = by.between(at.allow is not None).dumps(obj, to)
    header, buffers = deliver(payload)
    return at.codecs[payload.codec].loads(header, buffers, at.adopt(header, source), source)


def send_call(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    to: Worker = CALLEE,
    *,
    by: Serializer = SERIALIZER,
    at: Serializer | None = None,
    connect: Connect | None = None,
) -> Call:
    """A call as it arrives at ``at``, or at who serialized it."""
    at = at or by
    payload = by.between(at.allow is not None).dump_call(func, tuple(args), kwargs or {}, to)
    header, buffers = deliver(payload)
    load_call = at.codecs[payload.codec].load_call
    return load_call(header, buffers, at.adopt(header, CALLER), CALLER, connect=connect)


def raise_remotely(
    error: BaseException, *, by: Serializer = SERIALIZER, at: Serializer | None = None
) -> Exception:
    """An exception as it arrives at the caller, after it was raised on the callee."""
    at = at or by
    try:
        raise error
    except BaseException as raised:
        codec = by.between(at.allow is not None).id
        payload = by.dump_exception(raised, CALLEE.name, CALLER, codec=codec)
    header, buffers = deliver(payload)
    return at.load_exception(header, buffers, at.adopt(header, CALLEE), CALLEE, codec=payload.codec)
