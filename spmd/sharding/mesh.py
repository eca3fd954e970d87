"""Meshes: all workers, arranged along named axes."""

from __future__ import annotations

import ast
import functools
import math
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from spmd.engine.driver.start import global_device_count, is_spmd
from spmd.engine.program.program import Layout
from spmd.sharding.op_sharding import WHOLE, OpSharding, layout_of
from spmd.sharding.partition_spec import PartitionSpec, resolve

__all__ = ["Mesh", "check_mesh", "get_1d_mesh", "get_global_mesh", "made_op_shardings", "set_global_mesh"]


class Mesh:
    """All workers of the logical device, arranged along axes.

    Args:
        device_ids: the workers' numbers, each of them once, in any order; they fill the mesh row by row.
        mesh_shape: size along each axis.
        axis_names: a name for each axis; None for numbers only.

    Attributes:
        device_ids: int array of shape ``[number of workers]``.
        mesh_shape, axis_names: as given.

    Raises:
        AssertionError: these do not fit together, or do not name all workers.

    Example::

        >>> mesh = Mesh(range(8), (4, 2), ("data", "model"))
        >>> mesh.shape()
        OrderedDict({'data': 4, 'model': 2})
        >>> str(mesh.get_op_sharding(("model", None)))
        '{devices=[2,1,4]0,2,4,6,1,3,5,7 last_tile_dim_replicate}'
    """

    device_ids: np.ndarray
    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...] | None

    def __init__(
        self,
        device_ids: np.ndarray | Sequence[int],
        mesh_shape: Sequence[int],
        axis_names: Sequence[str] | None = None,
    ) -> None:
        ids = np.asarray(list(device_ids) if not isinstance(device_ids, np.ndarray) else device_ids)
        if ids.size and ids.dtype.kind not in "iu":
            raise AssertionError(f"Device IDs must be whole numbers, got: {ids.tolist()}")
        sizes = np.asarray(mesh_shape)
        if sizes.ndim != 1 or (sizes.size and sizes.dtype.kind not in "iu") or not all(sizes > 0):
            raise AssertionError(f"A mesh has a size of 1 or more along each axis, got: {mesh_shape}")
        size = math.prod(mesh_shape)
        if axis_names is not None:
            if len(axis_names) != len(mesh_shape):
                raise AssertionError(
                    f"Number of axis names ({len(axis_names)}) must match mesh dimensions ({len(mesh_shape)})"
                )
            if len(set(axis_names)) < len(axis_names):
                raise AssertionError(f"Axis names must be unique, got: {tuple(axis_names)}")
        if ids.size != size:
            raise AssertionError(f"Number of device IDs ({ids.size}) must match mesh size ({size})")
        if np.unique(ids).size < ids.size:
            raise AssertionError(f"Device IDs must be unique, got: {ids.tolist()}")
        if any(not 0 <= each < size for each in ids.ravel()):
            raise AssertionError(f"Device IDs must be less than mesh size ({size}), got: {ids.tolist()}")
        if is_spmd() and (workers := global_device_count()) != size:
            raise AssertionError(
                f"Number of device IDs ({size}) must match the global number of devices ({workers})"
            )
        self.device_ids = ids.ravel()
        self.mesh_shape = tuple(int(each) for each in mesh_shape)
        self.axis_names = None if axis_names is None else tuple(axis_names)

    def size(self) -> int:
        """Return the number of workers."""
        return math.prod(self.mesh_shape)

    def shape(self) -> OrderedDict[str | int, int]:
        """Return the size along each axis, by name, or by number if they have no names."""
        names: Sequence[str | int] = self.axis_names or range(len(self.mesh_shape))
        return OrderedDict(zip(names, self.mesh_shape, strict=True))

    def get_logical_mesh(self) -> np.ndarray:
        """Return the workers' numbers, an int array of ``mesh_shape``."""
        return self.device_ids.reshape(self.mesh_shape)

    def get_axis_name_idx(self, name: str) -> int | None:
        """Return the number of an axis; None if the mesh has none with this name."""
        if self.axis_names is None or name not in self.axis_names:
            return None
        return self.axis_names.index(name)

    def get_op_sharding(self, partition_spec: PartitionSpec) -> OpSharding:
        """How this spec cuts a tensor of as many dimensions over the mesh.

        Raises:
            ValueError, AssertionError: see :func:`spmd.sharding.partition_spec.resolve`.
        """
        spec = tuple(partition_spec)
        try:
            return self._op_sharding(spec)
        except TypeError:  # what cannot be hashed is no entry of a spec
            resolve(spec, self.axis_names, len(self.mesh_shape))
            raise

    @functools.lru_cache(maxsize=4096)  # noqa: B019  meshes are small
    def _op_sharding(self, partition_spec: PartitionSpec) -> OpSharding:
        axes = resolve(partition_spec, self.axis_names, len(self.mesh_shape))
        if not axes:
            return WHOLE
        order = [axis for each in axes for axis in each]
        rest = [axis for axis in range(len(self.mesh_shape)) if axis not in order]
        tiles = [math.prod(self.mesh_shape[axis] for axis in each) for each in axes]
        return OpSharding.tiled(tiles, self.get_logical_mesh().transpose(order + rest).ravel().tolist())

    @functools.lru_cache(maxsize=4096)  # noqa: B019  as above
    def layout(self, partition_spec: PartitionSpec, shape: tuple[int, ...]) -> Layout:
        """How the engine says that a tensor of this shape is cut by this spec."""
        axes = resolve(partition_spec, self.axis_names, len(self.mesh_shape))
        return layout_of(self.get_logical_mesh(), axes, shape)

    def __str__(self) -> str:
        return str(
            {
                "device_ids": self.device_ids.tolist(),
                "mesh_shape": self.mesh_shape,
                "axis_names": self.axis_names,
            }
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self})"

    @classmethod
    def from_str(cls, mesh_str: str) -> Mesh | None:
        """The mesh that ``str(mesh)`` described; None if the text describes none."""
        try:
            said = ast.literal_eval(mesh_str)
            return Mesh(said["device_ids"], said["mesh_shape"], said["axis_names"])
        except (SyntaxError, ValueError, TypeError, KeyError, AssertionError):
            return None


def check_mesh(mesh: object) -> None:
    """Check that ``mesh`` is a mesh.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"expected a spmd.Mesh, got {type(mesh).__name__}: {mesh!r}")


_global_mesh: Mesh | None = None


def set_global_mesh(mesh: Mesh | None) -> None:
    """Set the default mesh of this process. None removes it."""
    global _global_mesh
    if mesh is not None:
        check_mesh(mesh)
    _global_mesh = mesh


def get_global_mesh() -> Mesh | None:
    """Return the default mesh, which :func:`set_global_mesh` has set."""
    return _global_mesh


def made_op_shardings() -> int:
    """The number of shardings that meshes of this process have worked out; the same spec again is none."""
    return Mesh._op_sharding.cache_info().misses


def get_1d_mesh(axis_name: str | None = None) -> Mesh:
    """Return a mesh of all workers along one axis.

    Args:
        axis_name: the axis's name, if it has one.

    Example::

        >>> get_1d_mesh("data").shape()
        OrderedDict({'data': 4})
    """
    workers = global_device_count()
    return Mesh(range(workers), (workers,), None if axis_name is None else (axis_name,))
