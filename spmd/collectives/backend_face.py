"""The interface of a process group towards callers that ask it for a c10d backend, which is the group itself.

c10d's groups hold one backend per device type, and parts of PyTorch ask these for their name, timeout and
abilities (``group._get_backend(torch.device("cpu"))``). A group written in Python holds none.
"""

# mypy: disable-error-code="override"

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch.distributed import PrefixStore, ProcessGroup, Store  # type: ignore[attr-defined]

from spmd.collectives.arguments import accelerator, seconds_of
from spmd.collectives.group import Group

__all__ = ["BackendFace"]

_CPU: Final = torch.device("cpu")


class BackendFace(ProcessGroup):
    """A process group that is also the backend of its device types, the CPU and the accelerator.

    Args:
        group: the group, formed.
        store: store of its ranks; groups split from it get a part of it.

    Attributes:
        group: does the work.
    """

    supports_splitting = True
    supports_coalescing = False
    supports_shrinking = False
    supports_window = False
    supports_abort_hooks = False
    supports_completion_hooks = False
    supports_reconfigure = False
    supports_time_estimate = _supports_time_estimate = False

    def __init__(self, group: Group, store: Store | None) -> None:
        super().__init__(group.members.rank, group.members.size)  # type: ignore[call-arg]
        self.group = group
        self._store = store

    @property
    def _device_types(self) -> list[torch.device]:
        mine = accelerator()
        return [_CPU] if mine is None else [_CPU, torch.device(mine.type)]

    def get_backend(self, device: torch.device) -> Any:
        """Return the group itself, for the CPU and the accelerator.

        Raises:
            RuntimeError: the device is another one; c10d's groups raise the same.
        """
        kind = torch.device(device).type
        if kind not in [each.type for each in self._device_types]:
            raise RuntimeError(f"No backend type associated with device type {kind}")
        return self

    _get_backend = get_backend

    @property
    def options(self) -> Any:
        """The backend's options, as far as all backends have them."""
        members = self.group.members
        return SimpleNamespace(
            backend=self.name(),
            _timeout=timedelta(seconds=self.group.timeout),
            group_name=members.name,
            global_ranks_in_group=list(self.group.ranks),
        )

    def supports_tensor_alloc(self, device: object) -> bool:
        """Always false: the group does not allocate tensors that it can send faster than others."""
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of each operation from now on; 0 for no limit.

        Raises:
            TypeError, ValueError: it is not a ``timedelta``, or negative.
        """
        self.group.timeout = seconds_of(timeout, f"set_timeout at rank {self.group.members.rank}")

    _set_default_timeout = set_timeout

    def get_group_store(self) -> Store | None:
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self.group.messages.begun

    def _part(self, group: Group, store: Store | None) -> BackendFace:
        """Make a group like this one, of some of its ranks."""
        return type(self)(group, store)

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> ProcessGroup | None:
        """Make a group of some of this group's ranks; returns None at a rank that is not one of them. All
        ranks must call it.

        Args:
            ranks: ranks in this group.
            timeout: timeout of forming the group and of each operation; default: this group's.
            opts: not used.
            group_name: name of the new group, the same on all ranks.
            group_desc: description of the new group.
            device_types: not used; the group takes tensors on all of its device types.
        """
        members = self.group.members
        if members.rank not in ranks:
            return None
        name = group_name or f"{members.name}:split:{','.join(map(str, ranks))}"
        seconds = self.group.timeout if timeout is None else seconds_of(timeout, f"split_group '{name}'")
        group = Group(
            self.group.node,
            [self.group.ranks[each] for each in ranks],
            list(ranks).index(members.rank),
            name,
            seconds,
        )
        part = self._part(group, None if self._store is None else PrefixStore(f"{name}/", self._store))
        if group_desc is not None:
            part._set_group_desc(group_desc)
        return part
