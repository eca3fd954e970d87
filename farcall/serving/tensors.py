"""PyTorch's tensors as messages."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from farcall.v1 import value_pb2 as pb
from farcall.values import ITEM_SIZES, dtype_name, dtype_number

__all__ = ["DTYPES", "TorchTensors"]

DTYPES: Final = {name: getattr(torch, name) for name in ITEM_SIZES if hasattr(torch, name)}
"""PyTorch's dtypes by name; those that are newer than the installed PyTorch are left out."""

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


class TorchTensors:
    """Tensors of any layout and device there, dense CPU tensors back. NumPy's arrays are taken too."""

    def encode(self, value: object) -> pb.Tensor | None:
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
        return pb.Tensor(dtype=dtype_number(_NAMES[value.dtype]), shape=dense.shape, data=data)

    def decode(self, message: pb.Tensor) -> torch.Tensor:
        """As ``TensorCodec`` says.

        Raises:
            TypeError: the installed PyTorch has no such dtype.
        """
        name = dtype_name(message.dtype)
        if name not in DTYPES:
            raise TypeError(f"this server's PyTorch {torch.__version__} has no {name}")
        if not message.data:
            return torch.empty(list(message.shape), dtype=DTYPES[name])
        memory = torch.frombuffer(bytearray(message.data), dtype=torch.uint8)
        elements = memory.ne(0) if name == "bool" else memory.view(DTYPES[name])
        return elements.reshape(list(message.shape))
