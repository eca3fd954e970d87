"""FSDP on the logical device."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import spmd
from spmd.fsdp import FSDPv2, checkpoint_module
from spmd.fsdp.wrap import size_based_auto_wrap_policy
from tests.group.spmd.driven import WORKERS, driven
from tests.group.spmd.sharded_layers import BY_LAYER, assert_trains_alike, fsdp_mesh, layers, on_device

pytestmark = pytest.mark.processes

ROWS = f"{{devices=[{WORKERS},1]0,1,2,3}}"


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


@pytest.mark.parametrize("by_policy", [False, True])
@driven
def test_modules_that_are_wrapped_each_share_what_they_shared(by_policy: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    alone = copy.deepcopy(model)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1) if by_policy else None
    for place in () if by_policy else (0, 2):
        model[place] = FSDPv2(model[place], mesh=fsdp_mesh())
    wrapped = FSDPv2(model, mesh=fsdp_mesh(), auto_wrap_policy=policy)
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
