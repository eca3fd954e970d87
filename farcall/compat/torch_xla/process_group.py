"""``torch_xla.distributed.xla_backend``: the backend ``xla``, and ``init_method="xla://"``.

There is one process, so a group has one rank. In SPMD mode groups of the backend ``xla`` are refused, as
XLA refuses them.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # which its stubs do not export
from torch.distributed.rendezvous import register_rendezvous_handler

from farcall.compat.torch_xla.mode import is_spmd
from spmd.engine.errors import SpmdError

__all__ = ["register"]

_SCHEME = _BACKEND = "xla"


def _meet(url: str, timeout: Any = None, **options: Any) -> Iterator[tuple[HashStore, int, int]]:
    """A store of this process alone, its rank, and how many there are."""
    yield HashStore(), 0, 1
    raise RuntimeError(f"{url} has one process, which cannot meet again")


class MixedModesError(SpmdError, AssertionError):
    """SPMD mode is mixed with groups of processes. Theirs is an ``AssertionError``."""


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A group of one rank. Its collectives on the device are those of ``spmd/engine/driver/one_rank.py``."""
    if is_spmd():
        raise MixedModesError(
            "SPMD mode cannot be mixed with other distributed libraries: leave out init_process_group('xla') "
            "and all that needs it. For torch.distributed.checkpoint, a group of 'gloo' is enough"
        )
    if size != 1:
        raise SpmdError(
            f"a process group of the backend 'xla' has one process, and {size} are asked for: leave out rank "
            "and world_size, or use several workers in SPMD mode (torch_xla.runtime.use_spmd)"
        )
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def register() -> None:
    """Register the backend and the scheme with ``torch.distributed``. Idempotent."""
    if _BACKEND not in dist.Backend.backend_list:
        make_known: Any = register_rendezvous_handler
        make_known(_SCHEME, _meet)
        dist.Backend.register_backend(_BACKEND, _create, devices=["cpu"])
