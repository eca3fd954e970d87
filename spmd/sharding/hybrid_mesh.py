"""Meshes over several hosts: axes that cross hosts outside, axes within a host inside.

A *slice* is a set of workers with a fast network among them: for us, the workers of one host. If workers
report their positions in a torus (``coords``), each axis of the mesh gets one or more whole axes of the
torus: the last axis of the mesh, which communicates most, is assigned first, and gets as many as possible.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spmd.sharding.devices import attributes
from spmd.sharding.mesh import Mesh

__all__ = ["HybridMesh", "assign_torus"]


class HybridMesh(Mesh):
    """A mesh whose shape is the product, axis by axis, of that within a host and that over hosts.

    Args:
        ici_mesh_shape: the shape within a slice, the axis that communicates most last.
        dcn_mesh_shape: the shape over slices. None if there is one slice.
        axis_names: a name for each axis.
        device_attributes: of each worker, by default what :func:`spmd.sharding.devices.attributes` says:
            ``name`` ending in the worker's number; ``slice_index``, unless there is one slice;
            ``coords``, three numbers, if it stands in a torus.

    Raises:
        ValueError: the shapes do not fit the slices or their workers.
        NotImplementedError: no whole axes of the torus make up an axis of the mesh.

    Example, eight workers on two hosts::

        >>> HybridMesh((2, 2), (2, 1), ("data", "model")).shape()
        OrderedDict({'data': 4, 'model': 2})
    """

    def __init__(
        self,
        ici_mesh_shape: Sequence[int],
        dcn_mesh_shape: Sequence[int] | None = None,
        axis_names: Sequence[str] | None = None,
        *,
        device_attributes: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        if dcn_mesh_shape is None:
            dcn_mesh_shape = (1,) * len(ici_mesh_shape)
        if len(ici_mesh_shape) != len(dcn_mesh_shape):
            raise AssertionError(
                f"ici_mesh_shape {tuple(ici_mesh_shape)} and dcn_mesh_shape {tuple(dcn_mesh_shape)} need one "
                "entry each for every axis of the mesh"
            )
        workers = sorted(attributes() if device_attributes is None else device_attributes, key=_number)
        several = "slice_index" in workers[0]
        if several and math.prod(dcn_mesh_shape) == 1:
            raise ValueError("Provide dcn_mesh_shape to create a mesh for multislice")
        if not several and math.prod(dcn_mesh_shape) > 1:
            raise ValueError("Invalid dcn_mesh_shape for single slice mesh")
        self.ici_mesh_shape = tuple(ici_mesh_shape)
        self.dcn_mesh_shape = tuple(dcn_mesh_shape)
        slices: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
        for worker in workers:
            slices[worker.get("slice_index", 0)].append(worker)
        if math.prod(dcn_mesh_shape) != len(slices):
            raise ValueError(
                f"Number of slices {len(slices)} must equal the product of dcn_mesh_shape {dcn_mesh_shape}"
            )
        blocks = np.empty(len(slices), dtype=object)
        for place, index in enumerate(sorted(slices)):
            blocks[place] = _arranged(slices[index], self.ici_mesh_shape)
        ids = np.block(blocks.reshape(self.dcn_mesh_shape).tolist())
        super().__init__(ids, ids.shape, axis_names)


def _number(worker: Mapping[str, Any]) -> int:
    return int(str(worker["name"]).rpartition(":")[2])


def _arranged(workers: Sequence[Mapping[str, Any]], shape: Sequence[int]) -> np.ndarray:
    """The numbers of one slice's workers, as an array of this shape."""
    if math.prod(shape) != len(workers):
        raise ValueError(
            f"Number of devices {len(workers)} must equal the product of mesh_shape {tuple(shape)}"
        )
    if "coords" not in workers[0]:
        return np.array([_number(worker) for worker in workers]).reshape(shape)
    places = [tuple(worker["coords"]) for worker in workers]
    torus = np.empty([max(each) + 1 for each in zip(*places, strict=True)], dtype=int)
    for place, worker in zip(places, workers, strict=True):
        torus[place] = _number(worker)
    axes = assign_torus(torus.shape, shape)
    order = [axis for each in axes for axis in each]
    rest = [axis for axis in range(torus.ndim) if axis not in order]
    return torus.transpose(order + rest).reshape(shape)


def assign_torus(torus: Sequence[int], shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Which axes of a torus make up each axis of a mesh.

    Raises:
        NotImplementedError: some axis is no product of axes that are left.

    Example::

        >>> assign_torus((4, 4, 16), (16, 16))
        [(2,), (0, 1)]
    """
    left = [axis for axis, size in enumerate(torus) if size > 1]
    assigned: list[tuple[int, ...]] = [()] * len(shape)
    for index, size in reversed(list(enumerate(shape))):
        if size == 1:
            continue
        candidates = itertools.chain.from_iterable(
            itertools.combinations(left, count) for count in range(len(left), 0, -1)
        )
        found = next((each for each in candidates if math.prod(torus[axis] for axis in each) == size), None)
        if found is None:
            raise NotImplementedError(
                f"Failed to find assignment for logical_axis_index {index} of size {size}: each axis of the "
                f"mesh {tuple(shape)} must be a product of whole axes of the torus {tuple(torus)}, of which "
                f"{[torus[axis] for axis in left]} are left"
            )
        assigned[index] = found
        left = [axis for axis in left if axis not in found]
    return assigned
