"""A weight sync scheme for TorchRL: a trainer puts a model's weights into a store, and collectors follow it.

Sending neither waits for the collectors nor goes to one after the other; a collector that starts late takes
the newest weights. Start the store; each process reads the token from its environment
(``docs/weights.md``)::

    farcall weights --listen 10.0.0.5:29600 --keep 2

    from farcall.weights.torchrl import StoreWeightSyncScheme

    schemes = {"policy": StoreWeightSyncScheme("10.0.0.5:29600")}
    collector = MultiSyncCollector(..., weight_sync_schemes=schemes)
    collector.update_policy_weights_()
"""

from __future__ import annotations

import logging
from typing import Any, Final, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.weight_update.weight_sync_schemes import WeightSyncScheme, register_weight_sync_backend

from farcall.weights.listening import connect
from farcall.weights.store import Store
from rpc.errors import RpcError, RpcTimeoutError
from rpc.runtime.legible import legible

__all__ = ["StoreTransport", "StoreWeightSyncScheme"]

logger = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 1.0
"""How long a receiver waits for a version before it looks whether it is to stop."""


class StoreTransport:
    """One process's connection to the store.

    Attributes:
        last: number of the version that was received last; None before the first.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._store: Store | None = None
        self.last: int | None = None

    @property
    def store(self) -> Store:
        """The store; connects at the first use."""
        if self._store is None:
            self._store = connect(self._address)
        return self._store

    def send_weights(self, weights: TensorDictBase) -> None:
        """Put the next version."""
        self.store.put(max(self.store.versions(), default=0) + 1, _named(weights))

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: TensorDictBase | None = None,
        model: Any = None,
        strategy: Any = None,
    ) -> TensorDictBase | None:
        """Apply the newest version, if it is newer than the last; waits for one. None after the timeout."""
        if weights is None:
            return None
        received = weights.detach().apply(_with_memory)
        try:
            self.last = self.store.get(_named(received), newer_than=self.last, timeout=timeout)
        except RpcTimeoutError:
            return None
        if model is not None and strategy is not None:
            strategy.apply_weights(model, received)
        return received

    def setup_connection_and_weights_on_sender(self) -> None:
        """Nothing: the scheme puts the first version."""

    def setup_connection_and_weights_on_receiver(
        self, *, worker_idx: int | None = None, weights: Any = None, model: Any = None, strategy: Any = None
    ) -> Any:
        """Return the newest version; waits for the first one."""
        return self.receive_weights(weights=weights)

    def close(self) -> None:
        """End the connection."""
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"_address": self._address, "_store": None, "last": None}


@register_weight_sync_backend("farcall")
class StoreWeightSyncScheme(WeightSyncScheme):  # type: ignore[misc]  # TorchRL is not installed for mypy
    """Synchronizes a model through the store at an address.

    A collector applies a version on a thread of its own as soon as it is there, also in the middle of a
    batch, as TorchRL's other schemes do.

    Args:
        address: ``HOST:PORT`` of ``farcall weights --listen``; one store for each model.
        strategy: TorchRL's, ``"tensordict"`` or ``"state_dict"``; only the first one is possible.
    """

    def __init__(self, address: str, strategy: Literal["tensordict"] = "tensordict") -> None:
        super().__init__(strategy=strategy)
        if strategy != "tensordict":
            raise ValueError(f"a store has tensors by name: strategy is 'tensordict', not {strategy!r}")
        self._address = address

    def create_transport(self, **_: Any) -> StoreTransport:
        """Return a connection to the store."""
        return StoreTransport(self._address)

    def _init_on_sender_impl(self, *, model_id: str, context: Any = None, **kwargs: Any) -> None:
        self.model_id = model_id
        if context is not None:
            self.context = context
        if kwargs.get("model") is not None:
            self.model = kwargs["model"]
        if kwargs.get("weights") is not None:
            self.weights = kwargs["weights"]
        self.shared_transport = self.create_transport()

    def _init_on_receiver_impl(
        self, *, model_id: str, context: Any = None, worker_idx: int | None = None, **kwargs: Any
    ) -> None:
        self.model_id = model_id
        self.worker_idx = worker_idx
        self.context = context
        if kwargs.get("model") is not None:
            self.model = kwargs["model"]
        self._register_transport_receiver()

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any = None
    ) -> None:
        self.shared_transport.send_weights(self.weights if weights is None else weights)

    def _setup_connection_and_weights_on_receiver_impl(self, *, worker_idx: int | None = None) -> None:
        super()._setup_connection_and_weights_on_receiver_impl(worker_idx=worker_idx)
        self._start_background_receiver()

    def _wait_for_instruction(self, timeout: float | None = None) -> str | None:
        transport = self.receiver_transport
        while not self._stop_event.is_set():
            try:
                transport.store.wait(newer_than=transport.last, timeout=timeout or _LOOK_SECONDS)
            except RpcTimeoutError:
                if timeout is None:
                    continue
                return None
            except RpcError as error:  # TorchRL's thread would ask again at once, and for ever
                logger.warning("no more weights come from a store: %s", legible(error))
                return None
            return "receive"
        return None

    def shutdown(self) -> None:
        """End the thread, and the connection."""
        super().shutdown()
        for each in (self._receiver_transport, self._shared_transport):
            if each is not None:
                each.close()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return state | {
            "_receiver_transport": None,
            "_shared_transport": None,
            "_sender_transports": None,
            "_weights": None,
        }


def _with_memory(tensor: Tensor) -> Tensor:
    """Return an empty tensor like one of a collector's, which has no memory before the first version."""
    return torch.empty_like(tensor, device="cpu" if tensor.is_meta else tensor.device)


def _named(weights: TensorDictBase) -> dict[str, Tensor]:
    """Return the tensors by their names, as in a ``state_dict``."""
    leaves = weights.flatten_keys(".").items()
    return {str(name): getattr(tensor, "data", tensor) for name, tensor in leaves}
