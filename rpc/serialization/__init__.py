"""How what calls take and give becomes bytes, and back.

``dump_call`` and ``dumps`` turn a call or any object into a ``Payload``: a header, and segments of bytes, of
which the first is a pickle and the others are the memory of tensors. On the other side ``adopt`` is called
with the header on receipt, and ``load_call`` or ``loads`` with the segments when somebody wants the object;
that is what runs user code. ``dump_exception`` and ``load_exception`` do the same for exceptions.

How a type travels can be said with ``register_reducer``, or with ``register_carrier`` for what travels beside
the pickle. All functions may be called from any thread.
"""

from __future__ import annotations

from rpc.serialization.calls import Call, dump_call, dump_quickly, dumps, load_call, loads
from rpc.serialization.carriers import Carrier, adopt, brings_nothing, ready, take_back
from rpc.serialization.exceptions import dump_exception, load_exception, text_of, without_exception
from rpc.serialization.functions import main_identity
from rpc.serialization.payload import Arrivals, Buffer, Connect, Destination, Payload, Source
from rpc.serialization.pickler import register_carrier, register_reducer
from rpc.serialization.portable import (
    PortablePickler,
    PythonUDF,
    ReplacementPickler,
    dumps_with_tensors,
    loads_with_tensors,
)
from rpc.serialization.safe import AllowList, allow_class, allow_function, allowed
from rpc.serialization.tensor_lists import dump_tensors, load_tensors
from rpc.serialization.tracked import stand_ins

__all__ = [
    "AllowList",
    "Arrivals",
    "Buffer",
    "Call",
    "Carrier",
    "Connect",
    "Destination",
    "Payload",
    "PortablePickler",
    "PythonUDF",
    "ReplacementPickler",
    "Source",
    "adopt",
    "allow_class",
    "allow_function",
    "allowed",
    "brings_nothing",
    "dump_call",
    "dump_exception",
    "dump_quickly",
    "dump_tensors",
    "dumps",
    "dumps_with_tensors",
    "load_call",
    "load_exception",
    "load_tensors",
    "loads",
    "loads_with_tensors",
    "main_identity",
    "ready",
    "register_carrier",
    "register_reducer",
    "stand_ins",
    "take_back",
    "text_of",
    "without_exception",
]
