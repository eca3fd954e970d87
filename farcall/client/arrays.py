"""NumPy's arrays as messages; PyTorch is not needed.

NumPy has no types for some of PyTorch's: bfloat16 and those of 8 bits are those of ``ml_dtypes``. Three have
no counterpart anywhere, and are records: ``COMPLEX32`` of two float16, ``BCOMPLEX32`` of two bfloat16, and
``FLOAT4_PAIR``, a byte with two elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import ml_dtypes
import numpy as np

from farcall.grpc.values import ITEM_SIZES, Elements

__all__ = ["BCOMPLEX32", "COMPLEX32", "FLOAT4_PAIR", "NumpyTensors"]

COMPLEX32: Final = np.dtype([("real", "<f2"), ("imag", "<f2")])
BCOMPLEX32: Final = np.dtype([("real", ml_dtypes.bfloat16), ("imag", ml_dtypes.bfloat16)])
FLOAT4_PAIR: Final = np.dtype([("packed", "u1")])


def _dtypes() -> dict[str, np.dtype[Any]]:
    found: dict[str, np.dtype[Any]] = {
        "complex32": COMPLEX32,
        "bcomplex32": BCOMPLEX32,
        "float4_e2m1fn_x2": FLOAT4_PAIR,
    }
    for name in ITEM_SIZES.keys() - found.keys():
        dtype = np.dtype(bool if name == "bool" else getattr(ml_dtypes, name, name))
        found[name] = dtype.newbyteorder("<") if dtype.isbuiltin == 1 else dtype
    return found


_DTYPES: Final = _dtypes()
_NAMES: Final = {dtype.newbyteorder("="): name for name, dtype in _DTYPES.items()}


_PLAIN: Final = (np.ndarray, np.memmap, np.matrix)
"""Classes of arrays that have no state besides their elements."""


class NumpyTensors:
    """Encodes arrays of any layout and byte order, decodes to new contiguous arrays."""

    kinds = "NumPy's arrays"

    def encode(self, value: object) -> Elements | None:
        """As ``TensorCodec`` says.

        Raises:
            TypeError: an array of this class or dtype has no message.
        """
        if not isinstance(value, (np.ndarray, np.generic)):
            return None
        array = np.asarray(value)
        name = _name(array.dtype)
        if name is None:
            raise TypeError(f"an array of {array.dtype} has no counterpart in PyTorch; convert it first")
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError(
                "a masked array cannot be sent with its mask: send array.filled(value), or array.data and "
                "numpy.ma.getmaskarray(array) as two arrays"
            )
        if isinstance(value, np.ndarray) and type(value) not in _PLAIN:
            raise TypeError(
                f"an array of the class {type(value).__qualname__} would lose what it has besides its "
                "elements: send numpy.asarray(array)"
            )
        return name, array.shape, array.astype(_DTYPES[name], copy=False).tobytes()

    def decode(self, name: str, shape: Sequence[int], data: bytes) -> np.ndarray[Any, Any]:
        """As ``TensorCodec`` says."""
        elements: np.ndarray[Any, Any]
        if name == "bool":
            elements = np.frombuffer(data, np.uint8) != 0
        else:
            elements = np.frombuffer(bytearray(data), _DTYPES[name])
        return elements.reshape(shape)


def _name(dtype: np.dtype[Any]) -> str | None:
    """PyTorch's name of a dtype of any byte order."""
    try:
        return _NAMES.get(dtype.newbyteorder("="))
    except TypeError:  # those of strings of any length have no byte order
        return None
