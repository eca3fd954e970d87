"""Python's values as messages that every language reads, and back.

A value is None, a bool, an int of 64 bits, a float, a str, bytes, a list or tuple, a dict with str keys, or a
tensor. Each side has its own tensor type: PyTorch's at the server, NumPy's arrays at a client. Nothing that
is received is executed or imported, and every size is checked before anything is made from it.
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
"""Size in bytes of an element (of two, for ``float4_e2m1fn_x2``), by PyTorch's name of the dtype."""

_DTYPE_NUMBERS: Final[dict[str, pb.DType]] = {
    name: pb.DType.Value(f"DTYPE_{name.upper()}")  # type: ignore[misc]
    for name in ITEM_SIZES
}
_DTYPE_NAMES: Final[dict[int, str]] = {number: name for name, number in _DTYPE_NUMBERS.items()}

_DIMENSIONS: Final = 64
"""Maximum number of dimensions: NumPy's limit. It also bounds the work of multiplying sizes from
strangers.
"""

_TENSOR_BYTES: Final = (1 << 31) - 1
"""Maximum size of a tensor in bytes: protobuf's messages are less than 2 GiB."""

_LEVELS: Final = 94
"""Maximum nesting of messages in a value: parsers accept 100, and some of these are around it."""

_LEAST: Final = -(1 << 63)
_MOST: Final = (1 << 63) - 1
"""Maximum of an integer; not a ``range``, which searches for an enumeration's member number by number."""


class Malformed(ValueError):
    """A message that cannot be read; the text says where and why."""


Elements = tuple[str, Sequence[int], bytes]
"""A tensor: PyTorch's name of its dtype, its shape, and its elements in the format of ``Tensor`` in the
schema.
"""


class TensorCodec(Protocol):
    """Encodes and decodes one library's tensors."""

    kinds: str
    """Description of the types that ``encode`` accepts."""

    def encode(self, value: object) -> Elements | None:
        """Return the parts of a tensor; None if the value is not a tensor."""

    def decode(self, name: str, shape: Sequence[int], data: bytes) -> Any:
        """Make a tensor with memory of its own; the size of the bytes fits dtype and shape."""


def dtype_name(dtype: int) -> str:
    """Return PyTorch's name of a dtype.

    Raises:
        Malformed: there is none of that number.
    """
    name = _DTYPE_NAMES.get(dtype)
    if name is None:
        raise Malformed(f"a tensor's dtype is {dtype}, which is none of the schema's")
    return name


def dtype_number(name: str) -> pb.DType:
    """Return the number of a dtype, given PyTorch's name, which is one of ``ITEM_SIZES``."""
    return _DTYPE_NUMBERS[name]


def shape_of(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return a received tensor's shape; ``sizes`` may be a field with many millions of numbers.

    Raises:
        Malformed: no tensor has as many dimensions.
    """
    if len(sizes) > _DIMENSIONS:
        raise Malformed(f"a tensor has {len(sizes)} dimensions; there may be {_DIMENSIONS}")
    return tuple(sizes)


def byte_count(name: str, shape: Sequence[int]) -> int:
    """Return the size of a tensor's elements in bytes.

    Args:
        name: PyTorch's name of its dtype.
        shape: a result of ``shape_of``.

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
    """Convert a value to a message.

    Args:
        value: a value as described at the head of this file.
        tensors: encodes its tensors.
        into: an empty message to fill; default: a new one. Adding a complete message to another would copy
        it.

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
    """Fill a message, which may have ``levels`` levels of nested messages."""
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
    """Convert a message to a value; the inverse of ``to_value``, except that tuples are returned as lists.

    Raises:
        Malformed: the message cannot be read.
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
    """Convert a tensor. The bytes are read once: each access copies them out of the message."""
    name, shape, data = dtype_name(message.dtype), shape_of(message.shape), message.data
    expected = byte_count(name, shape)
    if len(data) != expected:
        raise Malformed(f"a tensor {name}{list(shape)} has {expected} bytes, but {len(data)} came")
    return tensors.decode(name, shape, data)
