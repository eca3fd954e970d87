"""What lies where: against the definition, for every spec on every small mesh."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from spmd.engine.program.program import REPLICATED, Layout, MeshKey
from spmd.sharding.mesh import Mesh
from spmd.sharding.op_sharding import MANUAL, WHOLE, OpSharding, ShardingType

MESHES = [(1,), (4,), (1, 2), (3, 2), (2, 2, 2)]


def specs(axes: int, dims: int) -> list[tuple[tuple[int, ...], ...]]:
    """Every way to cut ``dims`` dimensions with some of the axes, in any order."""
    found = []
    for count in range(axes + 1):
        for used in itertools.permutations(range(axes), count):
            for cuts in itertools.combinations_with_replacement(range(count + 1), dims - 1):
                bounds = (0, *cuts, count)
                found.append(tuple(used[a:b] for a, b in itertools.pairwise(bounds)))
    return found


EVERY = [pytest.param(shape, dims, id=f"{shape}-{dims}") for shape in MESHES for dims in (1, 2, 3)]


def mesh_of(shape: tuple[int, ...]) -> Mesh:
    """One whose workers are not in order."""
    return Mesh(np.random.default_rng(7).permutation(math.prod(shape)), shape)


def xla_device_list(mesh: Mesh, axes: tuple[tuple[int, ...], ...]) -> tuple[list[int], list[int]]:
    """Tiles and devices, found by going through the mesh tile by tile."""
    tiles = [math.prod(mesh.mesh_shape[axis] for axis in each) for each in axes]
    used = [axis for each in axes for axis in each]
    order = used + [axis for axis in range(len(mesh.mesh_shape)) if axis not in used]
    devices = []
    for place in itertools.product(*(range(mesh.mesh_shape[axis]) for axis in order)):
        index = [0] * len(order)
        for axis, position in zip(order, place, strict=True):
            index[axis] = position
        devices.append(int(mesh.get_logical_mesh()[tuple(index)]))
    return tiles, devices


@pytest.mark.parametrize(("shape", "dims"), EVERY)
def test_a_spec_lists_tiles_and_devices_as_xla_does(shape: tuple[int, ...], dims: int) -> None:
    mesh = mesh_of(shape)
    for axes in specs(len(shape), dims):
        tiles, devices = xla_device_list(mesh, axes)
        sharding = mesh.get_op_sharding(axes)
        if math.prod(tiles) == 1:
            assert sharding == WHOLE
            continue
        replicas = len(devices) // math.prod(tiles)
        whole = ",".join(map(str, [*tiles, replicas] if replicas > 1 else tiles))
        last = " last_tile_dim_replicate" if replicas > 1 else ""
        assert str(sharding) == f"{{devices=[{whole}]{','.join(map(str, devices))}{last}}}"


@pytest.mark.parametrize(("shape", "dims"), EVERY)
def test_the_layout_of_a_spec_is_described_by_the_same_words(shape: tuple[int, ...], dims: int) -> None:
    mesh = mesh_of(shape)
    for axes in specs(len(shape), dims):
        for size in (math.prod(shape), 5):
            layout = mesh.layout(axes, (size,) * dims)
            assert OpSharding.of_layout(layout, dims) == mesh.get_op_sharding(axes)


def local_by_layout(whole: torch.Tensor, layout: Layout, device: int) -> torch.Tensor:
    """What a worker holds as DTensor cuts: dimension by dimension of the mesh, pieces of pieces."""
    if layout.mesh is None:
        return whole
    places = np.array(layout.mesh.devices).reshape(layout.mesh.shape)
    (place,) = np.argwhere(places == device)
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Shard):
            chunks = list(torch.chunk(whole, layout.mesh.shape[axis], dim=placement.dim))
            empty = whole.narrow(placement.dim, 0, 0)
            whole = chunks[place[axis]] if place[axis] < len(chunks) else empty
    return whole


@pytest.mark.parametrize(("shape", "dims"), EVERY)
def test_a_worker_holds_by_its_layout_what_its_indices_say(shape: tuple[int, ...], dims: int) -> None:
    mesh = mesh_of(shape)
    for axes in specs(len(shape), dims):
        for size in (math.prod(shape), 5, 1):
            whole = torch.arange(size**dims).reshape((size,) * dims)
            sharding = mesh.get_op_sharding(axes)
            layout = mesh.layout(axes, whole.shape)
            for device in range(mesh.size()):
                held = whole[sharding.indices(whole.shape, device)]
                assert held.equal(local_by_layout(whole, layout, device).reshape(held.shape))
                full = sharding.shard_shape(whole.shape)
                assert all(size <= most for size, most in zip(held.shape, full, strict=True))


@pytest.mark.parametrize(("shape", "dims"), EVERY)
def test_workers_with_one_tile_have_different_replica_ids(shape: tuple[int, ...], dims: int) -> None:
    mesh = mesh_of(shape)
    for axes in specs(len(shape), dims):
        sharding = mesh.get_op_sharding(axes)
        held: dict[str, list[int]] = {}
        for device in range(mesh.size()):
            tile = str(sharding.indices((64,) * dims, device))
            held.setdefault(tile, []).append(sharding.replica_id(device))
        assert all(sorted(each) == list(range(len(each))) for each in held.values())


@given(st.data())
def test_text_is_read_as_it_was_written(data: st.DataObject) -> None:
    tiles = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    replicas = data.draw(st.integers(1, 3))
    devices = data.draw(st.permutations(range(math.prod(tiles) * replicas)))
    sharding = OpSharding.tiled(tiles, devices)
    assert OpSharding.parse(str(sharding)) == sharding


def test_kinds_of_sharding() -> None:
    assert OpSharding.tiled((1, 1), (0, 1)).type is ShardingType.REPLICATED
    assert OpSharding.tiled((1, 2), (0, 1)).type is ShardingType.TILED
    assert OpSharding.tiled((1, 2), (0, 1, 2, 3)).type is ShardingType.PARTIAL
    assert OpSharding.parse("{manual}") is MANUAL
    assert str(WHOLE) == "{replicated}"


@pytest.mark.parametrize("text", ["", "devices", "{devices=[2]0}", "{devices=[2,2]0,1,2,3", "{devices=[]}"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="sharding"):
        OpSharding.parse(text)


def test_a_sum_still_to_be_taken_counts_as_taken() -> None:
    mesh = MeshKey((0, 1, 2, 3), (2, 2))
    assert OpSharding.of_layout(Layout(mesh, (Partial(), Replicate())), 2) == WHOLE
    cut = OpSharding.of_layout(Layout(mesh, (Partial(), Shard(1))), 2)
    assert str(cut) == "{devices=[1,2,2]0,2,1,3 last_tile_dim_replicate}"


def test_axes_of_one_worker_leave_no_trace_in_a_layout() -> None:
    assert Mesh(range(4), (1, 4, 1)).layout((0, 1), (8, 8)) == Mesh(range(4), (4,)).layout((None, 0), (8, 8))
    assert Mesh([0], (1, 1)).layout((0, 1), (8, 8)) == REPLICATED


def test_axes_that_a_tuple_names_out_of_order_change_places() -> None:
    layout = Mesh(range(8), (2, 2, 2)).layout(((2, 0), None), (8, 8))
    assert layout == Layout(MeshKey((0, 4, 2, 6, 1, 5, 3, 7), (2, 2, 2)), (Shard(0), Replicate(), Shard(0)))


def test_axes_are_made_one_where_pieces_of_pieces_would_be_others() -> None:
    mesh = Mesh(range(4), (2, 2))
    assert mesh.layout(((0, 1),), (5,)) == Layout(MeshKey((0, 1, 2, 3), (4,)), (Shard(0),))
    assert mesh.layout(((0, 1),), (8,)) == Layout(MeshKey((0, 1, 2, 3), (2, 2)), (Shard(0), Shard(0)))
