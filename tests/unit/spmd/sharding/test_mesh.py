from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

from spmd.engine.errors import NotInSpmdModeError
from spmd.sharding.hybrid_mesh import HybridMesh, assign_torus
from spmd.sharding.mesh import Mesh, get_global_mesh, set_global_mesh


def test_a_mesh_says_its_shape_by_name_or_number() -> None:
    assert Mesh(range(8), (4, 2), ("x", "y")).shape() == OrderedDict(x=4, y=2)
    assert Mesh(range(8), (4, 2)).shape() == OrderedDict({0: 4, 1: 2})


def test_workers_fill_a_mesh_row_by_row() -> None:
    mesh = Mesh(np.array([3, 1, 2, 0]), (2, 2), ("x", "y"))
    assert mesh.get_logical_mesh().tolist() == [[3, 1], [2, 0]]
    assert mesh.size() == 4
    assert mesh.get_axis_name_idx("y") == 1
    assert mesh.get_axis_name_idx("z") is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0, 1], (1, 2), ("a", "b", "c")), r"Number of axis names \(3\) must match mesh dimensions \(2\)"),
        (([0, 1], (1, 2), ("a", "a")), "Axis names must be unique, got: "),
        (([0, 1], (2, 2)), r"Number of device IDs \(2\) must match mesh size \(4\)"),
        (([0, 0], (1, 2)), "Device IDs must be unique, got: "),
        (([10, 11], (1, 2)), r"Device IDs must be less than mesh size \(2\), got: "),
        (([0.5, 1], (1, 2)), "Device IDs must be whole numbers, got: "),
        (("01", (1, 2)), "Device IDs must be whole numbers, got: "),
        ((range(4), (-2, -2)), "A mesh has a size of 1 or more along each axis, got: "),
        ((range(4), (2.0, 2)), "A mesh has a size of 1 or more along each axis, got: "),
        ((range(4), 4), "A mesh has a size of 1 or more along each axis, got: "),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        Mesh(*arguments)


@pytest.mark.parametrize("names", [None, ("x", "y")])
def test_a_mesh_is_read_as_it_was_written(names: tuple[str, str] | None) -> None:
    mesh = Mesh([2, 0, 1, 3], (2, 2), names)
    read = Mesh.from_str(str(mesh))
    assert read is not None
    assert str(read) == str(mesh)


@pytest.mark.parametrize("text", ["", "{", "[]", "{'device_ids': [0]}", "__import__('os')"])
def test_text_that_describes_no_mesh_gives_none(text: str) -> None:
    assert Mesh.from_str(text) is None


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        (("z", None), ValueError, "Axis name z is not defined in the given mesh"),
        ((1.5, None), ValueError, "Spec type .* is not supported in partition spec"),
        ((["x", "y"], None), ValueError, "Spec type <class 'list'> is not supported in partition spec"),
        ((2, None), AssertionError, "contains out of bound index into mesh_shape."),
        ((0, 0), AssertionError, "Each device mesh dimension should appear at most once in partition_spec"),
        ((("x", 0), None), AssertionError, "Each device mesh dimension should appear at most once"),
        (((("x",), 1), None), AssertionError, "Partition spec cannot contain nested tuples"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(spec: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Mesh(range(4), (2, 2), ("x", "y")).get_op_sharding(spec)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ((("r", "b"), None), "{devices=[2,1,4]0,1,2,3,4,5,6,7 last_tile_dim_replicate}"),
        ((None, ("b", "m")), "{devices=[1,8]0,1,2,3,4,5,6,7}"),
        ((None, ("r", "m")), "{devices=[1,4,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}"),
        ((None, ("m", "b")), "{devices=[1,8]0,4,1,5,2,6,3,7}"),
        ((0, None), "{replicated}"),
        ((None,), "{replicated}"),
        ((), "{replicated}"),
    ],
)
def test_specs_as_xla_writes_them(spec: Any, text: str) -> None:
    assert str(Mesh(range(8), (1, 2, 4), ("r", "b", "m")).get_op_sharding(spec)) == text


def test_the_global_mesh_is_the_one_that_was_set() -> None:
    mesh = Mesh(range(2), (2,))
    set_global_mesh(mesh)
    assert get_global_mesh() is mesh
    set_global_mesh(None)
    assert get_global_mesh() is None


def test_only_a_mesh_is_the_global_mesh() -> None:
    wrong: Any = "data"
    with pytest.raises(TypeError, match=r"expected a spmd\.Mesh, got str: 'data'"):
        set_global_mesh(wrong)
    assert get_global_mesh() is None


def test_a_hybrid_mesh_is_of_workers_that_are_there() -> None:
    with pytest.raises(NotInSpmdModeError, match=r"call spmd\.use_spmd"):
        HybridMesh((2, 2))


def workers(*places: tuple[int, int, int]) -> list[dict[str, Any]]:
    """Workers in two slices of a torus: number, and coordinates."""
    return [
        {"name": f"TPU:{number}", "coords": [x, y, 0], "slice_index": index // 4}
        for index, (number, x, y) in enumerate(places)
    ]


TORI = workers((2, 0, 0), (1, 1, 0), (0, 0, 1), (3, 1, 1), (4, 0, 0), (7, 1, 0), (6, 0, 1), (5, 1, 1))


def test_slices_of_a_torus_are_put_side_by_side() -> None:
    for mesh in [
        HybridMesh(ici_mesh_shape=(2, 2), dcn_mesh_shape=(2, 1), device_attributes=TORI),
        HybridMesh((2, 2), (2, 1), ("data", "model"), device_attributes=TORI),
    ]:
        assert mesh.get_logical_mesh().tolist() == [[2, 1], [0, 3], [4, 7], [6, 5]]


def test_workers_of_a_host_stand_in_order() -> None:
    hosts = [{"name": f"CPU:{number}", "slice_index": number % 2} for number in range(8)]
    mesh = HybridMesh((1, 4), (2, 1), device_attributes=hosts)
    assert mesh.get_logical_mesh().tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_one_host_needs_no_shape_over_hosts() -> None:
    host = [{"name": f"CPU:{number}"} for number in range(8)]
    assert HybridMesh((2, 4), axis_names=("a", "b"), device_attributes=host).shape() == OrderedDict(a=2, b=4)


@pytest.mark.parametrize(
    ("slices", "within", "over", "message"),
    [
        (2, (4, 1), None, "Provide dcn_mesh_shape to create a mesh for multislice"),
        (1, (4, 1), (2, 1), "Invalid dcn_mesh_shape for single slice mesh"),
        (2, (4, 1), (4, 1), "Number of slices 2 must equal the product of dcn_mesh_shape"),
        (2, (2, 1), (2, 1), "Number of devices 4 must equal the product of mesh_shape"),
    ],
)
def test_shapes_that_do_not_fit_the_hosts_are_refused(
    slices: int, within: tuple[int, int], over: tuple[int, int] | None, message: str
) -> None:
    attributes = [
        {"name": f"CPU:{number}", **({"slice_index": number // 4} if slices > 1 else {})}
        for number in range(8)
    ]
    with pytest.raises(ValueError, match=message):
        HybridMesh(within, over, device_attributes=attributes)


def test_the_axis_that_communicates_most_takes_most_of_the_torus() -> None:
    assert assign_torus((4, 4, 16), (16, 16)) == [(2,), (0, 1)]
    assert assign_torus((2, 2, 1), (1, 2, 2)) == [(), (1,), (0,)]
    with pytest.raises(NotImplementedError, match="Failed to find assignment"):
        assign_torus((4, 4, 1), (2, 8))
