"""A process group whose members change: c10d's ``enable_reconfigure``, of PyTorch 2.14 and newer.

Each ``reconfigure`` forms a group among the workers whose handles it gets, which replaces the one before. Who
these workers are, the program decides; ``spmd/elastic`` is one way to agree.
"""

# mypy: disable-error-code="override"

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from rpc.runtime.interrupts import is_interruption
from spmd.collectives import torch_internals
from spmd.collectives.arguments import Arguments, seconds_of
from spmd.collectives.errors import CollectiveError
from spmd.collectives.group import Group
from spmd.collectives.handles import Workers
from spmd.collectives.process_group import FarcallProcessGroup
from spmd.collectives.work import GroupWork

__all__ = ["ReconfigurableProcessGroup"]


class _NoGroup:
    """Takes the place of a group that is not formed."""

    def __init__(self, name: str, rank: int, size: int, timeout: float, reason: str) -> None:
        self.members = SimpleNamespace(name=name, rank=rank, size=size, workers=[], failed=True)
        self.record = SimpleNamespace(name=name, description="")
        self.ranks: Sequence[int] = range(size)
        self.timeout = timeout
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise CollectiveError(
            f"process group '{self.members.name}' at rank {self.members.rank} is not formed: {self._reason}. "
            "Call reconfigure with the handles of its members"
        )

    def abort(self, reason: str) -> None:
        """Nothing is in progress."""

    def close(self) -> None:
        """There is nothing to leave."""


class ReconfigurableProcessGroup(FarcallProcessGroup):
    """The process group of backend ``farcall`` with ``enable_reconfigure``. It is not formed at first.

    Args:
        workers: the workers that this one can form groups with.
        name: name of the group.
        rank, size: rank and size until the first ``reconfigure``.
        timeout: default timeout in seconds of reconfigurations, and of operations.
        store: store of the group.
    """

    supports_reconfigure = True

    def __init__(
        self, workers: Workers, name: str, rank: int, size: int, timeout: float, store: Store | None
    ) -> None:
        group: Any = _NoGroup(name, rank, size, timeout, "it has not been configured yet")
        super().__init__(group, store)
        self._workers = workers
        self._used: set[int] = set()
        self._forming = threading.Lock()
        self._lock = threading.Lock()  # of ``group``
        self._is_shut_down = False

    def get_reconfigure_handle(self) -> str:
        """Return the text that names this worker, for the members of its next group."""
        return self._workers.handle

    def reconfigure(self, opts: Any) -> GroupWork:
        """Form a group anew. This rank leaves the one before; what is in progress there fails.

        Args:
            opts: c10d's ``ReconfigureOptions``: ``uuid``, a number that this group has not been formed with
                before; ``handles``, a list by rank, or a set, whose order is that of the texts; ``timeout``.
                All members pass the same. ``hints`` are ignored.

        Returns:
            A work, which fails if a member is lost or has not come in time; then operations of the group
            raise an error, until it is formed with another ``uuid``.

        Raises:
            RuntimeError: the ``uuid`` was used before.
            ValueError: the handles are not different ones, or this worker's is not among them.
        """
        handles = list(opts.handles) if isinstance(opts.handles, list) else sorted(opts.handles)
        mine = self.get_reconfigure_handle()
        if len(set(handles)) < len(handles):
            raise ValueError(f"reconfigure: a handle is given twice: {handles}")
        if mine not in handles:
            raise ValueError(f"reconfigure: this worker's handle {mine!r} is not among {handles}")
        given = getattr(opts, "timeout", None)
        timeout = self.group.timeout
        if given is not None and given.total_seconds() > 0:
            timeout = seconds_of(given, "reconfigure")
        with self._lock:
            if opts.uuid in self._used:
                raise RuntimeError(f"reconfigure: uuid {opts.uuid} was already used by this process group")
            self._used.add(opts.uuid)
        work = GroupWork(f"reconfigure with uuid {opts.uuid}", [])
        threading.Thread(
            target=self._form,
            args=(work, opts.uuid, handles, timeout),
            name="farcall-reconfigure",
            daemon=True,
        ).start()
        return work

    def _form(self, work: GroupWork, uuid: int, handles: list[str], timeout: float) -> None:
        rank = handles.index(self.get_reconfigure_handle())
        with self._forming:
            self.group.close()
            before = self.group.timeout
            try:
                group = self._formed(uuid, handles, rank, timeout)
                group.timeout = before
                self._replace(group)
            except BaseException as error:
                failed: Any = _NoGroup(self._name, rank, len(handles), before, str(error))
                self._replace(failed)
                work.finish(error)
                if is_interruption(error):
                    raise
                return
        work.finish()

    def _formed(self, uuid: int, handles: list[str], rank: int, timeout: float) -> Group:
        if self._is_shut_down:
            raise CollectiveError(f"process group '{self._name}' has been destroyed")
        key = f"reconfigure/{uuid}/{zlib.crc32(' '.join(handles).encode()):x}"
        node = self._workers.node(handles, key, timeout)
        try:
            return Group(node, range(len(handles)), rank, self._name, timeout)
        except BaseException:
            node.close_if_unused()
            raise

    def _replace(self, group: Group) -> None:
        with self._lock:
            if not self._is_shut_down or group.members.failed:
                self.group = group
                self._arguments = Arguments(self._name, group.members.rank, group.members.size)
                group.record.description = self._desc
                return
        group.close()
        raise CollectiveError(f"process group '{self._name}' has been destroyed")

    def _part(self, group: Group, store: Store | None) -> FarcallProcessGroup:
        return FarcallProcessGroup(group, store)

    def get_error(self) -> Any:
        """Return c10d's "no error": failures are raised by operations, and ended by ``reconfigure``."""
        return torch_internals.no_error()

    def shutdown(self) -> None:
        with self._lock:
            self._is_shut_down = True
            super().shutdown()
        self._workers.close()
