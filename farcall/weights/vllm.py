"""A weight-transfer engine for vLLM: its workers read a version of a store into their model.

Importing this module registers the engine ``farcall``; in vLLM's processes, an entry point of the group
``vllm.general_plugins`` imports it. Start the store, and vLLM with the engine; each process reads the token
from its environment (``docs/weights.md``)::

    farcall weights --listen 10.0.0.5:29600 --keep 2
    vllm serve MODEL --weight-transfer-config '{"backend": "farcall"}'

The trainer puts a version whose tensors have the names of the model's checkpoint, and then has vLLM load it:
``init_info={"address": "10.0.0.5:29600"}`` once, and ``update_info={"version": 7}`` for each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from farcall.weights.errors import WeightsError
from farcall.weights.listening import connect
from farcall.weights.store import Store

__all__ = ["FarcallInitInfo", "FarcallUpdateInfo", "FarcallWeightTransferEngine", "register"]

Load = Callable[[Iterable[tuple[str, Tensor]]], Any]


@dataclass
class FarcallInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not installed for mypy
    """Where the store is.

    Args:
        address: ``HOST:PORT`` of ``farcall weights --listen``.
    """

    address: str


@dataclass
class FarcallUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What to load.

    Args:
        version: number or tag of the version; default: the newest.
        timeout: how long to wait for it, in seconds.
    """

    version: int | str | None = None
    timeout: float = 300.0


class FarcallWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Reads versions of a store. A version that is not there, or not whole, changes nothing."""

    init_info_cls = FarcallInitInfo
    update_info_cls = FarcallUpdateInfo

    _store: Store | None = None
    version: int | None = None
    """The version that was loaded last."""

    def init_transfer_engine(self, init_info: FarcallInitInfo) -> None:
        """Connect to the store."""
        self.shutdown()
        self._store = connect(init_info.address)

    def start_weight_update(self) -> None:
        """Have vLLM load weights in the format of checkpoints."""
        reload = _layerwise_reload()
        if reload is not None:
            reload.initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Have vLLM make what it has loaded ready for use."""
        reload = _layerwise_reload()
        if reload is not None:
            reload.finalize_layerwise_reload(self.model, self.model_config)

    def receive_weights(self, update_info: FarcallUpdateInfo, load_weights: Load | None = None) -> None:
        """Load a version; ``load_weights`` is given by versions of vLLM in which the engine has no model."""
        if self._store is None:
            raise WeightsError("the engine has no store: vLLM has not called init_transfer_engine")
        load: Load = load_weights or self.model.load_weights
        with self._store.lease(update_info.version, update_info.timeout) as state:
            load(list(state.items()))
            self.version = state.version

    def shutdown(self) -> None:
        """End the connection."""
        store, self._store = self._store, None
        if store is not None:
            store.close()

    @staticmethod
    def trainer_send_weights(
        iterator: Iterator[tuple[str, Tensor]], trainer_args: Mapping[str, Any] | Any
    ) -> None:
        """Put a version, at the trainer.

        Args:
            iterator: names and whole tensors.
            trainer_args: ``address`` and ``version``.
        """
        given = trainer_args if isinstance(trainer_args, Mapping) else vars(trainer_args)
        with torch.no_grad(), connect(given["address"]) as store:
            store.put(given["version"], dict(iterator))


def _layerwise_reload() -> Any:
    """Return vLLM's module for that; None in versions that have none."""
    try:
        from vllm.model_executor.model_loader import reload  # imports models
    except ImportError:
        return None
    return reload


def register() -> None:
    """Register the engine, unless it is there: for vLLM's entry points."""
    with contextlib.suppress(ValueError):
        WeightTransferEngineFactory.register_engine("farcall", FarcallWeightTransferEngine)


register()
