"""The error of the weight store."""

from __future__ import annotations

from rpc.errors import RpcError
from rpc.serialization.settings import allow_class

__all__ = ["WeightsError"]


@allow_class
class WeightsError(RpcError, ValueError):
    """A weight store cannot do what was asked: the text names the store, the version and the tensor."""
