"""``RemoteModule``: an ``nn.Module`` that lives on another worker."""

from __future__ import annotations

from rref.remote_module.module import RemoteModule

__all__ = ["RemoteModule"]
