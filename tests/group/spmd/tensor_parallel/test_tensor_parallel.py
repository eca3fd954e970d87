"""Each style, forward and backward, against the module in one process."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from spmd.tensor_parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from spmd.tensor_parallel.traffic import recorded
from tests.group.spmd.meshes import assert_same_gradients, backward, gradient_of, in_mesh, part, whole
from tests.support.default_device import DEVICE, not_on_devices


def laid_out(tensor: Tensor, layout: Placement, mesh: DeviceMesh) -> Tensor:
    """This rank's part of a tensor that is laid out so."""
    if isinstance(layout, Shard):
        return part(tensor, layout.dim, mesh)
    if isinstance(layout, Partial):  # every rank has a share of its own
        share = tensor * (mesh.get_local_rank() + 1)
        return share / sum(range(1, mesh.size() + 1))
    return tensor


def compare(
    mesh: DeviceMesh,
    module: nn.Module,
    style: ParallelStyle,
    x: Tensor,
    given: Placement,
    output: Placement,
) -> None:
    """One step on plain tensors, laid out as ``given``, and the same in one process."""
    alone, parallel = module, copy.deepcopy(module)
    parallelize_module(parallel, mesh, style)
    local = laid_out(x, given, mesh).detach()
    differentiable = x.is_floating_point()
    if differentiable:
        x = x.clone().requires_grad_()
        local = local.clone().requires_grad_()
    expected = alone(x)
    upstream = torch.rand_like(expected)
    backward(expected, upstream)
    result = parallel(local)
    assert type(result) is Tensor
    back = Replicate() if isinstance(output, Partial) else output
    if isinstance(output, Partial):
        result_whole = DTensor.from_local(result.detach(), mesh, [Partial()]).full_tensor()
        torch.testing.assert_close(result_whole, expected)
    else:
        torch.testing.assert_close(result, laid_out(expected, output, mesh))
    backward(result, laid_out(upstream, back, mesh))
    assert_same_gradients(parallel, alone)
    if differentiable:
        back = Replicate() if isinstance(given, Partial) else given
        assert x.grad is not None
        assert local.grad is not None
        torch.testing.assert_close(local.grad, laid_out(x.grad, back, mesh))


LAYOUTS: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Shard(-1), Partial())


@in_mesh(2)
def test_linear_with_every_pair_of_layouts(mesh: DeviceMesh) -> None:
    x = torch.randn(4, 8, 12)
    for given, output in itertools.product(LAYOUTS, LAYOUTS):
        module = nn.Linear(12, 8)
        if not isinstance(output, Partial):  # a shard does not become a partial sum
            column = ColwiseParallel(input_layouts=given, output_layouts=output)
            compare(mesh, copy.deepcopy(module), column, x, given, output)
        row = RowwiseParallel(input_layouts=given, output_layouts=output)
        compare(mesh, copy.deepcopy(module), row, x, given, output)


@pytest.mark.parametrize(("inputs", "outputs"), [(7, 5), (3, 6), (5, 3), (1, 1)])
@in_mesh(4)
def test_features_that_ranks_do_not_divide(mesh: DeviceMesh, inputs: int, outputs: int) -> None:
    x = torch.randn(4, 3, inputs)
    for given in (Replicate(), Shard(-1)):
        for output in (Replicate(), Shard(-1), Shard(1)):
            module = nn.Linear(inputs, outputs)
            column = ColwiseParallel(input_layouts=given, output_layouts=output)
            compare(mesh, copy.deepcopy(module), column, x, given, output)
            row = RowwiseParallel(input_layouts=given, output_layouts=output)
            compare(mesh, copy.deepcopy(module), row, x, given, output)


@pytest.mark.parametrize(("rows", "width"), [(12, 8), (7, 5), (3, 2)])
@in_mesh(4)
def test_embedding_with_every_layout(mesh: DeviceMesh, rows: int, width: int) -> None:
    indices = torch.randint(rows, (4, 8))
    every: list[dict[str, Any]] = [{}, {"padding_idx": 1}]
    for options in [*every, {"padding_idx": rows - 1, "scale_grad_by_freq": True}]:
        inputs = (Shard(0), Shard(1)) if options else (Replicate(), Shard(1))
        for given, output in itertools.product(inputs, LAYOUTS):
            module = nn.Embedding(rows, width, **options)
            if not isinstance(output, Partial):
                column = ColwiseParallel(input_layouts=given, output_layouts=output)
                compare(mesh, copy.deepcopy(module), column, indices, given, output)
            row = RowwiseParallel(input_layouts=given, output_layouts=output)
            compare(mesh, copy.deepcopy(module), row, indices, given, output)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6))


PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


@in_mesh(2)
def test_colwise_then_rowwise_needs_one_all_reduce_each_way(mesh: DeviceMesh) -> None:
    model = parallelize_module(mlp(), mesh, PLAN)
    with recorded() as transfers:
        result = model(torch.ones(4, 6, requires_grad=True))
        forward = len(transfers)
        backward(result.sum())
    assert forward == 1
    assert [(each.kind, each.nbytes) for each in transfers] == [("all_reduce", 4 * 6 * 4)] * 2


@in_mesh(2)
def test_layers_that_share_a_dtensor_have_its_gradient_reduced_once(mesh: DeviceMesh) -> None:
    layers = nn.ModuleList([nn.Linear(6, 4) for _ in range(3)])
    alone = copy.deepcopy(layers)
    parallelize_module(layers, mesh, {"*": ColwiseParallel()})
    x = torch.randn(2, 8, 6, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    shared = DTensor.from_local(x, mesh, [Replicate()])
    with recorded() as transfers:
        backward(torch.stack([layer(shared).sum() for layer in layers]).sum())
    backward(torch.stack([layer(y).sum() for layer in alone]).sum())
    assert [(each.module, each.kind) for each in transfers] == [(None, "all_reduce")]
    torch.testing.assert_close(x.grad, y.grad)
    assert_same_gradients(layers, alone)


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
@in_mesh(2)
def test_dtensors_in_and_out(mesh: DeviceMesh, style: type[ColwiseParallel]) -> None:
    for given, output in itertools.product((Replicate(), Shard(0), Shard(1), Shard(2)), repeat=2):
        alone = nn.Linear(7, 5)
        parallel = copy.deepcopy(alone)
        parallelize_module(parallel, mesh, style(output_layouts=output, use_local_output=False))
        x = torch.randn(3, 5, 7)
        sharded = distribute_tensor(x, mesh, [given]).requires_grad_()
        x.requires_grad_()
        expected = alone(x)
        upstream = torch.rand_like(expected)
        backward(expected, upstream)
        result = parallel(sharded)
        assert isinstance(result, DTensor)
        assert result.placements == (output,)
        assert result.shape == expected.shape
        torch.testing.assert_close(result.full_tensor(), expected)
        backward(result, distribute_tensor(upstream, mesh, [output]))
        assert isinstance(sharded.grad, DTensor)
        torch.testing.assert_close(sharded.grad.full_tensor(), x.grad)
        assert_same_gradients(parallel, alone)


@in_mesh(2)
def test_the_input_may_be_a_keyword(mesh: DeviceMesh) -> None:
    linear, norm = nn.Linear(4, 4), nn.LayerNorm(4)
    x = torch.randn(2, 2, 4)
    expected = linear(x)
    parallelize_module(linear, mesh, RowwiseParallel(input_layouts=Replicate()))
    torch.testing.assert_close(linear(input=x), expected)
    expected = norm(x)
    parallelize_module(norm, mesh, SequenceParallel(use_local_output=True))
    torch.testing.assert_close(norm(input=x), expected)


class Scaled(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, input: Tensor, factor: float = 2.0) -> Tensor:  # noqa: A002
        return super().forward(input) * factor


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
@in_mesh(2)
def test_layers_that_compute_in_their_own_way(mesh: DeviceMesh, style: type[ColwiseParallel]) -> None:
    for given, output in itertools.product((Replicate(), Shard(1)), repeat=2):
        parallel = style(input_layouts=given, output_layouts=output)
        compare(mesh, Scaled(4, 6), parallel, torch.randn(2, 4, 4), given, output)


class PythonRMSNorm(nn.Module):
    """As Llama's code writes it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
        return scaled.type_as(x) * self.weight


@pytest.mark.parametrize(
    "module",
    [
        nn.LayerNorm(6),
        nn.LayerNorm(6, bias=False),
        nn.LayerNorm(6, elementwise_affine=False),
        nn.RMSNorm(6),
        PythonRMSNorm(6),
    ],
    ids=["layer", "layer without bias", "layer without weight", "rms", "python rms"],
)
@in_mesh(2)
def test_sequence_parallel_norms(mesh: DeviceMesh, module: nn.Module) -> None:
    for dim, local in itertools.product((0, 1, -2), (True, False)):
        alone, parallel = (copy.deepcopy(module).to(DEVICE) for _ in range(2))
        parallelize_module(parallel, mesh, SequenceParallel(sequence_dim=dim, use_local_output=local))
        x = torch.randn(4, 4, 6)
        mine = part(x, dim, mesh).clone().requires_grad_()
        x.requires_grad_()
        expected = alone(x)
        upstream = torch.rand_like(expected)
        backward(expected, upstream)
        result = parallel(mine)
        if local:
            assert type(result) is Tensor
            torch.testing.assert_close(result, part(expected, dim, mesh))
            backward(result, part(upstream, dim, mesh))
        else:
            assert isinstance(result, DTensor)
            torch.testing.assert_close(result.full_tensor(), expected)
            backward(result, distribute_tensor(upstream, mesh, [Shard(dim % 3)]))
        assert x.grad is not None
        torch.testing.assert_close(mine.grad, part(x.grad, dim, mesh))
        assert_same_gradients(parallel, alone)


@in_mesh(4)
def test_sequences_of_uneven_length_as_dtensors(mesh: DeviceMesh) -> None:
    alone = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6))
    parallel = copy.deepcopy(alone)
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(parallel, mesh, plan)
    x = torch.randn(2, 5, 6)
    sharded = distribute_tensor(x, mesh, [Replicate()]).requires_grad_()
    x.requires_grad_()
    expected = alone(x)
    result = parallel(sharded)
    assert result.placements == (Shard(1),)
    torch.testing.assert_close(result.full_tensor(), expected)
    backward(expected.square().sum())
    backward(result.square().sum())
    torch.testing.assert_close(gradient_of(sharded), x.grad)
    assert_same_gradients(parallel, alone)


@in_mesh(2)
def test_frozen_parameters_stay_frozen(mesh: DeviceMesh) -> None:
    styles: list[tuple[nn.Module, ParallelStyle]] = [
        (nn.Linear(4, 4), ColwiseParallel()),
        (nn.Linear(4, 4), RowwiseParallel(input_layouts=Replicate())),
        (nn.LayerNorm(4), SequenceParallel()),
    ]
    for module, style in styles:
        module.weight.requires_grad_(False)
        parallelize_module(module, mesh, style)
        assert not module.weight.requires_grad
        assert module.bias.requires_grad
        result = module(torch.ones(2, 2, 4))
        backward(result.sum())
        assert module.weight.grad is None
        assert isinstance(module.bias.grad, DTensor)


@in_mesh(2)
def test_parameters_come_from_the_source_rank(mesh: DeviceMesh) -> None:
    rank = mesh.get_local_rank()
    for source, first in ((0, 0.0), (1, 1.0), (None, None)):
        for plan in (ColwiseParallel(), {"": ColwiseParallel()}):
            module = nn.Linear(2, 4)
            nn.init.constant_(module.weight, rank)
            parallelize_module(module, mesh, plan, src_data_rank=source)
            expected = rank if first is None else first
            local = module.get_parameter("weight").to_local()  # type: ignore[attr-defined]
            assert (local == expected).all()


@pytest.mark.parametrize(
    ("embedding", "head"),
    [(RowwiseParallel, ColwiseParallel), (ColwiseParallel, RowwiseParallel)],
    ids=["by rows", "by columns"],
)
@in_mesh(2)
def test_tied_weights_stay_tied(mesh: DeviceMesh, embedding: Any, head: Any) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 6)
            self.head = nn.Linear(6, 10, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, indices: Tensor) -> Tensor:
            return self.head(self.embedding(indices))  # type: ignore[no-any-return]

    alone = Tied()
    for together in (True, False):
        parallel = copy.deepcopy(alone)
        styles = {
            "embedding": embedding(input_layouts=Replicate(), output_layouts=Replicate()),
            "head": head(input_layouts=Replicate(), output_layouts=Replicate()),
        }
        if together:
            parallelize_module(parallel, mesh, styles)
        else:
            for name, style in styles.items():
                parallelize_module(parallel.get_submodule(name), mesh, style)
        assert parallel.head.weight is parallel.embedding.weight
        indices = torch.tensor([[0, 3], [9, 3]])
        alone.zero_grad()
        expected = alone(indices)
        backward(expected.square().sum())
        result = parallel(indices)
        torch.testing.assert_close(result, expected)
        backward(result.square().sum())
        assert_same_gradients(parallel, alone)


class TwoInputs(nn.Module):
    """Takes and gives two tensors, and keeps what it was given."""

    def forward(self, a: Tensor, b: Any, *, c: Any = None) -> tuple[Tensor, Any]:
        self.given = a, b, c
        return 2 * a, b


@in_mesh(2)
def test_prepared_inputs_and_outputs(mesh: DeviceMesh) -> None:
    rows = torch.arange(8.0).view(4, 2)
    for local in (True, False):
        module = TwoInputs()
        style = PrepareModuleInputOutput(
            input_layouts=(Shard(0), None),
            desired_input_layouts=(Replicate(), None),
            input_kwarg_layouts={"c": Replicate()},
            desired_input_kwarg_layouts={"c": Shard(1)},
            use_local_input=local,
            output_layouts=(Replicate(), None),
            desired_output_layouts=(Shard(0), None),
            use_local_output=local,
        )
        parallelize_module(module, mesh, style)
        mine = part(rows, 0, mesh).clone().requires_grad_()
        result, passed = module(mine, "as it is", c=rows)
        a, b, c = module.given
        assert (b, passed) == ("as it is", "as it is")
        assert isinstance(a, DTensor) is not local
        torch.testing.assert_close(whole(a), rows)
        if local:
            torch.testing.assert_close(c, part(rows, 1, mesh))
            torch.testing.assert_close(result, 2 * part(rows, 0, mesh))
            backward(result.sum())
        else:
            assert c.placements == (Shard(1),)
            assert result.placements == (Shard(0),)
            torch.testing.assert_close(result.full_tensor(), 2 * rows)
            backward(result.sum())
        torch.testing.assert_close(mine.grad, torch.full((2, 2), 2.0))


@in_mesh(2)
def test_prepared_positional_inputs_may_be_given_as_keywords(mesh: DeviceMesh) -> None:
    module = TwoInputs()
    style = PrepareModuleInput(
        input_layouts=(Shard(0), Replicate()), desired_input_layouts=(Replicate(), Shard(0))
    )
    parallelize_module(module, mesh, style)
    module(a=torch.ones(2), b=torch.ones(4), c=3)
    a, b, c = module.given
    assert isinstance(a, DTensor)
    assert (a.placements, a.shape, b.placements, b.shape, c) == (
        (Replicate(),),
        (4,),
        (Shard(0),),
        (4,),
        3,
    )


@in_mesh(2)
def test_prepared_output_of_one_tensor_is_bare_and_a_list_is_one_output(mesh: DeviceMesh) -> None:
    style = PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())
    module = parallelize_module(nn.Identity(), mesh, style)
    torch.testing.assert_close(module(part(torch.arange(4.0), 0, mesh)), torch.arange(4.0))
    unnamed = PrepareModuleOutput(output_layouts=(None,), desired_output_layouts=(None,))
    assert parallelize_module(nn.Identity(), mesh, unnamed)([1, 2]) == [1, 2]


@in_mesh(2)
def test_a_copy_is_parallel_too_and_has_its_own_parameters(mesh: DeviceMesh) -> None:
    model = parallelize_module(mlp(), mesh, PLAN)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert not model(torch.ones(2, 6)).any()
    assert other(torch.ones(2, 6)).all()


@not_on_devices("the simulated device has no autocast")
@in_mesh(2)
def test_autocast(mesh: DeviceMesh) -> None:
    alone = mlp()
    parallel = copy.deepcopy(alone)
    parallelize_module(parallel, mesh, PLAN)
    x = torch.randn(4, 6)
    for model in (alone, parallel):
        with torch.autocast("cpu", torch.bfloat16):
            result = model(x)
        assert result.dtype == torch.bfloat16
        backward(result.float().sum())
    for ours, theirs in zip(parallel.parameters(), alone.parameters(), strict=True):
        assert ours.grad is not None
        assert ours.grad.dtype == torch.float32
        torch.testing.assert_close(gradient_of(ours), theirs.grad, rtol=0.05, atol=0.05)
