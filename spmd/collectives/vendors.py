"""Process groups whose tensors on an accelerator go to the vendor's own backend, such as NCCL.

c10d replaces its group, which could hold several backends, by one that is written in Python. So a group of
``farcall`` holds a second one, of the vendor's backend, and passes it the operations whose tensors are on its
devices. When a rank is gone, the other group is aborted as well.

The second group has the same ranks and the same store, and is formed along with ours, as c10d forms all
backends of a group: if an operation formed it, a send would wait for ranks that take no part in it. Its name
is made from the name of ours. c10d's ``new_group`` would make it from the number of groups that this process
has, which may differ between the ranks, so it is formed without ``new_group``, and c10d does not count it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import Backend, Store, default_pg_timeout  # type: ignore[attr-defined]

from spmd.collectives import torch_internals
from spmd.collectives.arguments import accelerator
from spmd.collectives.group import Group
from spmd.collectives.node import exchanged
from spmd.collectives.process_group import FarcallProcessGroup

__all__ = ["VendorProcessGroup", "Vendors", "agreed", "vendors"]

_OPERATIONS: Final = (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "broadcast",
    "allgather",
    "all_gather_single",
    "all_gather_single_coalesced",
    "allgather_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "all_to_all_single",
    "alltoall",
    "send",
    "recv",
    "recv_anysource",
)
"""Operations that have tensors."""

_OTHERS: Final = ("farcall", "gloo", "mpi", "undefined")
"""Backends that are not a vendor's: tensors on an accelerator are staged by farcall instead."""


@dataclass(frozen=True)
class Vendors:
    """Backends of vendors.

    Attributes:
        backends: backends by type of device, as ``{"cuda": "nccl"}``.
    """

    backends: dict[str, str]

    @property
    def config(self) -> str:
        """With ours, in c10d's notation: ``cpu:farcall,cuda:nccl``."""
        return ",".join(f"{kind}:{name}" for kind, name in {"cpu": "farcall", **self.backends}.items())


def vendors() -> Vendors:
    """Return the backend that PyTorch has for the accelerator of this process, if any."""
    mine = accelerator()
    name = None if mine is None else Backend.default_device_backend_map.get(mine.type)
    if mine is None or name is None or name in _OTHERS or not dist.is_backend_available(name):
        return Vendors({})
    return Vendors({mine.type: name})


def agreed(
    mine: Vendors,
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta | None = None,
    place: str | None = None,
) -> Vendors:
    """Decide for all ranks alike: their backends, if each rank has the same ones; none otherwise.

    A rank that stages a tensor while another one hands it to a vendor's backend would wait for ever.

    Args:
        mine: the backends that this rank has.
        store: of the ranks, with keys that only this decision uses.
        rank, size: of this rank, and the number of ranks; all call this.
        timeout: maximum time to wait for the other ranks; default: c10d's, 30 minutes.
        place: name of this rank's device among all hosts, if no two ranks may have the same one.

    Raises:
        RendezvousTimeoutError: not all ranks have come in time; names the missing ones.
        StoreGivenUpError: forming the group was given up.
    """
    limit = (timeout or default_pg_timeout).total_seconds()
    text = json.dumps([mine.config, place]).encode()
    told = exchanged(store, "backends", text, rank, size, limit, lambda _, said: json.loads(said))
    places = [place for _, place in told if place is not None]
    alike = {config for config, _ in told} == {mine.config} and len(set(places)) == len(places)
    return mine if alike else Vendors({})


class _Forming(threading.local):
    """Whether this thread forms a vendor's group."""

    now = False


_forming: Final = _Forming()

_UNSPLIT: Final = SimpleNamespace(supports_splitting=False)
"""A backend that c10d does not split."""


class VendorProcessGroup(FarcallProcessGroup):
    """A process group with a second one for the tensors on the vendor's devices. All ranks make it together.

    Args:
        group: the group, formed.
        store: store of its ranks.
        vendors: the backends.
    """

    def __init__(self, group: Group, store: Store, vendors: Vendors) -> None:
        super().__init__(group, store)
        self.vendors = vendors
        self._formed: dict[str, Any] = {}
        group.members.watch(self._abort_others)
        _forming.now = True
        try:
            for kind, name in vendors.backends.items():
                self._formed[kind] = torch_internals.form_uncounted(
                    f"{group.members.name}:{kind}",
                    f"{kind}:{name}",
                    group.members.rank,
                    group.ranks,
                    store,
                    timedelta(seconds=group.timeout) if group.timeout else default_pg_timeout,
                )
        except BaseException:
            self.shutdown()
            raise
        finally:
            _forming.now = False
        self._abort_others()  # if a rank is gone since

    def _part(self, group: Group, store: Store | None) -> VendorProcessGroup:
        assert store is not None
        return type(self)(group, store, self.vendors)

    def of_device(self, kind: str) -> Any:
        """Return the group for a type of device: the one of the vendor's backend, or this one."""
        return self._formed.get(kind, self)

    def get_backend(self, device: torch.device) -> Any:
        if _forming.now:  # c10d asks for a backend to split, where a device is bound to this group
            return _UNSPLIT
        kind = torch.device(device).type
        formed = self.of_device(kind)
        return super().get_backend(device) if formed is self else formed._get_backend(torch.device(kind))

    _get_backend = get_backend

    def _start_coalescing(self, device: torch.device) -> None:
        self.of_device(device.type)._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        return self.of_device(device.type)._end_coalescing(device)

    def shutdown(self) -> None:
        super().shutdown()
        formed, self._formed = self._formed, {}
        for each in formed.values():
            each.shutdown()

    def _abort_others(self) -> None:
        """End the other groups, on another thread, as their backends may take long."""
        members = self.group.members
        if (members.failed or members.lost) and self._formed and not self.group.closed:
            self.group.node.run_soon([(self._abort, None)])

    def _abort(self, _: None) -> None:
        for each in list(self._formed.values()):
            each.abort()


def _first_tensor(arguments: Any) -> torch.Tensor | None:
    for each in arguments:
        found = each if isinstance(each, torch.Tensor) else None
        if isinstance(each, (list, tuple)):
            found = _first_tensor(each)
        if found is not None:
            return found
    return None


def _routed(name: str) -> Callable[..., Any]:
    mine = getattr(FarcallProcessGroup, name)

    def operation(self: VendorProcessGroup, *args: Any, **kwargs: Any) -> Any:
        tensor = _first_tensor(args)
        if tensor is None or tensor.is_cpu:
            return mine(self, *args, **kwargs)
        formed = self.of_device(tensor.device.type)
        return mine(self, *args, **kwargs) if formed is self else getattr(formed, name)(*args, **kwargs)

    operation.__name__ = operation.__qualname__ = name
    return operation


for _name in _OPERATIONS:
    setattr(VendorProcessGroup, _name, _routed(_name))
