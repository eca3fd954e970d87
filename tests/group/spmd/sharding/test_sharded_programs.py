"""Whole programs on the logical device: FSDP, loaders, manual sharding, DTensor's functions."""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
import weakref
from collections import OrderedDict, UserDict
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import spmd
from spmd.fsdp import FSDPv2, checkpoint_module
from spmd.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from spmd.sharding import loader
from tests.group.spmd.driven import WORKERS, driven, driver

__all__ = ["driver"]

pytestmark = pytest.mark.processes

ROWS = f"{{devices=[{WORKERS},1]0,1,2,3}}"


def on_device(t: Tensor) -> Tensor:
    return t.to(spmd.device())


def fsdp_mesh() -> spmd.Mesh:
    return spmd.Mesh(range(WORKERS), (WORKERS, 1), ("fsdp", "model"))


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 12), nn.Linear(12, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return result


def layers(width: int = 8) -> nn.Sequential:
    return nn.Sequential(Layer(width), Layer(width), nn.Linear(width, 3))


BY_LAYER = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Layer})


def assert_trains_alike(model: nn.Module, alone: nn.Module, mesh: spmd.Mesh, axes: Any = "fsdp") -> None:
    """Three steps of both, on the same batches."""
    mine, its = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(alone.parameters())
    for _ in range(3):
        x, y = torch.randn(8, 8), torch.randint(3, (8,))
        cut = spmd.mark_sharding(on_device(x), mesh, (axes, None))
        mine.zero_grad()
        its.zero_grad()
        loss, expected = cross_entropy(model(cut), on_device(y)), cross_entropy(alone(x), y)
        torch.autograd.backward([loss, expected])
        mine.step()
        its.step()
        torch.testing.assert_close(loss.detach().cpu(), expected.detach(), rtol=1e-5, atol=1e-5)
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.detach().cpu(), other.detach(), rtol=1e-4, atol=1e-5)


# ---- FSDP


@pytest.mark.parametrize("wrapping", ["whole", "by layer", "by size", "each by hand"])
@driven
def test_fsdp_trains_as_one_process_does(wrapping: str) -> None:
    model = layers()
    alone = copy.deepcopy(model)
    mesh = fsdp_mesh()
    policies: dict[str, Any] = {
        "by layer": BY_LAYER,
        "by size": functools.partial(size_based_auto_wrap_policy, min_num_params=150),
    }
    if wrapping == "each by hand":
        for index in range(3):
            model[index] = FSDPv2(model[index], mesh)
    wrapped = FSDPv2(model, mesh=mesh, auto_wrap_policy=policies.get(wrapping))
    if wrapping == "by layer":
        assert [isinstance(wrapped[index], FSDPv2) for index in range(3)] == [True, True, False]
    assert_trains_alike(wrapped, alone, mesh)
    for parameter in wrapped.parameters():
        assert isinstance(parameter, nn.Parameter)
        assert isinstance(parameter, spmd.ShardedTensor)


@driven
def test_parameters_are_cut_along_their_largest_dimension_and_outputs_along_the_batch() -> None:
    wrapped = FSDPv2(nn.Linear(16, 8), mesh=fsdp_mesh())
    assert wrapped.weight.sharding_spec == "{devices=[1,4]0,1,2,3}"
    assert wrapped.bias.sharding_spec == "{devices=[4]0,1,2,3}"
    output = wrapped(on_device(torch.randn(8, 16)))
    assert output.sharding_spec == ROWS
    output.sum().backward()
    assert wrapped.weight.grad.sharding_spec == wrapped.weight.sharding_spec


@driven
def test_a_second_axis_cuts_the_batch_only() -> None:
    mesh = spmd.Mesh(range(WORKERS), (2, 2, 1), ("data", "fsdp", "tensor"))
    model = layers()
    alone = copy.deepcopy(model)
    wrapped = FSDPv2(model, mesh=mesh, extra_data_axis="data", auto_wrap_policy=BY_LAYER)
    assert wrapped[0].up.weight.sharding_spec == "{devices=[2,1,2]0,2,1,3 last_tile_dim_replicate}"
    assert wrapped(on_device(torch.randn(8, 8))).sharding_spec == ROWS
    assert_trains_alike(wrapped, alone, mesh, ("data", "fsdp"))


@pytest.mark.parametrize("how", ["checkpoint_module", "PyTorch's"])
@driven
def test_activations_can_be_computed_again(how: str) -> None:
    model = layers()
    alone = copy.deepcopy(model)
    for index in range(2):
        layer = model[index]
        if how == "checkpoint_module":
            assert checkpoint_module(layer) is layer
        else:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    wrapped = FSDPv2(model, mesh=fsdp_mesh(), auto_wrap_policy=BY_LAYER)
    assert_trains_alike(wrapped, alone, fsdp_mesh())


@driven
def test_parameters_on_the_meta_device_are_made_where_they_are() -> None:
    with torch.device("meta"):
        model = layers()
    wrapped = FSDPv2(model, mesh=fsdp_mesh(), auto_wrap_policy=BY_LAYER)
    assert all(isinstance(each, spmd.ShardedTensor) for each in wrapped.parameters())
    assert float(wrapped[0].up.weight.detach().abs().sum()) > 0
    assert float(wrapped[0].norm.weight.detach().sum()) == 8
    with torch.device("meta"):
        bare = nn.MultiheadAttention(4, 2)
    with pytest.raises(RuntimeError, match="no reset_parameters"):
        FSDPv2(bare, mesh=fsdp_mesh())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.lstm(x)[0]
        return result


@driven
def test_recurrent_layers_can_be_wrapped() -> None:
    model = Recurrent()
    alone = copy.deepcopy(model)
    wrapped = FSDPv2(model, mesh=fsdp_mesh())
    x = torch.randn(8, 3, 4)
    torch.testing.assert_close(wrapped(on_device(x)).detach().cpu(), alone(x).detach())


@pytest.mark.parametrize("made_on", ["cpu", "meta"])
@driven
def test_what_layers_share_stays_shared(made_on: str) -> None:
    with torch.device(made_on):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
    wrapped = FSDPv2(model, mesh=fsdp_mesh())
    assert wrapped[0].weight is wrapped[1].weight
    assert len(list(wrapped.parameters())) == 3


@driven
def test_modules_that_a_policy_wraps_share_what_they_shared() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    alone = copy.deepcopy(model)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1)
    wrapped = FSDPv2(model, mesh=fsdp_mesh(), auto_wrap_policy=policy)
    assert len(list(wrapped.parameters())) == 3
    assert_trains_alike(wrapped, alone, fsdp_mesh())


@driven
def test_modules_that_are_wrapped_one_by_one_share_what_they_shared() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    alone = copy.deepcopy(model)
    for place in (0, 2):
        model[place] = FSDPv2(model[place], mesh=fsdp_mesh())
    wrapped = FSDPv2(model, mesh=fsdp_mesh())
    assert len(list(wrapped.parameters())) == 3
    assert_trains_alike(wrapped, alone, fsdp_mesh())


@driven
def test_what_is_shared_and_changed_between_two_wraps_is_refused() -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight
    shared = first.weight
    FSDPv2(first, mesh=fsdp_mesh())
    with torch.no_grad():
        shared.add_(1)
    with pytest.raises(RuntimeError, match="'weight' of Linear is shared"):
        FSDPv2(second, mesh=fsdp_mesh())


@driven
def test_gradients_of_gradients_come_to_wrapped_parameters() -> None:
    model = layers()
    alone = copy.deepcopy(model)
    wrapped = FSDPv2(model, mesh=fsdp_mesh(), auto_wrap_policy=BY_LAYER)
    x = torch.randn(8, 8)
    for each, inputs in (
        (wrapped, spmd.mark_sharding(on_device(x), fsdp_mesh(), ("fsdp", None))),
        (alone, x),
    ):
        loss = each(inputs).square().mean()
        first = torch.autograd.grad(loss, list(each.parameters()), create_graph=True)
        torch.autograd.backward(loss + sum(grad.square().sum() for grad in first))
    for one, other in zip(wrapped.parameters(), alone.parameters(), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=1e-5, atol=1e-5)


@driven
def test_a_wrapped_parameter_that_changed_before_backward_is_refused() -> None:
    wrapped = FSDPv2(layers(), mesh=fsdp_mesh(), auto_wrap_policy=BY_LAYER)
    loss = wrapped(on_device(torch.randn(8, 8))).sum()
    with torch.no_grad():
        for parameter in wrapped.parameters():
            parameter.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(loss)


@driven
def test_what_a_wrapped_module_changes_in_place_stays_changed() -> None:
    embedding = nn.Embedding(8, 4, max_norm=1.0)
    alone = copy.deepcopy(embedding)
    wrapped = FSDPv2(embedding, mesh=fsdp_mesh())
    ids = torch.arange(8)
    torch.testing.assert_close(wrapped(on_device(ids)).detach().cpu(), alone(ids).detach())
    torch.testing.assert_close(wrapped.weight.detach().cpu(), alone.weight.detach())


@driven
def test_marked_parameters_stay_as_they_are() -> None:
    linear = nn.Linear(8, 8).to(spmd.device())
    spmd.mark_sharding(linear.weight, fsdp_mesh(), (None, None))
    assert FSDPv2(linear, mesh=fsdp_mesh()).weight.sharding_spec == "{replicated}"


@driven
def test_the_global_mesh_is_taken_where_none_is_given() -> None:
    mesh = fsdp_mesh()
    spmd.set_global_mesh(mesh)
    assert FSDPv2(nn.Linear(4, 4))._mesh is mesh


@driven
def test_what_fsdp_refuses() -> None:
    mesh = fsdp_mesh()
    with pytest.raises(ValueError, match="No mesh is provided and no global mesh is set"):
        FSDPv2(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="must have an axis named 'fsdp'"):
        FSDPv2(nn.Linear(4, 4), mesh=spmd.get_1d_mesh("data"))
    with pytest.raises(ValueError, match="The provided ddp axis is not in the mesh"):
        FSDPv2(nn.Linear(4, 4), mesh=mesh, extra_data_axis="ddp")
    with pytest.raises(RuntimeError, match="already wrapped with FSDP"):
        FSDPv2(FSDPv2(nn.Linear(4, 4), mesh=mesh), mesh=mesh)
    with pytest.raises(RuntimeError, match="must define a `forward` method"):
        FSDPv2(nn.ModuleList(), mesh=mesh)


class Returns(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.linear, self.make = nn.Linear(4, 4), make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.linear(x))


@driven
def test_outputs_that_are_no_tensors() -> None:
    x = on_device(torch.randn(4, 4))
    with pytest.warns(UserWarning, match="only its first element"):
        first, _ = FSDPv2(Returns(lambda y: (y, y + 1)), mesh=fsdp_mesh())(x)
    assert first.sharding_spec == ROWS
    with pytest.raises(RuntimeError, match="provide your own shard_output"):
        FSDPv2(Returns(lambda y: {"y": y}), mesh=fsdp_mesh())(x)

    def mark(output: dict[str, Tensor], mesh: spmd.Mesh) -> None:
        spmd.mark_sharding(output["y"], mesh, (None, "fsdp"))

    marked = FSDPv2(Returns(lambda y: {"y": y}), fsdp_mesh(), mark)(x)["y"]
    assert marked.sharding_spec == "{devices=[1,4]0,1,2,3}"


# ---- loaders


def batches(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    return [(torch.full((8, 2), float(number)), torch.arange(8)) for number in range(count)]


@driven
def test_a_loader_cuts_what_the_spec_fits() -> None:
    spec = spmd.ShardingSpec(spmd.get_1d_mesh("data"), ("data", None))
    loader = spmd.DeviceLoader(batches(), spmd.device(), input_sharding=spec)
    assert len(loader) == 3
    seen = list(loader)
    assert [x.sharding_spec for x, _ in seen] == [ROWS] * 3
    assert [y.sharding_spec for _, y in seen] == [""] * 3
    assert [float(x.sum()) for x, _ in seen] == [0, 16, 32]
    assert len(list(loader)) == 3


@driven
def test_a_loader_takes_a_spec_for_each_entry() -> None:
    data = [{"x": x, "y": y} for x, y in batches(1)]
    mesh = spmd.get_1d_mesh("data")
    specs = {"x": spmd.ShardingSpec(mesh, ("data", None)), "y": None}
    (batch,) = spmd.DeviceLoader(data, spmd.device(), input_sharding=specs)
    assert batch["x"].sharding_spec == ROWS
    assert batch["y"].sharding_spec == ""
    with pytest.raises(KeyError, match=r"Keys: \['y'\] are missing from input_sharding"):
        list(spmd.DeviceLoader(data, spmd.device(), input_sharding={"x": specs["x"]}))
    with pytest.raises(ValueError, match="input batch should be a dict when input sharding is a dict"):
        list(spmd.DeviceLoader(batches(), spmd.device(), input_sharding=specs))


@dataclasses.dataclass(frozen=True)
class Pair:
    x: Tensor
    name: str


@driven
def test_a_loader_moves_what_is_in_mappings_and_dataclasses_and_keeps_their_kind() -> None:
    rows = spmd.ShardingSpec(spmd.get_1d_mesh("data"), ("data", None))
    data: list[Any] = [
        UserDict(x=torch.ones(8, 2)),
        OrderedDict(x=torch.ones(8, 2)),
        MappingProxyType({"x": torch.ones(8, 2)}),
    ]
    for specs in (rows, {"x": rows}):
        for batch, given in zip(
            spmd.DeviceLoader(data[:2], spmd.device(), input_sharding=specs), data[:2], strict=True
        ):
            assert type(batch) is type(given)
            assert batch["x"].sharding_spec == ROWS
            assert given["x"].device.type == "cpu"
    (batch,) = spmd.DeviceLoader([data[2]], spmd.device(), input_sharding=rows)
    assert batch["x"].sharding_spec == ROWS
    (pair,) = spmd.DeviceLoader([Pair(torch.ones(8, 2), "a")], spmd.device(), input_sharding=rows)
    assert pair.x.sharding_spec == ROWS
    assert pair.name == "a"


@driven
def test_what_is_no_spec_is_refused_before_anything_is_read() -> None:
    wrong: Any
    for wrong in (("data", None), {"x": ("data", None)}):
        with pytest.raises(TypeError, match=r"input_sharding is a spmd\.ShardingSpec\(mesh, spec\)"):
            spmd.DeviceLoader(batches(), spmd.device(), input_sharding=wrong)


@driven
def test_a_loader_may_ask_for_pinned_memory() -> None:
    data = torch.arange(8.0)
    (batch,) = spmd.DeviceLoader(
        DataLoader(TensorDataset(data), batch_size=8, pin_memory=True), spmd.device()
    )
    assert batch[0].cpu().equal(data)


@driven
def test_a_minibatch_must_divide() -> None:
    mesh = spmd.get_1d_mesh("data")
    data = [torch.ones(WORKERS - 1, 2)]
    (batch,) = spmd.DeviceLoader(data, spmd.device(), input_sharding=spmd.ShardingSpec(mesh, ("data", None)))
    assert batch.shape == (WORKERS - 1, 2)
    spec = spmd.ShardingSpec(mesh, ("data", None), minibatch=True)
    with pytest.raises(RuntimeError, match="must be divisible by local runtime device count"):
        list(spmd.DeviceLoader(data, spmd.device(), input_sharding=spec))


@driven
def test_a_loader_says_what_the_users_loader_raised_after_what_it_gave() -> None:
    def failing() -> Iterator[Tensor]:
        yield torch.ones(2)
        raise LookupError("no more data")

    batches = iter(spmd.DeviceLoader(failing(), spmd.device()))
    assert next(batches).cpu().tolist() == [1, 1]
    with pytest.raises(LookupError, match="no more data"):
        next(batches)


@driven
def test_a_loader_may_be_left_in_the_middle() -> None:
    endless = (torch.ones(2) for _ in iter(int, 1))
    for batch in spmd.DeviceLoader(endless, spmd.device(), loader_prefetch_size=2):
        assert batch.shape == (2,)
        break


@pytest.mark.parametrize("foreach", [True, False])
@driven
def test_clipping_sums_gradients_where_their_parameters_are(foreach: bool) -> None:
    alone = layers()
    model: Any = copy.deepcopy(alone).to(spmd.device())
    mesh = spmd.Mesh(range(WORKERS), (2, 2), ("data", "model"))
    for layer in model[:2]:
        spmd.mark_sharding(layer.up.weight, mesh, ("model", "data"))
    x = torch.randn(8, 8)
    model(spmd.mark_sharding(on_device(x), mesh, ("data", None))).square().sum().backward()
    alone(x).square().sum().backward()
    norm, expected = (
        nn.utils.clip_grad_norm_(each.parameters(), 0.5, foreach=foreach) for each in (model, alone)
    )
    torch.testing.assert_close(norm.cpu(), expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=1e-4, atol=1e-5)
    for layer in model[:2]:
        assert layer.up.weight.grad.placements == layer.up.weight.placements


@driven
def test_a_loader_that_hangs_does_not_hold_up_who_leaves_it() -> None:
    leave = threading.Event()

    def hanging() -> Iterator[Tensor]:
        yield torch.ones(2)
        leave.wait()

    with mock.patch.object(loader, "_PATIENCE", 0.2):
        batches: Any = iter(spmd.DeviceLoader(hanging(), spmd.device()))
        next(batches)
        batches.close()
    (thread,) = [each for each in threading.enumerate() if each.name == "spmd loader"]
    leave.set()
    thread.join()


@driven
def test_a_loader_keeps_no_batch_while_it_waits_for_the_next() -> None:
    given: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def batches() -> Iterator[Tensor]:
        for _ in range(4):
            batch = torch.ones(2)
            given.append(weakref.ref(batch))
            yield batch
            del batch

    for _ in spmd.DeviceLoader(batches(), spmd.device(), loader_prefetch_size=1):
        _ = None
        spmd.sync()
        alive.append(given[0]() is not None)
    assert alive[1:] == [False] * 3


# ---- manual sharding


@pytest.mark.parametrize("rows", [8, 6])
@driven
def test_between_enable_and_disable_each_worker_computes_its_own(rows: int) -> None:
    whole = torch.arange(rows * 2.0).reshape(rows, 2)
    mesh = spmd.get_1d_mesh("data")
    spmd.set_global_mesh(mesh)
    part: Any = spmd.enable_manual_sharding(on_device(whole), ("data", None))
    assert part.shape == (2, 2)
    assert part.sharding_spec == "{manual}"
    assert part.sharding_type is spmd.ShardingType.MANUAL
    again: Any = spmd.disable_manual_sharding(part - part.max(), ("data", None), whole.shape)
    assert again.sharding_spec == ROWS
    expected = torch.cat([each - each.max() for each in torch.split(whole, 2)])
    assert again.cpu().equal(expected)


@driven
def test_manual_sharding_has_gradients() -> None:
    x = on_device(torch.ones(8, 2)).requires_grad_()
    mesh = spmd.get_1d_mesh("data")
    y = x * 1
    part = spmd.enable_manual_sharding(y, (0, None), mesh=mesh)
    y = spmd.disable_manual_sharding(part * part.sum(), (0, None), x.shape, mesh=mesh)
    torch.autograd.backward(y.sum())
    assert x.grad is not None
    assert x.grad.cpu().equal(torch.full((8, 2), 8.0))


@driven
def test_data_is_no_manual_shard() -> None:
    mesh = spmd.get_1d_mesh("data")
    with pytest.raises(RuntimeError, match="Marking any data tensors as manual is not supported"):
        spmd.disable_manual_sharding(on_device(torch.ones(2, 2)), (0, None), (8, 2), mesh=mesh)
    with pytest.raises(RuntimeError, match="not manual sharded"):
        spmd.disable_manual_sharding(on_device(torch.ones(3, 2)) + 1, (0, None), (8, 2), mesh=mesh)


@driven
def test_parts_of_workers_cannot_be_cut_themselves() -> None:
    mesh = spmd.get_1d_mesh("data")
    part = spmd.enable_manual_sharding(on_device(torch.arange(8.0)), (0,), mesh=mesh)
    with pytest.raises(RuntimeError, match="stands for each worker's part"):
        spmd.mark_sharding(part, mesh, (0,))
    assert spmd.disable_manual_sharding(part, (0,), (8,), mesh=mesh).cpu().equal(torch.arange(8.0))


# ---- DTensor's functions


def grid() -> spmd.Mesh:
    return spmd.Mesh(range(WORKERS), (2, 2), ("a", "b"))


@driven
def test_tensors_are_distributed_by_placements() -> None:
    whole = torch.arange(32.0).reshape(8, 4)
    t: Any = spmd.distribute_tensor(whole, grid(), [Shard(0), Shard(1)])
    assert t.sharding_spec == "{devices=[2,2]0,1,2,3}"
    assert t.placements == (Shard(0), Shard(1))
    assert t.cpu().equal(whole)
    replicated: Any = spmd.distribute_tensor(whole, grid())
    assert replicated.sharding_spec == "{replicated}"
    with pytest.raises(ValueError, match="Unsupported placement type"):
        spmd.distribute_tensor(whole, grid(), [Partial(), Replicate()])
    with pytest.raises(ValueError, match="cut already"):
        spmd.distribute_tensor(t, grid(), [Replicate(), Shard(0)])


@driven
def test_tensors_are_redistributed_with_their_gradients() -> None:
    whole = torch.arange(32.0).reshape(8, 4)
    t: Any = spmd.distribute_tensor(whole, grid(), [Shard(0), Replicate()]).requires_grad_()
    moved = t.redistribute(placements=[Replicate(), Shard(1)])
    assert moved.sharding_spec == "{devices=[1,2,2]0,2,1,3 last_tile_dim_replicate}"
    (moved * on_device(whole)).sum().backward()
    assert t.grad.sharding_spec == t.sharding_spec
    assert t.grad.cpu().equal(whole)
    with pytest.raises(ValueError, match="there are 1 placements"):
        t.redistribute(grid(), [Shard(0)])
    with pytest.raises(IndexError, match="out of range"):
        t.redistribute(grid(), [Shard(2), Replicate()])
    with pytest.raises(NotImplementedError, match="partial sums"):
        t.redistribute(grid(), [Partial(), Replicate()])


@driven
def test_modules_are_distributed_by_a_function() -> None:
    alone = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    module: Any = copy.deepcopy(alone)

    def rows(name: str, each: nn.Module, mesh: Any) -> None:
        for parameter in each.parameters(recurse=False):
            spmd.mark_sharding(parameter, mesh, ("a",) + (None,) * (parameter.dim() - 1))

    def cut(_: nn.Module, inputs: Any, mesh: Any) -> Any:
        return (spmd.mark_sharding(inputs[0], mesh, ("b", None)),)

    module = spmd.distribute_module(module, grid(), rows, cut, lambda _, output, mesh: output * 2)
    assert module[0].weight.sharding_spec == "{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}"
    x = torch.randn(4, 8)
    torch.testing.assert_close(module(on_device(x)).detach().cpu(), 2 * alone(x).detach())


@driven
def test_an_infinite_gradient_of_one_worker_halves_the_scale_of_all() -> None:
    w = nn.Parameter(on_device(torch.ones(WORKERS, 2)))
    spmd.mark_sharding(w, fsdp_mesh(), ("fsdp", None))
    optimizer, scaler = torch.optim.SGD([w], 0.5), torch.amp.GradScaler("spmd", init_scale=8.0)
    factors = torch.ones(WORKERS, 2)
    factors[1] = float("inf")
    cut = spmd.mark_sharding(on_device(factors), fsdp_mesh(), ("fsdp", None))
    loss: Any = scaler.scale((w * cut).sum())
    loss.backward()
    scaler.step(optimizer)
    scaler.update()
    assert w.tolist() == [[1.0, 1.0]] * WORKERS
    scale: Any = scaler.scale(on_device(torch.ones(())))
    assert [each.data.item() for each in scale.local_shards] == [4.0] * WORKERS
