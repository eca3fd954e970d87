"""A checkpoint engine for verl: the trainer puts its weights into a store, and rollout workers read them.

Start the store, and name this module in verl's configuration; each process reads the token from its
environment (``docs/weights.md``)::

    farcall weights --listen 10.0.0.5:29600 --keep 2

    actor_rollout_ref.rollout.checkpoint_engine.backend=farcall
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=farcall.weights.verl
    +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.farcall.address=10.0.0.5:29600

Rollout workers that join or are lost need no new group: each update is a version, which any number of them
may read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from torch import Tensor
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from farcall.weights.errors import WeightsError
from farcall.weights.lease import Lease
from farcall.weights.listening import connect
from farcall.weights.store import Store

__all__ = ["FarcallCheckpointEngine"]


@CheckpointEngineRegistry.register("farcall")
class FarcallCheckpointEngine(CheckpointEngine):  # type: ignore[misc]  # verl has no types
    """verl's side of a store that ``farcall weights --listen`` keeps.

    Args:
        bucket_size: verl's; it is not used, as the store sends blocks of its own size.
        address: of the store, ``HOST:PORT``.
        is_master: verl's; it is not used, as ``build_topology`` names the sender.
        timeout: how long a rollout worker waits for the trainer's weights, in seconds.
    """

    def __init__(
        self, bucket_size: int, address: str, is_master: bool = False, timeout: float = 1800.0
    ) -> None:
        self.bucket_size = bucket_size
        self.is_master = is_master
        self._address = address
        self._timeout = timeout
        self._store: Store | None = None
        self._rank: int | None = None
        self._version: int | None = None

    def prepare(self) -> dict[str, Any]:
        """Connect; returns the newest version that there is."""
        return {"versions": self._opened().versions()}

    @classmethod
    def build_topology(
        cls, trainer_world_size: int, rollout_world_size: int, metadata: Sequence[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Agree on the number of the version: one more than the largest that any worker has seen."""
        seen = [number for each in metadata if each for number in each["versions"]]
        version = max(seen, default=0) + 1
        trainer = {
            "rank": [0] + [-1] * (trainer_world_size - 1),
            "version": [version] * trainer_world_size,
        }
        rollout = {
            "rank": list(range(1, rollout_world_size + 1)),
            "version": [version] * rollout_world_size,
        }
        return trainer, rollout

    def init_process_group(self, rank: int, version: int) -> None:
        """Note which version is next."""
        self._rank, self._version = rank, version

    def finalize(self) -> None:
        """Forget the version; the connection stays for the next one."""
        self._rank = self._version = None

    async def send_weights(
        self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None
    ) -> None:
        """Put the weights, from the trainer's rank 0. The others drive the generator, which may gather.

        The tensors are copied to the CPU's memory first, all of them.
        """
        version = self._agreed()
        state = {}
        for name, tensor in weights:
            if self._rank == 0:
                state[name] = tensor.detach().to("cpu", copy=True)
        if self._rank == 0:
            said = {} if global_steps is None else {"global_steps": global_steps}
            await asyncio.to_thread(self._opened().put, version, state, metadata=said)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Tensor]]:
        """Yield the weights, in the CPU's memory, once all of them are there."""
        async for each in self._weights_of(self._agreed()):
            yield each

    async def get_weights(self) -> AsyncIterator[tuple[str, Tensor]]:
        """Yield the newest weights that there are, without a trainer that sends now."""
        async for each in self._weights_of(None):
            yield each

    async def _weights_of(self, version: int | None) -> AsyncIterator[tuple[str, Tensor]]:
        lease: Lease = self._opened().lease(version, self._timeout)
        await asyncio.to_thread(lease.__enter__)
        try:
            for name, tensor in lease.items():
                yield name, tensor
        finally:
            await asyncio.to_thread(lease.__exit__, None, None, None)

    def _agreed(self) -> int:
        if self._version is None:
            raise WeightsError("verl has not called init_process_group for this update")
        return self._version

    def _opened(self) -> Store:
        if self._store is None:
            self._store = connect(self._address)
        return self._store
