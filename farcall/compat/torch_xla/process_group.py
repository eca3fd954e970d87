"""``torch_xla.distributed.xla_backend``: importing it makes ``init_method="xla://"`` known, as theirs does.

In SPMD mode there is one process, so the group that a program makes so (on gloo, for what wants one) has one
rank. Groups of the backend ``xla`` have no meaning there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # which its stubs do not export
from torch.distributed.rendezvous import register_rendezvous_handler

from spmd.engine.errors import SpmdError

__all__: list[str] = []

_SCHEME = _BACKEND = "xla"


def _meet(url: str, timeout: Any = None, **options: Any) -> Iterator[tuple[HashStore, int, int]]:
    """A store of this process alone, its rank, and how many there are."""
    yield HashStore(), 0, 1
    raise RuntimeError(f"{url} has one process, which cannot meet again")


class MixedModesError(SpmdError, AssertionError):
    """SPMD mode is mixed with groups of processes. Theirs is an ``AssertionError``."""


def _refuse(*_: Any) -> Any:
    raise MixedModesError(
        "SPMD mode cannot be mixed with other distributed libraries: leave out init_process_group('xla') and "
        "what stands on it. For torch.distributed.checkpoint a group of 'gloo' will do"
    )


def _register() -> None:
    if _BACKEND not in dist.Backend.backend_list:
        register: Any = register_rendezvous_handler
        register(_SCHEME, _meet)
        dist.Backend.register_backend(_BACKEND, _refuse, devices=["cpu"])


_register()
