"""Python's values as messages that every language reads, and back.

A value is None, a bool, an int of 64 bits, a float, a str, bytes, a list or tuple, a dict with str for keys,
or a tensor. What a tensor is, the two sides know: PyTorch's at the server, NumPy's arrays at a client.
Nothing that is received is executed or imported, and every size is checked before anything is made of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final, Protocol

from farcall.v1 import value_pb2 as pb

__all__ = [
    "ITEM_SIZES",
    "Malformed",
    "TensorCodec",
    "byte_count",
    "check_tensor",
    "dtype_name",
    "dtype_number",
    "from_value",
    "to_value",
]

_PREFIX: Final = "DTYPE_"

ITEM_SIZES: Final = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "complex32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes of an element (of two, for ``float4_e2m1fn_x2``), by PyTorch's name of the dtype."""

_DIMENSIONS: Final = 64
"""At most: what NumPy takes. It also bounds the work of multiplying sizes, which strangers choose."""

_INTEGERS: Final = range(-(1 << 63), 1 << 63)


class Malformed(ValueError):
    """A message that cannot be read; the text says where and why."""


class TensorCodec(Protocol):
    """What knows one library's tensors."""

    def encode(self, value: object) -> pb.Tensor | None:
        """A message for a tensor; None if the value is none."""

    def decode(self, message: pb.Tensor) -> Any:
        """A tensor with memory of its own, of a message that ``check_tensor`` has passed."""


def dtype_name(dtype: int) -> str:
    """PyTorch's name of a dtype.

    Raises:
        Malformed: there is none of that number.
    """
    if dtype not in pb.DType.values() or dtype == pb.DTYPE_UNSPECIFIED:
        raise Malformed(f"a tensor's dtype is {dtype}, which is none of the schema's")
    return pb.DType.Name(dtype).removeprefix(_PREFIX).lower()


def dtype_number(name: str) -> pb.DType:
    """The number of a dtype by PyTorch's name, which is one of ``ITEM_SIZES``."""
    number: pb.DType = pb.DType.Value(_PREFIX + name.upper())  # type: ignore[assignment]
    return number


def byte_count(name: str, shape: Sequence[int]) -> int:
    """How many bytes the elements of a tensor have.

    Args:
        name: PyTorch's, of its dtype.
        shape: as it was received.

    Raises:
        Malformed: no tensor has this shape.
    """
    if len(shape) > _DIMENSIONS:
        raise Malformed(f"a tensor has {len(shape)} dimensions; there may be {_DIMENSIONS}")
    if any(size < 0 for size in shape):
        raise Malformed(f"a tensor's shape is {list(shape)}; sizes are 0 or more")
    count = prod(shape) * ITEM_SIZES[name]
    if not count and prod(max(size, 1) for size in shape) * ITEM_SIZES[name] not in _INTEGERS:
        raise Malformed(f"a tensor's shape is {list(shape)}; this is more than 64 bits can count")
    return count


def check_tensor(message: pb.Tensor) -> str:
    """Check that a tensor's bytes fit its dtype and shape.

    Returns:
        PyTorch's name of its dtype.

    Raises:
        Malformed: they do not.
    """
    name = dtype_name(message.dtype)
    expected = byte_count(name, message.shape)
    if len(message.data) != expected:
        raise Malformed(
            f"a tensor {name}{list(message.shape)} has {expected} bytes, but {len(message.data)} came"
        )
    return name


def to_value(value: object, tensors: TensorCodec) -> pb.Value:
    """Make a message of a value.

    Args:
        value: what the head of this file says.
        tensors: for the tensors in it.

    Raises:
        TypeError: it is, or has in it, something else.
        OverflowError: an int needs more than 64 bits.

    Example::

        to_value({"logits": torch.zeros(2, 3), "step": 7}, TorchTensors())
    """
    match value:
        case None:
            return pb.Value(null=pb.Null())
        case bool():
            return pb.Value(boolean=value)
        case int():
            if value not in _INTEGERS:
                raise OverflowError(f"{value} needs more than the 64 bits that an integer has")
            return pb.Value(integer=value)
        case float():
            return pb.Value(number=value)
        case str():
            return pb.Value(text=value)
        case bytes() | bytearray() | memoryview():
            return pb.Value(binary=bytes(value))
        case list() | tuple():
            return pb.Value(list=pb.List(items=[to_value(item, tensors) for item in value]))
        case Mapping():
            return pb.Value(map=pb.Map(items=dict(_entries(value, tensors))))
    tensor = tensors.encode(value)
    if tensor is None:
        raise TypeError(
            f"a value of type {type(value).__qualname__} has no counterpart in other languages; there are "
            "None, bool, int, float, str, bytes, lists, dicts with str for keys, and tensors"
        )
    return pb.Value(tensor=tensor)


def _entries(mapping: Mapping[Any, object], tensors: TensorCodec) -> Any:
    for key, value in mapping.items():
        if not isinstance(key, str):
            raise TypeError(f"the keys of a dict must be str, {key!r} is {type(key).__qualname__}")
        yield key, to_value(value, tensors)


def from_value(message: pb.Value, tensors: TensorCodec) -> Any:
    """Make a value of a message; the inverse of ``to_value`` but for tuples, which come back as lists.

    Raises:
        Malformed: the message says nothing that can be read.
    """
    kind = message.WhichOneof("kind")
    match kind:
        case None:
            raise Malformed("a value has no kind")
        case "null":
            return None
        case "list":
            return [from_value(item, tensors) for item in message.list.items]
        case "map":
            return {key: from_value(item, tensors) for key, item in message.map.items.items()}
        case "tensor":
            check_tensor(message.tensor)
            return tensors.decode(message.tensor)
    return getattr(message, kind)
