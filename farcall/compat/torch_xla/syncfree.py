"""``torch_xla.amp.syncfree``: optimizers that never fetch a value; PyTorch's do not, on this device."""

from __future__ import annotations

from torch.optim import SGD, Adam, AdamW

__all__ = ["SGD", "Adam", "AdamW"]
