"""Where a module is parallelized: its name in the model, and the mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from spmd.tensor_parallel.errors import NotInMeshError, ParallelError, ParallelTypeError

__all__ = ["Site", "check_mesh"]


@dataclass(frozen=True, eq=False)
class Site:
    """A module's place. Immutable, and shared by copies of the module.

    Attributes:
        name: of the module in the model that was parallelized, ``""`` for the model itself.
        kind: the name of its class.
        mesh: one-dimensional.
        group: the mesh's process group.
        rank: in the mesh.
        size: of the mesh.
    """

    name: str
    kind: str
    mesh: DeviceMesh
    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, module: nn.Module, mesh: DeviceMesh, name: str = "") -> Site:
        """The site of a module.

        Raises:
            ParallelError: the mesh or the module's device will not do.
        """
        check_mesh(mesh, name or type(module).__name__)
        site = cls(name, type(module).__name__, mesh, mesh.get_group(), mesh.get_local_rank(), mesh.size())
        for key, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.device.type not in (mesh.device_type, "meta"):
                raise ParallelError(
                    site.says(f"expected {key} on the mesh's device, {mesh.device_type}, got {tensor.device}")
                )
        return site

    def says(self, complaint: str) -> str:
        """An error's message about this module on this rank."""
        name = f"module '{self.name}' ({self.kind})" if self.name else f"module {self.kind}"
        return f"rank {dist.get_rank()}, {name}: {complaint}"

    def check_input(self, given: Any, what: str = "input") -> None:
        """Is this a tensor on the mesh's device, and if distributed, on this mesh?

        Raises:
            ParallelTypeError: it is no tensor.
            ParallelError: it is elsewhere.
        """
        if not isinstance(given, Tensor):
            raise ParallelTypeError(
                self.says(f"expected {what} to be a torch.Tensor or DTensor, got {type(given).__name__}")
            )
        if given.device.type != self.mesh.device_type and given.device.type != "meta":
            raise ParallelError(
                self.says(
                    f"expected {what} on the mesh's device, {self.mesh.device_type}, got {given.device}"
                )
            )
        if (
            isinstance(given, DTensor)
            and given.device_mesh is not self.mesh
            and given.device_mesh != self.mesh
        ):
            raise ParallelError(
                self.says(f"expected {what} on the mesh {self.mesh}, got a DTensor on {given.device_mesh}")
            )

    def first_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
        """The input of a call, positional, or by keyword ``input`` or ``x``, else the first; what is left.

        Raises:
            ParallelTypeError: there is none, or it is no tensor.
            ParallelError: it is elsewhere.
        """
        if args:
            given, *rest = args
        else:
            name = next((name for name in ("input", "x", *kwargs) if name in kwargs), None)
            if name is None:
                raise ParallelTypeError(self.says("expected an input, got no argument"))
            given, rest = kwargs.pop(name), []
        self.check_input(given)
        return given, tuple(rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> Site:
        return self


def check_mesh(mesh: DeviceMesh, name: str) -> None:
    """Can a module be parallelized over this mesh, by this process?

    Raises:
        ParallelTypeError: it is no mesh.
        ParallelError: it has more than one dimension, or ranks that the process group has not.
        NotInMeshError: this process is not in it.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ParallelTypeError(f"module {name}: expected a DeviceMesh, got {type(mesh).__name__}")
    rank = dist.get_rank()
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        dimension = names[-1] if names else "tp"
        raise ParallelError(
            f"rank {rank}, module {name}: expected a one-dimensional mesh, got {mesh.ndim} dimensions "
            f"{names or tuple(mesh.shape)}: slice it, as in mesh[{dimension!r}]"
        )
    ranks = mesh.mesh.flatten().tolist()
    if max(ranks) >= dist.get_world_size():
        raise ParallelError(
            f"rank {rank}, module {name}: expected a mesh within the group's {dist.get_world_size()} ranks, "
            f"got one of the ranks {ranks}"
        )
    if mesh.get_coordinate() is None:
        raise NotInMeshError(
            f"rank {rank}, module {name}: expected a rank of the mesh, {ranks}, to call this, got {rank}"
        )
    if mesh.device_type != "cpu" and not getattr(torch, mesh.device_type).is_available():
        raise ParallelError(
            f"rank {rank}, module {name}: expected a mesh whose device is there, got {mesh.device_type}"
        )
