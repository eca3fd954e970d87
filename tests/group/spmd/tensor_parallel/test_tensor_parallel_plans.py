"""Plans and what can be wrong with them, with meshes and with inputs."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from spmd.tensor_parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from tests.group.spmd.meshes import in_mesh
from tests.support.default_device import TYPE, not_on_devices


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(4, 8)
        self.w2 = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.w1(x))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def sharded(model: nn.Module) -> set[str]:
    return {name for name, each in model.named_parameters() if isinstance(each, DTensor)}


@in_mesh(1)
def test_wildcards_match_one_part_of_a_name_each(mesh: DeviceMesh) -> None:
    for pattern, layers in (("*", "012"), ("?", "012"), ("[1-2]", "12"), ("0", "0")):
        model = Model()
        parallelize_module(model, mesh, {f"layers.{pattern}.w1": ColwiseParallel()})
        assert sharded(model) == {f"layers.{i}.w1.{p}" for i in layers for p in ("weight", "bias")}


@in_mesh(1)
def test_plans_may_be_nested_and_name_the_module_itself(mesh: DeviceMesh) -> None:
    model = Model()
    parallelize_module(model, mesh, {"layers.0": {"w1": ColwiseParallel(), "": PrepareModuleInput()}})
    assert sharded(model) == {"layers.0.w1.weight", "layers.0.w1.bias"}
    linear = nn.Linear(4, 4)
    assert parallelize_module(linear, mesh, ColwiseParallel()) is linear
    assert sharded(linear) == {"weight", "bias"}


@in_mesh(1)
def test_styles_of_others_are_applied(mesh: DeviceMesh) -> None:
    class Named(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            module.seen = self.src_data_rank, device_mesh.size()  # type: ignore[assignment]
            return module

    model = Model()
    parallelize_module(model, mesh, {"layers.1": Named()}, src_data_rank=None)
    assert model.layers[1].seen == (None, 1)


@in_mesh(1)
def test_the_mesh_may_come_from_a_with_block(mesh: DeviceMesh) -> None:
    linear = nn.Linear(4, 4)
    with mesh:
        parallelize_module(linear, parallelize_plan=ColwiseParallel())
    assert sharded(linear)
    with pytest.raises(RuntimeError, match="No device mesh is currently active"):
        parallelize_module(nn.Linear(4, 4), parallelize_plan=ColwiseParallel())


@in_mesh(1)
def test_without_a_plan_there_is_a_warning(mesh: DeviceMesh) -> None:
    with pytest.warns(UserWarning, match="No parallelize_plan is provided"):
        parallelize_module(nn.Linear(4, 4), mesh)


@in_mesh(1)
def test_keys_that_match_nothing_warn_and_name_what_is_near(mesh: DeviceMesh) -> None:
    model = Model()
    plan = {
        "layers.0.w3": ColwiseParallel(),
        "layers.9.w1": ColwiseParallel(),
        "layers.1.w1": ColwiseParallel(),
    }
    with pytest.warns(UserWarning, match="could not be resolved") as caught:
        parallelize_module(model, mesh, plan)
    assert len(caught) == 2
    assert "'layers.0.w3'" in str(caught[0].message)
    assert "'layers.0.w1'" in str(caught[0].message)
    assert "'layers.9.w1'" in str(caught[1].message)
    assert caught[0].filename == __file__
    assert sharded(model) == {"layers.1.w1.weight", "layers.1.w1.bias"}


@in_mesh(1)
def test_strict_plans_change_nothing_when_a_key_matches_nothing(mesh: DeviceMesh) -> None:
    model = Model()
    plan = {
        "layers.1.w1": ColwiseParallel(),
        "layers.0.w3": ColwiseParallel(),
        "layer.2": ColwiseParallel(),
    }
    with pytest.raises(ValueError, match=r"rank 0.*'layers\.0\.w3'.*'layers\.0\.w1'.*'layer\.2'"):
        parallelize_module(model, mesh, plan, strict=True)
    assert not sharded(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallelize_module(model, mesh, {"layers.1.w1": ColwiseParallel()}, strict=True)


WRONG_PLANS: dict[str, tuple[Any, type[Exception], str]] = {
    "a list": ([ColwiseParallel()], TypeError, r"rank 0.*Expect Union\[ParallelStyle.*list"),
    "a value": ({"layers.0.w1": "colwise"}, TypeError, r"rank 0, plan for module 'layers\.0\.w1'.*str"),
    "a class": ({"layers.0.w1": ColwiseParallel}, TypeError, "found!"),
    "a key": ({3: ColwiseParallel()}, TypeError, "names of modules, got 3"),
    "another module": (
        {"layers.0": ColwiseParallel()},
        NotImplementedError,
        r"rank 0, module 'layers\.0' \(Block\): .* only support nn.Linear and nn.Embedding! .* got Block",
    ),
    "the same twice": (
        {"layers.0.w1": ColwiseParallel(), "layers.*.w1": RowwiseParallel()},
        RuntimeError,
        r"rank 0, module 'layers\.0\.w1' \(Linear\): expected a module that is not parallelized yet",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_PLANS)
@in_mesh(1)
def test_wrong_plans(mesh: DeviceMesh, wrong: str) -> None:
    plan, error, message = WRONG_PLANS[wrong]

    with pytest.raises(error, match=message):
        parallelize_module(Model(), mesh, plan)


STYLES: tuple[ParallelStyle, ...] = (
    ColwiseParallel(),
    RowwiseParallel(),
    SequenceParallel(),
    PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
    PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate()),
)


@in_mesh(2, 1, 2, names=("dp", "tp"))
def test_a_mesh_of_two_dimensions_is_refused_everywhere(mesh: DeviceMesh) -> None:
    for style in STYLES:
        with pytest.raises(
            ValueError, match=r"rank \d, .*one-dimensional mesh, got 2 .*slice it, as in mesh\['tp'\]"
        ):
            parallelize_module(nn.Linear(4, 4), mesh, style)
        with pytest.raises(ValueError, match="one-dimensional mesh"):
            style._apply(nn.Linear(4, 4), mesh)
        parallelize_module(nn.Linear(4, 4), mesh["tp"], style)


@in_mesh(3)
def test_a_rank_outside_of_the_mesh_is_told_so(mesh: DeviceMesh) -> None:
    half = DeviceMesh(TYPE, [0, 1])
    if dist.get_rank() == 2:
        with pytest.raises(ValueError, match=r"rank 2, module Linear: expected a rank of the mesh, \[0, 1\]"):
            parallelize_module(nn.Linear(4, 4), half, ColwiseParallel())
    else:
        parallelize_module(nn.Linear(4, 4), half, ColwiseParallel())


@in_mesh(2)
def test_a_mesh_that_is_larger_than_the_group(mesh: DeviceMesh) -> None:
    with pytest.raises(RuntimeError, match=r"bigger than default world size 2, but found 3"):
        init_device_mesh(TYPE, (3,))
    larger = DeviceMesh(TYPE, torch.arange(3, device="cpu"), _init_backend=False)
    with pytest.raises(ValueError, match=r"within the group's 2 ranks, got one of the ranks \[0, 1, 2\]"):
        parallelize_module(nn.Linear(4, 4), larger, ColwiseParallel())


@in_mesh(1)
def test_what_is_no_mesh_or_no_module(mesh: DeviceMesh) -> None:
    wrong: Any = "tp"
    with pytest.raises(TypeError, match="expected a DeviceMesh, got str"):
        parallelize_module(nn.Linear(4, 4), wrong, ColwiseParallel())
    with pytest.raises(TypeError, match=r"expected module to be a torch\.nn\.Module, got str"):
        parallelize_module(wrong, mesh, ColwiseParallel())


class OnCuda(Tensor):
    """Says that it is on a device that the test's machine need not have."""

    device = torch.device("cuda", 0)


class Elsewhere(nn.Linear):
    """Its weight says so."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return [("weight", OnCuda())]


@not_on_devices("it is about those that are not on the CPU")
@in_mesh(1)
def test_modules_and_inputs_on_another_device(mesh: DeviceMesh) -> None:
    with pytest.raises(ValueError, match=r"rank 0, module Elsewhere: expected weight on .* cpu, got cuda:0"):
        parallelize_module(Elsewhere(4, 4), mesh, ColwiseParallel())
    layer = parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel())
    with pytest.raises(ValueError, match=r"rank 0, module Linear: expected input on .* cpu, got cuda:0"):
        layer(OnCuda())


@in_mesh(2)
def test_wrong_inputs(mesh: DeviceMesh) -> None:
    model = Model()
    plan = {"layers.*.w1": ColwiseParallel(), "layers.*.w2": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    where = re.escape(f"rank {dist.get_rank()}, module 'layers.1.w2' (Linear): ")
    first, layer = model.get_submodule("layers.1.w1"), model.get_submodule("layers.1.w2")
    with pytest.raises(
        ValueError,
        match=where
        + r"expected an input whose last dimension is 4 \(8 features, Shard\(dim=-1\) over 2 ranks\), "
        r"got 8: shape \[3, 8\]",
    ):
        layer(torch.ones(3, 8))
    with pytest.raises(ValueError, match=where + "expected an input whose last dimension is 8"):
        layer(distribute_tensor(torch.ones(3, 4), mesh, [Replicate()]))
    with pytest.raises(TypeError, match=where + "expected input to be a torch.Tensor or DTensor, got list"):
        layer([1.0])
    with pytest.raises(ValueError, match=r"rank ., module 'layers.1.w1'.*whose last dimension is 4 .* got 2"):
        first(torch.ones(3, 2))
    other = DeviceMesh(TYPE, [[0, 1]], mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match=where + "expected input on the mesh"):
        layer(distribute_tensor(torch.ones(3, 8), other, [Replicate(), Replicate()]))


@in_mesh(2)
def test_plain_parts_of_different_length(mesh: DeviceMesh) -> None:
    layer = parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel(input_layouts=Shard(1)))
    with pytest.raises(ValueError, match=r"rank \d, module Linear: expected plain parts.*lengths \[3, 2\]"):
        layer(torch.ones(2, 3 - mesh.get_local_rank(), 4))
    assert layer(torch.ones(2, 3, 4)).shape == (2, 6, 2)


@in_mesh(2)
def test_indices_out_of_the_vocabulary(mesh: DeviceMesh) -> None:
    for style in (ColwiseParallel(), RowwiseParallel(input_layouts=Replicate())):
        embedding = nn.Embedding(10, 4)
        parallelize_module(embedding, mesh, style)
        with pytest.raises(IndexError, match="expected indices from 0 to 9, got 3 to 10"):
            embedding(torch.tensor([3, 10]))


@in_mesh(1, 1, 1, names=("dp", "tp"))
def test_what_others_have_sharded_already_is_refused(mesh: DeviceMesh) -> None:
    for style in (ColwiseParallel(), SequenceParallel()):
        linear = nn.Linear(4, 4)
        fully_shard(linear, mesh=mesh["dp"])
        with pytest.raises(ValueError, match=r"expected weight to be plain.*fully_shard comes after"):
            parallelize_module(linear, mesh["tp"], style)


@in_mesh(1)
def test_the_number_of_prepared_tensors(mesh: DeviceMesh) -> None:
    module = nn.Identity()
    style = PrepareModuleInput(
        input_layouts=(Shard(0), None), desired_input_layouts=(Replicate(), None), use_local_output=True
    )
    parallelize_module(module, mesh, style)
    with pytest.raises(ValueError, match="should have same length! Expected 2 positional inputs, got 1"):
        module(torch.ones(2))
    module = nn.Identity()
    output = PrepareModuleOutput(output_layouts=(Shard(0), None), desired_output_layouts=(Replicate(), None))
    parallelize_module(module, mesh, output)
    with pytest.raises(ValueError, match="should have same length! Expected 2 outputs, got 1"):
        module(torch.ones(2))


@in_mesh(1)
def test_ties_that_a_plan_would_cut_are_refused(mesh: DeviceMesh) -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(10, 4), "head": nn.Linear(4, 10, bias=False)})
    model["head"].weight = model["embedding"].weight
    with pytest.raises(ValueError, match="module 'embedding': its weight is tied to weight of module 'head'"):
        parallelize_module(model, mesh, {"embedding": RowwiseParallel()})
    with pytest.raises(ValueError, match=r"module 'head'.*'embedding'.*Shard\(dim=1\).*Shard\(dim=0\)"):
        parallelize_module(model, mesh, {"embedding": ColwiseParallel(), "head": ColwiseParallel()})
