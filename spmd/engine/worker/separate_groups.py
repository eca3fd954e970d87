"""The process groups of workers that have a rank for each of several devices.

c10d has one default process group in a process, so these groups are made without it: each rank has an agent
of its own, which the process's calls do not use, and the groups of a mesh stand on that. Collectives are
staged through the host.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import default_pg_timeout

from rpc.options import AgentOptions, GrpcRpcBackendOptions, parse_listen
from rpc.runtime.current import current_agent
from spmd.collectives.group import Group
from spmd.collectives.node import Node, find_node
from spmd.collectives.process_group import FarcallProcessGroup
from spmd.collectives.store import WorkerStore, fail_if_lost
from spmd.engine.program.layouts import line
from spmd.engine.program.program import MeshKey

__all__ = ["SeparateGroups"]


class SeparateGroups:
    """See ``WorkerGroups``."""

    def __init__(
        self, driver: str, workers: Sequence[str], rank: int, name: str, device: torch.device | None
    ) -> None:
        self._driver = driver
        self._workers, self._rank, self._name = workers, rank, name
        self._store: WorkerStore | None = None
        self._node: Node | None = None
        self._meshes: dict[MeshKey, _Mesh] = {}

    def form(self, generation: int, workers: Sequence[str] | None = None) -> None:
        self._workers = workers or self._workers
        store = self._store = WorkerStore(self._workers[0], f"{self._name}/{generation}/")
        with fail_if_lost(store, (self._driver, *self._workers)):
            self._node = find_node(
                store, self._rank, len(self._workers), default_pg_timeout.total_seconds(), _own_options()
            )

    def of_mesh(self, key: MeshKey) -> _Mesh:
        found = self._meshes.get(key)
        if found is None:
            assert self._node is not None
            found = self._meshes[key] = _Mesh(self._node, key, self._rank, f"mesh {len(self._meshes)}")
        return found

    def abort(self, reason: str) -> None:
        node = self._node
        if node is None:
            if self._store is not None:
                self._store.give_up(reason)
            return
        for mesh in list(self._meshes.values()):
            mesh.abort(reason)
        node.close()  # ends the forming of a mesh's groups, too

    def destroy(self) -> None:
        node, self._node = self._node, None
        while self._meshes:
            self._meshes.popitem()[1].destroy()
        if node is not None:
            node.close_if_unused()


def _own_options() -> AgentOptions:
    """Return the options of a rank's agent: those of the process's agent, without its port and devices."""
    agent: Any = current_agent()
    options: AgentOptions = copy.copy(agent.options)
    options.dynamic = False
    options.device_maps, options.devices = {}, []
    if isinstance(options, GrpcRpcBackendOptions):
        options.advertise = None
    listens = [each.partition(":")[2] for each in agent.addresses if not each.startswith("unix:")]
    if options.listen is not None or listens:
        host, _ = parse_listen(options.listen or listens[0])
        options.listen = f"[{host}]" if ":" in host else host
    return options


class _Mesh:
    """The process groups of a mesh, in which a worker's rank is its position along the axis."""

    def __init__(self, node: Node, key: MeshKey, rank: int, name: str) -> None:
        self._groups: list[FarcallProcessGroup] = []
        for axis in range(len(key.shape)):
            ranks = line(key, axis, rank)
            group = Group(
                node,
                ranks,
                ranks.index(rank),
                f"{name}, axis {axis}, with worker {min(ranks)}",
                default_pg_timeout.total_seconds(),
            )
            self._groups.append(FarcallProcessGroup(group))

    def get_group(self, mesh_dim: int) -> Any:
        return self._groups[mesh_dim]

    def abort(self, reason: str) -> None:
        for each in self._groups:
            each.group.abort(reason)

    def destroy(self) -> None:
        for each in self._groups:
            each.shutdown()
