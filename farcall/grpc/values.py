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
    "Elements",
    "Malformed",
    "TensorCodec",
    "byte_count",
    "dtype_name",
    "dtype_number",
    "from_value",
    "shape_of",
    "to_value",
]

ITEM_SIZES: Final = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "complex32", "bcomplex32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes of an element (of two, for ``float4_e2m1fn_x2``), by PyTorch's name of the dtype."""

_DTYPE_NUMBERS: Final[dict[str, pb.DType]] = {
    name: pb.DType.Value(f"DTYPE_{name.upper()}")  # type: ignore[misc]
    for name in ITEM_SIZES
}
_DTYPE_NAMES: Final[dict[int, str]] = {number: name for name, number in _DTYPE_NUMBERS.items()}

_DIMENSIONS: Final = 64
"""At most: what NumPy takes. It also bounds the work of multiplying sizes, which strangers choose."""

_TENSOR_BYTES: Final = (1 << 31) - 1
"""At most: protobuf's messages are less than 2 GiB."""

_LEVELS: Final = 94
"""Messages within a value: parsers take 100, and some of these are around it."""

_LEAST: Final = -(1 << 63)
_MOST: Final = (1 << 63) - 1
"""Of an integer; not a ``range``, which looks for an enumeration's member number by number."""


class Malformed(ValueError):
    """A message that cannot be read; the text says where and why."""


Elements = tuple[str, Sequence[int], bytes]
"""A tensor: PyTorch's name of its dtype, its shape, and its elements as ``Tensor`` in the schema says."""


class TensorCodec(Protocol):
    """What knows one library's tensors."""

    kinds: str
    """What ``encode`` takes, for people."""

    def encode(self, value: object) -> Elements | None:
        """What a tensor is made of; None if the value is none."""

    def decode(self, name: str, shape: Sequence[int], data: bytes) -> Any:
        """A tensor with memory of its own; the bytes fit the dtype of that name and the shape."""


def dtype_name(dtype: int) -> str:
    """PyTorch's name of a dtype.

    Raises:
        Malformed: there is none of that number.
    """
    name = _DTYPE_NAMES.get(dtype)
    if name is None:
        raise Malformed(f"a tensor's dtype is {dtype}, which is none of the schema's")
    return name


def dtype_number(name: str) -> pb.DType:
    """The number of a dtype by PyTorch's name, which is one of ``ITEM_SIZES``."""
    return _DTYPE_NUMBERS[name]


def shape_of(sizes: Sequence[int]) -> tuple[int, ...]:
    """A tensor's shape as it was received; ``sizes`` may be a field with many millions of numbers.

    Raises:
        Malformed: no tensor has as many dimensions.
    """
    if len(sizes) > _DIMENSIONS:
        raise Malformed(f"a tensor has {len(sizes)} dimensions; there may be {_DIMENSIONS}")
    return tuple(sizes)


def byte_count(name: str, shape: Sequence[int]) -> int:
    """How many bytes the elements of a tensor have.

    Args:
        name: PyTorch's, of its dtype.
        shape: as ``shape_of`` gives it.

    Raises:
        Malformed: no tensor has this shape.
    """
    if min(shape, default=0) < 0:
        raise Malformed(f"a tensor's shape is {list(shape)}; sizes are 0 or more")
    count = prod(shape) * ITEM_SIZES[name]
    if not count and prod(max(size, 1) for size in shape) * ITEM_SIZES[name] > _MOST:
        raise Malformed(f"a tensor's shape is {list(shape)}; this is more than 64 bits can count")
    return count


def to_value(value: object, tensors: TensorCodec, into: pb.Value | None = None) -> pb.Value:
    """Make a message of a value.

    Args:
        value: what the head of this file says.
        tensors: for the tensors in it.
        into: an empty message to fill; default: a new one. To put a message that is complete into another
            copies it.

    Returns:
        That message.

    Raises:
        TypeError: it is, or has in it, something else.
        ValueError: lists and maps are nested so deeply that no receiver would read them, or a tensor does
            not fit into a message.
        OverflowError: an int needs more than 64 bits.

    Example::

        to_value({"logits": torch.zeros(2, 3), "step": 7}, TorchTensors())
    """
    message = pb.Value() if into is None else into
    _put(value, tensors, message, _LEVELS)
    return message


def _put(value: object, tensors: TensorCodec, message: pb.Value, levels: int) -> None:
    """``levels``: so many messages may be within this one."""
    if levels < 0:
        raise ValueError("lists and maps are nested too deeply: about 30 may be within each other")
    match value:
        case None:
            message.null.SetInParent()
        case bool():
            message.boolean = value
        case int():
            if not _LEAST <= value <= _MOST:
                raise OverflowError(f"{value} needs more than the 64 bits that an integer has")
            message.integer = value
        case float():
            message.number = value
        case str():
            message.text = value
        case bytes() | bytearray() | memoryview():
            message.binary = bytes(value)
        case list() | tuple():
            message.list.SetInParent()
            for item in value:
                _put(item, tensors, message.list.items.add(), levels - 2)
        case Mapping():
            message.map.SetInParent()
            for key, item in value.items():
                if not isinstance(key, str):
                    raise TypeError(f"the keys of a dict must be str, {key!r} is {type(key).__qualname__}")
                _put(item, tensors, message.map.items[key], levels - 3)
        case _:
            _put_tensor(value, tensors, message.tensor)


def _put_tensor(value: object, tensors: TensorCodec, message: pb.Tensor) -> None:
    elements = tensors.encode(value)
    if elements is None:
        raise TypeError(
            f"a value of type {type(value).__qualname__} has no counterpart in other languages; there are "
            f"None, bool, int, float, str, bytes, lists, dicts with str for keys, and {tensors.kinds}"
        )
    name, shape, data = elements
    if len(data) > _TENSOR_BYTES:
        raise ValueError(f"a tensor {name}{list(shape)} has {len(data)} bytes; a message has less than 2 GiB")
    message.data = data
    message.dtype = _DTYPE_NUMBERS[name]
    message.shape.extend(shape)


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
            return _tensor(message.tensor, tensors)
    return getattr(message, kind)


def _tensor(message: pb.Tensor, tensors: TensorCodec) -> Any:
    """The bytes are asked for once: each time, they are copied out of the message."""
    name, shape, data = dtype_name(message.dtype), shape_of(message.shape), message.data
    expected = byte_count(name, shape)
    if len(data) != expected:
        raise Malformed(f"a tensor {name}{list(shape)} has {expected} bytes, but {len(data)} came")
    return tensors.decode(name, shape, data)
