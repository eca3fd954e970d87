"""Random numbers for sharded tensors are those of one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional

from spmd.tensor_parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from spmd.tensor_parallel.random_numbers import draw_as_one_process
from tests.group.spmd.meshes import in_mesh, part, whole
from tests.support.default_device import DEVICE


@in_mesh(2)
def test_dropout_on_shards_is_that_of_one_process(mesh: DeviceMesh) -> None:
    x = torch.randn(4, 8, 6)
    for p in (0.3, 0.0, 1.0):
        for dim in (0, 1, -1):
            alone = nn.Dropout(p)
            torch.manual_seed(1)
            expected = alone(x)
            following = torch.rand(2)
            shards = parallelize_module(
                nn.Dropout(p), mesh, SequenceParallel(sequence_dim=dim, use_local_output=True)
            )
            for given in (part(x, dim, mesh), distribute_tensor(x, mesh, [Shard(dim)])):
                torch.manual_seed(1)
                torch.testing.assert_close(shards(given), part(expected, dim, mesh), rtol=0, atol=0)
                assert torch.equal(torch.rand(2), following)
            shards.eval()
            assert torch.equal(shards(part(x, dim, mesh)), part(x, dim, mesh))


@in_mesh(4)
def test_dropout_on_uneven_dtensors(mesh: DeviceMesh) -> None:
    x = torch.randn(4, 5, 6)
    module = parallelize_module(nn.Dropout(0.5), mesh, SequenceParallel())
    torch.manual_seed(1)
    expected = functional.dropout(x, 0.5)
    torch.manual_seed(1)
    result = module(distribute_tensor(x, mesh, [Replicate()]))
    assert result.placements == (Shard(1),)
    torch.testing.assert_close(whole(result), expected, rtol=0, atol=0)


@in_mesh(2)
def test_independent_dropout_differs_between_ranks_and_keeps_generators_together(mesh: DeviceMesh) -> None:
    style = SequenceParallel(use_local_output=True, independent_dropout=True)
    module = parallelize_module(nn.Dropout(0.5), mesh, style)
    first, second = module(torch.ones(1, 64, 1)).flatten(), module(torch.ones(1, 64, 1)).flatten()
    assert not first.equal(second)
    assert set(first.tolist()) == {0.0, 2.0}
    a, b = (torch.empty(65, device=DEVICE) for _ in range(2))
    dist.all_gather([a, b], torch.cat([first, torch.rand(1)]))
    assert not a[:64].equal(b[:64])
    assert a[64] == b[64], "the next number"


@pytest.mark.parametrize(
    "name",
    ["normal_", "uniform_", "exponential_", "bernoulli_", "random_", "trunc", "trunc, by rejection"],
)
@in_mesh(2)
def test_numbers_drawn_in_place(mesh: DeviceMesh, name: str) -> None:
    draw_as_one_process()
    for placement in (Shard(0), Shard(1), Replicate()):
        expected, drawn = torch.zeros(5, 7), distribute_tensor(torch.zeros(5, 7), mesh, [placement])
        following: list[Tensor] = []
        for tensor in (expected, drawn):
            torch.manual_seed(1)
            if name == "trunc":
                nn.init.trunc_normal_(tensor)
            elif name == "trunc, by rejection":  # with bounds that leave little
                nn.init.trunc_normal_(tensor, a=0.3, b=0.7)
            else:
                getattr(tensor, name)()
            following.append(torch.rand(2))
        torch.testing.assert_close(whole(drawn), expected, rtol=0, atol=0)
        assert torch.equal(*following)


NOT_CONTIGUOUS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "transposed": lambda x: x.t(),
    "gaps": lambda x: x[:, :5],
    "transposed gaps": lambda x: x.t()[:5],
    "permuted": lambda x: x.view(6, 2, 4).permute(2, 0, 1),
}


@pytest.mark.parametrize("layout", NOT_CONTIGUOUS)
@in_mesh(2)
def test_tensors_that_are_not_contiguous_are_drawn_as_by_one_process(mesh: DeviceMesh, layout: str) -> None:
    def draw(x: Tensor) -> list[Tensor]:
        torch.manual_seed(1)
        found = [functional.dropout(x), torch.rand_like(x), torch.randn_like(x), torch.randint_like(x, 99)]
        found.append(torch.rand_like(x, memory_format=torch.contiguous_format))
        found += [each(x).clone() for each in (Tensor.uniform_, Tensor.normal_, Tensor.bernoulli_)]
        found.append(found[0].normal_())
        return [whole(each) for each in found] + [torch.rand(2)]

    draw_as_one_process()
    expected = draw(NOT_CONTIGUOUS[layout](torch.ones(6, 8)))
    for placement in (Shard(0), Replicate()):
        sharded = distribute_tensor(torch.ones(6, 8), mesh, [placement])
        drawn = draw(NOT_CONTIGUOUS[layout](sharded))
        torch.testing.assert_close(drawn, expected, rtol=0, atol=0)


@in_mesh(2)
def test_dropout_on_shards_that_are_not_contiguous(mesh: DeviceMesh) -> None:
    module = parallelize_module(
        nn.Dropout(0.5), mesh, SequenceParallel(sequence_dim=0, use_local_output=True)
    )
    for x in (torch.ones(5, 8).t(), torch.ones(2, 3, 4).permute(2, 0, 1), torch.ones(4, 1).expand(4, 3)):
        torch.manual_seed(1)
        expected = functional.dropout(x)
        following = torch.rand(2)
        given = part(x, 0, mesh)
        strided = distribute_tensor(x, mesh, [Shard(0)])
        for each in (given, given.clone(), strided):
            torch.manual_seed(1)
            torch.testing.assert_close(module(each), part(expected, 0, mesh), rtol=0, atol=0)
            assert torch.equal(torch.rand(2), following)


@in_mesh(2)
def test_dropout_of_dtensors_between_layers(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 4))
    x = torch.randn(3, 4)
    torch.manual_seed(1)
    expected = model(x)
    parallelize_module(model, mesh, {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()})
    torch.manual_seed(1)
    torch.testing.assert_close(model(x), expected)


@in_mesh(1)
def test_partial_sums_cannot_be_drawn(mesh: DeviceMesh) -> None:
    draw_as_one_process()
    partial = DTensor.from_local(torch.zeros(3), mesh, [Partial()])
    with pytest.raises(ValueError, match=r"sharded or replicated tensor to draw, got \(Partial\(sum\),\)"):
        partial.normal_()


@in_mesh(2)
def test_ranks_that_are_seeded_differently_are_warned_of_dropout(mesh: DeviceMesh) -> None:
    plan = {"0": ColwiseParallel()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallelize_module(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)), mesh, plan)
        torch.manual_seed(mesh.get_local_rank())
        parallelize_module(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)), mesh, plan)
    with pytest.warns(UserWarning, match=r"rank \d: the ranks of .* have different random generators"):
        parallelize_module(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)), mesh, plan)
