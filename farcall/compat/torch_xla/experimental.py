"""``torch_xla.experimental``: the names of the package itself."""

from __future__ import annotations

from farcall.compat.torch_xla.eager import eager_mode, eager_mode_context, is_eager_mode

__all__ = ["eager_mode", "eager_mode_context", "is_eager_mode"]
