"""Workers of an RPC group become PyTorch's default process group."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from rpc.runtime.current import current_agent
from spmd.collectives.errors import StoreGivenUpError
from spmd.collectives.store import WorkerStore, fail_if_lost
from spmd.collectives.vendors import Vendors, agreed

__all__ = ["Forming"]

_EXTENSION: Final = "spmd.workers"


class Forming:
    """One worker's part in making workers the default process group, on the backend ``farcall``.

    Args:
        workers: the names of all, by rank. The first serves the store.
        name: of the group; no other group of these workers has it.
    """

    def __init__(self, workers: Sequence[str], name: str) -> None:
        self._workers = workers
        self._store = WorkerStore(workers[0], f"{name}/")

    def form(
        self,
        rank: int,
        driver: str | None = None,
        timeout: timedelta | None = None,
        vendors: Vendors | None = None,
        place: str | None = None,
    ) -> None:
        """Form it, together with the others.

        Args:
            rank: this worker's.
            driver: the name of a worker that is not in the group, and on which it depends.
            timeout: for forming it, and for each collective.
            vendors: the backends that this worker has for tensors on accelerators, which are used if all
                have the same ones; None: such tensors are staged through the host. All give it, or none.
            place: see ``agreed``.

        Raises:
            StoreGivenUpError: a worker is lost, or forming it was given up, here or on another worker.
        """
        # C++ does not keep the store. A previous group has ended.
        current_agent().extensions[_EXTENSION] = self._store
        needed = self._workers if driver is None else (driver, *self._workers)
        with fail_if_lost(self._store, needed):
            try:
                if vendors is not None:
                    vendors = agreed(vendors, self._store, rank, len(self._workers), timeout, place)
                dist.init_process_group(
                    "farcall" if vendors is None or not vendors.backends else vendors.config,
                    store=self._store,
                    rank=rank,
                    world_size=len(self._workers),
                    timeout=timeout,
                    pg_options=vendors,
                )
            except StoreGivenUpError as error:
                # How PyTorch came to the store explains nothing to the driver.
                raise StoreGivenUpError(str(error)) from None

    def give_up(self, reason: str) -> None:
        """Have ``form`` fail on all workers. From any thread."""
        self._store.give_up(reason)
