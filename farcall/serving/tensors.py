"""PyTorch's tensors as messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from farcall.client.arrays import NumpyTensors
from farcall.grpc.values import ITEM_SIZES, Elements

__all__ = ["DTYPES", "TorchTensors"]

DTYPES: Final = {name: getattr(torch, name) for name in ITEM_SIZES if hasattr(torch, name)}
"""PyTorch's dtypes by name, except those that the installed PyTorch lacks."""

_IN_NUMPY: Final = {
    **{DTYPES[name]: torch.uint8 for name in DTYPES if name.startswith(("float8", "float4"))},
    torch.bfloat16: torch.int16,
    **{DTYPES[name]: torch.int32 for name in ("complex32", "bcomplex32") if name in DTYPES},
}
"""NumPy types of the same size as the dtypes that NumPy lacks."""

_ARRAYS: Final = NumpyTensors()

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


class TorchTensors:
    """Encodes tensors of any layout and device, decodes to dense CPU tensors. NumPy arrays are
    encoded too.
    """

    kinds = "tensors, PyTorch's or NumPy's"

    def encode(self, value: object) -> Elements | None:
        """As ``TensorCodec`` says.

        Raises:
            TypeError: a tensor of this kind has no message.
        """
        if not isinstance(value, torch.Tensor):
            return _ARRAYS.encode(value)
        if value.dtype not in _NAMES:
            raise TypeError(
                f"a tensor of {value.dtype} has no counterpart in other languages; convert it first"
            )
        if value.is_meta:
            raise TypeError("a tensor on the meta device has no elements to send")
        if value.is_nested:
            raise TypeError("a nested tensor has no counterpart in other languages; send its parts")
        dense = value if value.layout == torch.strided else value.detach().to_dense()
        same = _IN_NUMPY.get(dense.dtype)
        memory = dense if same is None else dense.detach().resolve_conj().view(same)
        try:
            elements = memory.numpy(force=True)
        except RuntimeError as error:  # such as of a masked or a fake tensor
            raise TypeError(
                f"a tensor of the class {type(value).__qualname__} cannot be sent: {error}"
            ) from None
        return _NAMES[value.dtype], dense.shape, elements.tobytes()

    def decode(self, name: str, shape: Sequence[int], data: bytes) -> torch.Tensor:
        """As ``TensorCodec`` says.

        Raises:
            TypeError: the installed PyTorch has no such dtype.
        """
        if name not in DTYPES:
            raise TypeError(f"this server's PyTorch {torch.__version__} has no {name}")
        if not data:
            return torch.empty(shape, dtype=DTYPES[name], device="cpu")
        if name == "bool":
            return torch.frombuffer(bytearray(data), dtype=torch.uint8).ne(0).view(shape)
        return torch.frombuffer(bytearray(data), dtype=DTYPES[name]).view(shape)
