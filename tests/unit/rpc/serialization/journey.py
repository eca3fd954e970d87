"""Takes objects from one end to the other, as a frame would: through memory that only the receiver has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from rpc import serialization
from rpc.serialization import AllowList, Payload


@dataclass
class Worker:
    """One end of a message."""

    name: str = "worker1"
    main: str = ""


CALLER = Worker("caller")
CALLEE = Worker("callee")


def deliver(payload: Payload) -> tuple[dict[str, Any], list[memoryview]]:
    """What arrives of a payload: header and segments, these in one block and aligned to 16 bytes."""
    header = msgpack.unpackb(msgpack.packb(payload.header))
    block = bytearray()
    places = []
    for segment in payload.buffers:
        block += bytes(-len(block) % 16)
        places.append((len(block), len(block) + len(segment)))
        block += segment
    return header, [memoryview(block)[start:end] for start, end in places]


def send(obj: Any, to: Worker = CALLEE, source: Worker = CALLER, *, allow: AllowList | None = None) -> Any:
    """An object as it arrives."""
    header, segments = deliver(serialization.dumps(obj, to))
    arrivals = serialization.adopt(header, source)
    return serialization.loads(header, segments, arrivals, source, allow=allow)


def send_call(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    to: Worker = CALLEE,
    **options: Any,
) -> serialization.Call:
    """A call as it arrives."""
    header, segments = deliver(serialization.dump_call(func, tuple(args), kwargs or {}, to))
    arrivals = serialization.adopt(header, CALLER)
    return serialization.load_call(header, segments, arrivals, CALLER, **options)


def raise_remotely(error: BaseException, **options: Any) -> Exception:
    """An exception as it arrives at the caller, after it was raised on the callee."""
    try:
        raise error
    except BaseException as raised:
        payload = serialization.dump_exception(raised, CALLEE, CALLER)
    header, segments = deliver(payload)
    arrivals = serialization.adopt(header, CALLEE)
    return serialization.load_exception(header, segments, arrivals, CALLEE, **options)
