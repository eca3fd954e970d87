"""The replica of this worker: the workers that are lost with it, and their process group.

A replica is formed once, by processes that all start at about the same time. Its process group is PyTorch's
default one. All workers of a replica run the block of an attempt, or none does (``Mates.begin_together``),
as their operations within the replica need each other. Each view gives the process group new connections, so
that an attempt that has ended early on one of the workers does not disturb the next one.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from datetime import timedelta
from time import monotonic
from typing import Any, Final

import torch.distributed as dist

from rpc.api import get_worker_info, rpc_async
from rpc.errors import InvalidOptionError, RendezvousError, RpcError
from rpc.group.peer import Peer
from rpc.runtime.blocking import Event, wait_for_event
from rpc.runtime.current import current_agent
from rpc.runtime.waits import waiting
from spmd.collectives.group import Group
from spmd.collectives.process_group import FarcallProcessGroup
from spmd.collectives.store import WorkerStore, fail_if_lost
from spmd.elastic.errors import ElasticError, Finished, PutOut
from spmd.elastic.losses import FINISHED

__all__ = ["Replica", "find_replica", "replica"]

logger = logging.getLogger(__name__)

_EXTENSION: Final = "spmd.elastic.replica"
_FORMING: Final = "spmd.elastic.forming"
_SIZE: Final = "FARCALL_REPLICA_SIZE"
_LOOK_SECONDS: Final = 0.05
_CHECK_SECONDS: Final = 2.0


class Replica:
    """The replica of this worker. For the training thread, except ``abort`` and ``close``.

    Args:
        members: the incarnations of its workers, by place.
        group: its process group; None if it is a single worker.
        store: the process group's, which C++ does not keep.
    """

    def __init__(
        self,
        members: tuple[int, ...],
        group: FarcallProcessGroup | None = None,
        store: WorkerStore | None = None,
    ) -> None:
        self.members, self.group, self._store = members, group, store
        self._formed: list[Group] = [] if group is None else [group.group]

    @property
    def size(self) -> int:
        """Number of its workers."""
        return len(self.members)

    def add(self, group: Group | None) -> None:
        """Remember the connections of a view. On any thread."""
        if group is not None:
            self._formed.append(group)

    def use(self, group: Group | None) -> None:
        """Have the process group use the connections of a view from now on, as all workers of the replica do.
        None of them uses those of earlier views any more.
        """
        if self.group is None or group is None or group is self.group.group:
            return
        group.timeout = self.group.group.timeout
        group.record.description = self.group.getGroupDesc()
        self.group.group = group
        while self._formed[0] is not group:
            self._formed.pop(0).close()

    def abort(self, reason: str) -> None:
        """End what is in progress on all workers of the replica, until the next ``use``."""
        if self.group is not None and not self.failed:
            self.group.group.abort(reason)

    @property
    def failed(self) -> bool:
        """Whether an operation of the process group has failed."""
        return self.group is not None and self.group.group.members.failed

    def close(self) -> None:
        """Destroy the process group."""
        while self._formed:
            self._formed.pop().close()
        if self.group is not None and dist.is_initialized() and dist.group.WORLD is self.group:
            dist.destroy_process_group()


def replica(size: int) -> FarcallProcessGroup:
    """Form the replica of this worker with others, and return its process group.

    Workers 0 to ``size - 1`` of the RPC group, by their ids, are a replica, the next ``size`` are another,
    and so on; the launcher's ranks are ids. The process group is also PyTorch's default one, so device meshes
    and ``fully_shard`` use it. Call it before a model is sharded, and then ``elastic.join`` with the same
    ``replica_size``, which otherwise forms the replica itself.

    Args:
        size: number of workers of a replica.

    Returns:
        The process group; the rank in it is this worker's place in the replica. A second call returns it,
        too.

    Raises:
        PutOut: a worker was lost while the replica was formed.
        Finished: the job has ended, and the other workers do not come any more.
        InvalidOptionError: ``size`` is not an integer of at least 2, or not that of ``farcall launch
            --replica``.
        ElasticError: the other workers have not come within the option ``rendezvous_timeout``; or there is
            another default process group, or a replica of another size.

    Example::

        rpc.init_rpc(f"trainer{rank}")  # a dynamic group
        mesh = DeviceMesh.from_group(elastic.replica(2), "cpu")
        fully_shard(model, mesh=mesh)
    """
    number: object = size
    if not isinstance(number, int) or isinstance(number, bool) or number < 2:
        raise InvalidOptionError(f"elastic.replica: size is {size!r}; it must be an integer of at least 2")
    group = find_replica(size).group
    assert group is not None
    return group


def find_replica(size: int) -> Replica:
    """Return the replica of this worker, which is formed if need be; for errors see ``replica``."""
    agent: Any = current_agent()
    given = os.environ.get(_SIZE)
    if given is not None and given != str(size):
        raise InvalidOptionError(
            f"elastic: replicas have {given} workers here (farcall launch --replica {given}), not {size}: "
            f"pass replica_size={given}"
        )
    if size == 1:
        return Replica((agent.incarnation,))
    found = agent.extensions.get(_EXTENSION)
    if isinstance(found, Replica):
        if found.size != size:
            raise ElasticError(f"elastic: this worker's replica has {found.size} workers, not {size}")
        return found
    if agent.is_static_group:
        raise ElasticError("elastic: replicas are formed in a dynamic group: farcall launch --dynamic")
    if dist.is_initialized():
        raise ElasticError(
            "elastic: the process group of a replica becomes PyTorch's default one, but there is one "
            "already: call elastic.replica or elastic.join instead of init_process_group"
        )
    formed = _form(agent, size)
    agent.extensions[_EXTENSION] = formed
    agent.lifecycle.hooks.close.append(formed.close)
    return formed


def _form(agent: Any, size: int) -> Replica:
    deadline = monotonic() + agent.options.rendezvous_timeout
    me = get_worker_info()
    first = me.id - me.id % size
    missing: list[str] = []
    check_at = 0.0
    with waiting(f"the other workers of its replica, {first} to {first + size - 1}", lambda: missing):
        while True:
            peers = [_peer(agent, each) for each in range(first, first + size)]
            missing[:] = [
                f"worker {first + place}"
                for place, each in enumerate(peers)
                if each is None or each.lost is not None
            ]
            if missing and monotonic() >= check_at:
                _check_finished(agent, me.name)  # then the others may not come any more
                check_at = monotonic() + _CHECK_SECONDS
            left = deadline - monotonic()
            if left < 0:
                raise ElasticError(
                    f"worker '{me.name}' has not formed its replica within "
                    f"{agent.options.rendezvous_timeout:g} s: it consists of the workers {first} to "
                    f"{first + size - 1} of the RPC group; missing: {', '.join(missing) or 'none'}. Check "
                    "that all of them run, and call elastic.join or elastic.replica with the same size"
                )
            if not missing and _agree(agent, peers):
                return _formed(peers, me.id - first, left)
            wait_for_event(Event(), monotonic() + _LOOK_SECONDS)


def _agree(agent: Any, peers: Sequence[Any]) -> bool:
    """Whether all of these workers form a replica with each other now. One that had another replica, since it
    has not ended yet, or another size does not.
    """
    mine = agent.extensions[_FORMING] = tuple(each.incarnation for each in peers)
    try:
        calls = [rpc_async(each.member.info, _forming, timeout=5) for each in peers if not each.is_self]
        return all(tuple(call.wait()) == mine for call in calls)
    except RpcError as error:
        logger.debug("a worker of the replica does not answer: %s", error)
        return False


def _forming() -> tuple[int, ...]:
    """Called remotely: the incarnations of the replica that this worker has, or forms."""
    agent: Any = current_agent()
    found: tuple[int, ...] = agent.extensions.get(_FORMING, ())
    return found


def _check_finished(agent: Any, name: str) -> None:
    with contextlib.suppress(TimeoutError, RendezvousError):  # another worker may serve the store soon
        found = (
            agent.extensions["rpc.keeper"]
            .ask(lambda store: store.get(FINISHED))
            .result(timeout=_CHECK_SECONDS)
        )
        if found is not None:
            raise Finished.at(int(found), name)


def _peer(agent: Any, worker: int) -> Peer | None:
    try:
        peer: Peer = agent.group.peers.find(worker)
    except RpcError:
        return None
    return peer


def _formed(peers: Sequence[Any], place: int, timeout: float) -> Replica:
    incarnations = tuple(each.incarnation for each in peers)
    store = WorkerStore(peers[0].name, f"elastic/replica/{'.'.join(f'{each:x}' for each in incarnations)}/")
    try:
        with fail_if_lost(store, [each.name for each in peers]):
            dist.init_process_group(
                "farcall",
                store=store,
                rank=place,
                world_size=len(peers),
                timeout=timedelta(seconds=timeout),
            )
    except (RpcError, dist.DistError) as error:
        names = ", ".join(f"'{each.name}'" for each in peers)
        raise PutOut(
            f"the replica of {names} was not formed: {error}. All its workers must start again to take part "
            "in the elastic job"
        ) from error
    group = dist.group.WORLD
    assert isinstance(group, FarcallProcessGroup)
    group.group.timeout = 0.0  # as long as its workers live, they may take any time
    return Replica(incarnations, group, store)
