"""Marks on tensors: what they say, what they do, what workers hold then."""

from __future__ import annotations

import ast
import contextlib
import copy
import io
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Replicate
from torch.nn.functional import pad

import spmd
from tests.group.spmd.driven import WORKERS, driven

pytestmark = pytest.mark.processes

IN_ORDER = ",".join(map(str, range(WORKERS)))


def on_device(t: Tensor) -> Tensor:
    return t.to(spmd.device())


def said(t: Any) -> str:
    """How a tensor says that it is cut."""
    spec: str = t.sharding_spec
    return spec


def mesh(*shape: int, names: tuple[str, ...] | None = None) -> spmd.Mesh:
    return spmd.Mesh(range(WORKERS), shape, names)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc2(torch.relu(self.fc1(x)))
        return result


# ---- what is said


@pytest.mark.parametrize(
    ("shape", "spec", "text"),
    [
        ((4,), ((0, 1),), "{devices=[4]0,1,2,3}"),
        ((4, 4), (None, (1, 0)), "{devices=[1,4]0,2,1,3}"),
        ((4, 4), (1, None), "{devices=[2,1,2]0,2,1,3 last_tile_dim_replicate}"),
        ((4, 4), (1, 0), "{devices=[2,2]0,2,1,3}"),
        ((4, 4, 4), (None, 0, 1), "{devices=[1,2,2]0,1,2,3}"),
        ((4, 4), (None, None), "{replicated}"),
        ((), (), "{replicated}"),
    ],
)
@driven
def test_every_form_of_spec(shape: Any, spec: Any, text: str) -> None:
    whole = torch.randn(shape)
    t = spmd.mark_sharding(on_device(whole), mesh(2, 2), spec)
    assert said(t) == text
    assert t.cpu().equal(whole)


@driven
def test_results_say_how_they_are_cut() -> None:
    x = spmd.mark_sharding(on_device(torch.randn(8, 16)), mesh(WORKERS), (0, None))
    model = TwoLayers().to(spmd.device())
    inside = model.fc1(x)
    assert said(inside) == f"{{devices=[4,1]{IN_ORDER}}}"
    assert said(torch.relu(inside)) == said(inside)
    assert said(inside.t()) == f"{{devices=[1,4]{IN_ORDER}}}"


@driven
def test_workers_in_another_order() -> None:
    backwards = spmd.Mesh(list(reversed(range(WORKERS))), (1, WORKERS))
    t: Any = spmd.mark_sharding(on_device(torch.arange(8.0).reshape(1, 8)), backwards, (0, 1))
    assert said(t) == "{devices=[1,4]3,2,1,0}"
    assert t.local_shards[3].data.tolist() == [[0, 1]]


@pytest.mark.parametrize("shape", [(WORKERS,), (2, 2)])
@driven
def test_values_are_the_same_with_workers_in_another_order(shape: tuple[int, ...]) -> None:
    backwards = spmd.Mesh([3, 1, 2, 0], shape)
    spec = (0, None) if len(shape) == 1 else (0, 1)
    whole = torch.randn(6, 9)
    t: Any = spmd.mark_sharding(on_device(whole), backwards, spec)
    torch.testing.assert_close((t * 1.0).cpu().sum(), whole.sum())
    torch.testing.assert_close(t.cumsum(0).cpu(), whole.cumsum(0))  # gathers
    torch.testing.assert_close((t @ t.t()).cpu(), whole @ whole.t(), rtol=1e-4, atol=1e-4)
    turned = spmd.mark_sharding(t + 1, backwards, (None, *spec[:1]))  # exchanges
    torch.testing.assert_close(turned.cpu(), whole + 1)
    scattered = spmd.mark_sharding(t.t() @ torch.ones_like(t), backwards, spec)
    torch.testing.assert_close(scattered.cpu(), whole.t() @ torch.ones(6, 9), rtol=1e-4, atol=1e-4)


# ---- what is refused


@driven
def test_another_cut_of_data_must_be_cleared_first() -> None:
    t = on_device(torch.randn(4, 4))
    spmd.mark_sharding(t, mesh(WORKERS), (None, None))
    spmd.mark_sharding(t, mesh(WORKERS), (0, None))  # over a replicated one
    spmd.mark_sharding(t, mesh(WORKERS), (0, None))  # the same
    with pytest.raises(RuntimeError, match="Existing annotation must be cleared first"):
        spmd.mark_sharding(t, mesh(WORKERS), (None, 0))
    spmd.annotate_custom_sharding(t, mesh(WORKERS), (None, 0))
    assert spmd.clear_sharding(t) is t
    assert said(t) == ""
    spmd.mark_sharding(t, mesh(WORKERS), (None, 0))


@driven
def test_what_is_computed_may_be_marked_anew() -> None:
    whole = torch.randn(4, 4)
    t = on_device(whole) + 1
    spmd.mark_sharding(t, mesh(WORKERS), (0, None))
    spmd.mark_sharding(t, mesh(WORKERS), (None, 0))
    assert said(t) == f"{{devices=[1,4]{IN_ORDER}}}"
    assert t.cpu().equal(whole + 1)


@driven
def test_specs_that_do_not_fit_are_refused() -> None:
    t = on_device(torch.randn(4, 4))
    with pytest.raises(
        AssertionError, match=r"Partition spec length \(1\) should be equal to the input rank \(2\)"
    ):
        spmd.mark_sharding(t, mesh(WORKERS), (0,))
    with pytest.raises(RuntimeError, match="move it with"):
        spmd.mark_sharding(torch.randn(4), mesh(WORKERS), (0,))
    with pytest.raises(AssertionError, match="must match the global number of devices"):
        spmd.Mesh(range(2), (2,))


@driven
def test_arguments_of_other_kinds_are_refused() -> None:
    t: Any = on_device(torch.randn(4, 4))
    wrong: Any
    for arguments, message in (
        ((t, None, (0, None)), r"expected a spmd\.Mesh, got NoneType"),
        ((nn.Linear(2, 2), mesh(WORKERS), (0, None)), "got Linear: of a module, mark the parameters"),
        ((t, mesh(WORKERS), 0), "a partition spec is a tuple with an entry for each of 2 dimensions"),
        ((t, mesh(WORKERS), "ab"), "a partition spec is a tuple with an entry for each of 2 dimensions"),
    ):
        wrong = arguments
        with pytest.raises(TypeError, match=message):
            spmd.mark_sharding(*wrong)
    placements: Any = (torch.ones(4), None, [Replicate()])
    with pytest.raises(TypeError, match=r"expected a spmd\.Mesh, got NoneType"):
        spmd.distribute_tensor(*placements)


# ---- what workers hold


def assert_shards_are(t: Any, whole: Tensor) -> None:
    assert len(t.local_shards) == WORKERS
    for shard in t.local_shards:
        assert shard.data.device.type == "cpu"
        assert shard.unpadded_data.equal(whole[shard.indices])


@pytest.mark.parametrize("size", [4, 5, 2, 9])
@driven
def test_shards_are_padded_with_zeros(size: int) -> None:
    whole = torch.arange(1.0, size + 1)
    t: Any = spmd.mark_sharding(on_device(whole), mesh(WORKERS), (0,))
    length = math.ceil(size / WORKERS)
    for number, shard in enumerate(t.local_shards):
        begin, end = min(number * length, size), min((number + 1) * length, size)
        assert shard.indices == [slice(begin, end, 1)]
        assert shard.data.equal(pad(whole[begin:end], (0, length - (end - begin))))
        assert shard.replica_id == 0
        assert shard.shard_device == f"CPU:{number}"


@driven
def test_replicas_are_numbered() -> None:
    whole = torch.arange(64.0).reshape(8, 8)
    t: Any = spmd.mark_sharding(on_device(whole), mesh(2, 2), (None, 1))
    assert [shard.replica_id for shard in t.local_shards] == [0, 0, 1, 1]
    assert [shard.indices[1].start for shard in t.local_shards] == [0, 4, 0, 4]
    assert_shards_are(t, whole)
    assert t.sharding_type is spmd.ShardingType.PARTIAL
    all_of_it: Any = spmd.mark_sharding(on_device(whole), mesh(2, 2), (None, None))
    assert [shard.replica_id for shard in all_of_it.local_shards] == [0, 1, 2, 3]
    assert all(shard.indices is ... for shard in all_of_it.local_shards)


@pytest.mark.parametrize("size", [8, 6])
@driven
def test_shards_can_be_changed_and_loaded(size: int) -> None:
    whole = torch.arange(1.0, size + 1)
    t: Any = spmd.mark_sharding(on_device(whole), mesh(WORKERS), (0,))
    shards = t.local_shards
    for shard in shards:
        shard.data *= -1
    t.load_local_shards_(shards)
    shards[0].data.zero_()  # they are the user's still
    assert t.cpu().equal(-whole)
    assert (t + 1).cpu().equal(1 - whole)
    with pytest.raises(RuntimeError, match="for 4 workers"):
        t.load_local_shards_(shards[:-1])
    shards[1].data = torch.randn(2 * size)
    with pytest.raises(RuntimeError, match="shard 1 has the shape"):
        t.load_local_shards_(shards)
    replicated: Any = on_device(whole)
    with pytest.raises(RuntimeError, match="replicated tensor"):
        replicated.load_local_shards_(replicated.local_shards)


# ---- what it does to programs


@driven
def test_changes_in_place_keep_the_cut() -> None:
    t = spmd.mark_sharding(on_device(torch.ones(4, 4)), mesh(1, WORKERS), (0, 1))
    before = said(t)
    t.add_(on_device(torch.ones(4, 4)))
    t *= 2
    assert said(t) == before
    spmd.sync()
    assert said(t) == before
    assert t.cpu().equal(torch.full((4, 4), 4.0))


@driven
def test_copies_are_cut_in_the_same_way() -> None:
    t = spmd.mark_sharding(on_device(torch.randn(4, 4)), mesh(2, 2), (0, 1))
    assert said(copy.deepcopy(t)) == said(t)
    assert said(t.clone()) == said(t)


@driven
def test_training_keeps_the_cut_of_parameters_and_gives_it_to_optimizer_state() -> None:
    model = TwoLayers()
    alone = copy.deepcopy(model)
    model.to(spmd.device())
    spmd.mark_sharding(model.fc1.weight, mesh(2, 2), (0, 1))
    before = said(model.fc1.weight)
    optimizer, other = torch.optim.Adam(model.parameters()), torch.optim.Adam(alone.parameters())
    for _ in range(3):
        x = torch.randn(8, 16)
        for each, inputs, steps in ((model, on_device(x), optimizer), (alone, x, other)):
            steps.zero_grad()
            each(inputs).square().mean().backward()
            steps.step()
    assert said(model.fc1.weight) == before
    assert optimizer.state[model.fc1.weight]["exp_avg"].sharding_spec == before
    for mine, its in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), its.detach())


@driven
def test_a_mark_with_gradients_cuts_the_gradient_too() -> None:
    x = on_device(torch.randn(8, 4)).requires_grad_()
    y = spmd.mark_sharding_with_gradients(x, mesh(WORKERS), (0, None))
    assert y is not x
    assert said(y) == f"{{devices=[4,1]{IN_ORDER}}}"
    assert said(x) == ""
    torch.autograd.backward((y * 2).sum())
    assert x.grad is not None
    assert said(x.grad) == f"{{devices=[4,1]{IN_ORDER}}}"
    assert x.grad.cpu().equal(torch.full((8, 4), 2.0))


# ---- the document


DOCUMENT = (Path(__file__).resolve().parents[4] / "docs" / "spmd.md").read_text()


@driven
def test_the_documents_program_runs() -> None:
    (program, *_) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT, re.DOTALL | re.MULTILINE)
    program = re.sub(r"^spmd\.(use_spmd|shutdown)\(.*\n", "", program, flags=re.MULTILINE)  # both are there
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(program, {})
    assert "step 2: " in printed.getvalue()
    assert printed.getvalue().endswith("{devices=[2,2]0,1,2,3}\n")


@driven
def test_the_documents_table_of_specs_is_right() -> None:
    rows = re.findall(r"^\| `(\(.*?\))` \| `(\{.*?\})` \|", DOCUMENT, re.MULTILINE)
    assert len(rows) == 5
    for spec, text in rows:
        sharding = mesh(2, 2, names=("data", "model")).get_op_sharding(ast.literal_eval(spec))
        assert str(sharding) == text


# ---- specs for loaders


@driven
def test_a_spec_applies_to_tensors_of_its_rank() -> None:
    spec = spmd.ShardingSpec(mesh(1, WORKERS), (0, 1))
    t = torch.randn(1, 8)
    assert spec.can_apply(t)
    assert not spec.can_apply(torch.randn(8))
    assert str(spec.xla_spec(t)) == f"{{devices=[1,4]{IN_ORDER}}}"
    assert spec.xla_spec(torch.randn(8)) is None
    moved = on_device(t)
    spec.apply(moved)
    assert said(moved) == f"{{devices=[1,4]{IN_ORDER}}}"


@driven
def test_tables_show_tensors() -> None:
    t = spmd.mark_sharding(on_device(torch.randn(4, 4)), mesh(2, 2), (0, 1))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        spmd.visualize_tensor_sharding(t, use_color=False)
    assert all(f"CPU {number}" in printed.getvalue() for number in range(WORKERS))
