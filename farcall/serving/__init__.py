"""Functions and modules for clients in any language, over gRPC."""

from __future__ import annotations

from farcall.serving.admission import Limits
from farcall.serving.endpoint import Batching, Endpoint, TensorSpec
from farcall.serving.server import Server, serve

__all__ = ["Batching", "Endpoint", "Limits", "Server", "TensorSpec", "serve"]
