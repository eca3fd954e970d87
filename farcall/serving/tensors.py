"""PyTorch's tensors as messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from farcall.values import ITEM_SIZES, Elements

__all__ = ["DTYPES", "TorchTensors"]

DTYPES: Final = {name: getattr(torch, name) for name in ITEM_SIZES if hasattr(torch, name)}
"""PyTorch's dtypes by name; those that are newer than the installed PyTorch are left out."""

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


class TorchTensors:
    """Tensors of any layout and device there, dense CPU tensors back. NumPy's arrays are taken too."""

    def encode(self, value: object) -> Elements | None:
        """As ``TensorCodec`` says.

        Raises:
            TypeError: a tensor of this kind has no message.
        """
        if isinstance(value, (np.ndarray, np.generic)):
            value = torch.from_numpy(np.array(value, order="C"))
        if not isinstance(value, torch.Tensor):
            return None
        if value.dtype not in _NAMES:
            raise TypeError(
                f"a tensor of {value.dtype} has no counterpart in other languages; convert it first"
            )
        if value.is_meta:
            raise TypeError("a tensor on the meta device has no elements to send")
        dense = value.detach().to_dense() if value.layout != torch.strided else value.detach()
        dense = dense.resolve_conj().resolve_neg().cpu().contiguous()
        data = b"" if dense.numel() == 0 else dense.reshape(-1).view(torch.uint8).numpy().tobytes()
        return _NAMES[value.dtype], dense.shape, data

    def decode(self, name: str, shape: Sequence[int], data: bytes) -> torch.Tensor:
        """As ``TensorCodec`` says.

        Raises:
            TypeError: the installed PyTorch has no such dtype.
        """
        if name not in DTYPES:
            raise TypeError(f"this server's PyTorch {torch.__version__} has no {name}")
        if not data:
            return torch.empty(shape, dtype=DTYPES[name])
        if name == "bool":
            return torch.frombuffer(bytearray(data), dtype=torch.uint8).ne(0).reshape(shape)
        return torch.frombuffer(bytearray(data), dtype=DTYPES[name]).reshape(shape)
