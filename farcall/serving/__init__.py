"""Functions and modules for clients in any language, over gRPC."""

from __future__ import annotations

import farcall_guard
from farcall.extras import missing

farcall_guard.check(*farcall_guard.PACKAGES)

from farcall.grpc import forking as _forking  # noqa: F401  # before gRPC
from farcall.serving.admission import Limits
from farcall.serving.endpoint import Batching, Endpoint, TensorSpec

try:
    from farcall.serving.server import Server, serve
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(missing("farcall.serve", "serve", error), name=error.name) from error

__all__ = ["Batching", "Endpoint", "Limits", "Server", "TensorSpec", "serve"]
