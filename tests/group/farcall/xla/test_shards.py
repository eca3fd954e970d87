"""Workers' parts under XLA's names: shards, tensors made from parts, manual sharding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.group.farcall.xla.names import mesh_of, said, theirs
from tests.group.spmd.driven import WORKERS, driven

pytestmark = pytest.mark.processes


# ---- shards


# ---- tensors made from parts


def made(parts: list[torch.Tensor], shape: tuple[int, ...], spec: Any, *size: Any) -> torch.Tensor:
    sharding = mesh_of(*shape).get_op_sharding(spec)
    t: torch.Tensor = theirs().torch_xla._XLAC._global_tensor_from_cpu_shards(parts, sharding, *size)
    return t.cpu()


@driven
def test_parts_that_are_alike_make_a_replicated_tensor() -> None:
    part = torch.arange(4)
    assert made([part] * 4, (4,), (None,)).equal(part)
    assert made([part] * 4, (4,), (None,), part.shape).equal(part)
    for wrong in ((5,), (3,), (2, 2)):
        with pytest.raises(RuntimeError):
            made([part] * 4, (4,), (None,), torch.Size(wrong))
    assert made([part[:1]] * 4, (2, 2), (None,)).equal(part[:1])


@driven
def test_parts_are_put_together() -> None:
    ones = [torch.tensor([number]) for number in range(4)]
    assert made(ones, (4,), (0,)).tolist() == [0, 1, 2, 3]
    assert made(ones, (4,), (0,), torch.Size((1,))).tolist() == [0]  # the rest is padding
    with pytest.raises(RuntimeError):
        made(ones[:-1], (4,), (0,))
    for wrong in ((8,), (1, 4)):
        with pytest.raises(RuntimeError):
            made(ones, (4,), (0,), torch.Size(wrong))
    squares = [torch.tensor([[number]]) for number in range(4)]
    assert made(squares, (2, 2), (0, 1)).tolist() == [[0, 1], [2, 3]]
    assert made(squares[:2] * 2, (2, 2), (None, 1)).tolist() == [[0, 1]]


@driven
def test_what_is_beyond_the_size_is_padding_up_to_one_part() -> None:
    rows = [torch.arange(4) + 4 * number for number in range(4)]
    assert made(rows, (4,), (0,)).equal(torch.arange(16))
    for missing in range(4):
        assert made(rows, (4,), (0,), torch.Size((16 - missing,))).equal(torch.arange(16 - missing))
    for wrong in (17, 12, 1):
        with pytest.raises(RuntimeError):
            made(rows, (4,), (0,), torch.Size((wrong,)))


# ---- manual sharding


@driven
def test_only_what_is_computed_can_be_marked_manual() -> None:
    x = theirs()
    data = torch.zeros(3, 2).to("xla")
    with pytest.raises(RuntimeError, match="data tensors as manual"):
        x.xs._mark_manual_sharding(data)
    marked = x.xs._mark_manual_sharding(data + 1)
    assert (marked.sharding_type, marked.sharding_spec) == (x.xs.ShardingType.MANUAL, "{manual}")


@pytest.mark.parametrize(("spec", "part"), [((0, 1), (8, 2)), ((None, None), (8, 8))])
@driven
def test_a_tensor_becomes_its_parts_and_is_put_together_again(spec: Any, part: Any) -> None:
    x = theirs()
    binding, mesh = x.torch_xla._XLAC, mesh_of(1, WORKERS)
    t = torch.randn(8, 8).to("xla")
    with pytest.raises(RuntimeError, match="not sharded"):
        binding._spmd_full_to_shard_shape(t)
    sharding = mesh.get_op_sharding(spec)
    with pytest.raises(RuntimeError, match="not manual sharded"):
        binding._spmd_shard_to_full_shape(t, sharding, t.shape, t.dtype)
    marked = x.xs.mark_sharding(t, mesh, spec)
    with pytest.raises(RuntimeError, match="not manual sharded"):
        binding._spmd_shard_to_full_shape(marked.global_tensor, sharding, t.shape, t.dtype)
    parts = binding._spmd_full_to_shard_shape(marked.global_tensor)
    assert tuple(parts.shape) == part
    assert said(parts) == "{manual}"
    changed = x.xs._mark_manual_sharding(parts + 1)
    whole = binding._spmd_shard_to_full_shape(changed.global_tensor, sharding, t.shape, t.dtype)
    assert said(whole) == str(sharding)
    assert whole.cpu().equal(t.cpu() + 1)


@driven
def test_a_mark_is_cleared_and_parts_are_said_to_be_copies_of_the_whole() -> None:
    x = theirs()
    binding, kinds = x.torch_xla._XLAC, x.xs.ShardingType
    t = torch.zeros(8, 8).to("xla")
    t += 1
    x.xs.mark_sharding(t, mesh_of(1, WORKERS), (0, 1))
    parts = x.xs._mark_manual_sharding(x.xs.clear_sharding(t))
    replicated = binding.OpSharding([], [], [], kinds.REPLICATED)
    whole = binding._spmd_shard_to_full_shape(parts.global_tensor, replicated, t.shape, t.dtype)
    assert said(whole) == "{replicated}"
    assert whole.cpu().equal(torch.ones(8, 8))


@driven
def test_shardings_are_made_of_the_workers_numbers() -> None:
    x = theirs()
    made, kinds = x.torch_xla._XLAC.OpSharding, x.xs.ShardingType
    mesh = mesh_of(2, 2)
    assert made([[0, 1], [2, 3]], [], [], kinds.TILED) == mesh.get_op_sharding((0, 1))
    assert made([], [], [], kinds.REPLICATED) == mesh.get_op_sharding((None, None))
    with pytest.raises(ValueError, match="use mesh"):
        made([[[0, 1]], [[2, 3]]], [0, 1], [[0, 1], [2, 3]], kinds.PARTIAL)


@driven
def test_each_worker_draws_the_same_numbers_for_its_part() -> None:
    x = theirs()
    mesh = mesh_of(WORKERS)
    parts = x.xs.enable_manual_sharding(torch.zeros(8, 3).to("xla"), (0, None), mesh=mesh)
    torch.manual_seed(3)
    whole = x.xs.disable_manual_sharding(parts + torch.rand_like(parts), (0, None), (8, 3), mesh=mesh)
    torch.manual_seed(3)
    assert whole.cpu().equal(torch.rand(2, 3).repeat(WORKERS, 1))
