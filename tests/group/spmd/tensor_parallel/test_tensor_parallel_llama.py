"""A model of Llama's kind, trained in parallel, step by step as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from spmd.tensor_parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from tests.group.spmd.llama import Llama, Shape
from tests.group.spmd.meshes import backward, gradient_of, in_mesh, whole
from tests.support.default_device import DEVICE, allow_reads_of_freed

Plan = dict[str, ParallelStyle]

TENSOR: Plan = {
    "embedding": RowwiseParallel(input_layouts=Replicate()),
    "layers.*.attention.w[qkv]": ColwiseParallel(),
    "layers.*.attention.wo": RowwiseParallel(),
    "layers.*.feed_forward.w[13]": ColwiseParallel(),
    "layers.*.feed_forward.w2": RowwiseParallel(),
    "layers.*.feed_forward.dropout": SequenceParallel(sequence_dim=-1, use_local_output=True),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
LOSS: Plan = TENSOR | {"head": ColwiseParallel(use_local_output=False)}
LOCAL_SEQUENCE: Plan = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*.*_norm": SequenceParallel(use_local_output=True),
    "layers.*.dropout": SequenceParallel(use_local_output=True),
    "layers.*.attention.w[qkv]": ColwiseParallel(input_layouts=Shard(1)),
    "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*.feed_forward.w[13]": ColwiseParallel(input_layouts=Shard(1)),
    "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*.feed_forward.dropout": SequenceParallel(sequence_dim=-1, use_local_output=True),
    "norm": SequenceParallel(use_local_output=True),
    "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
}
DTENSOR_SEQUENCE: Plan = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
    "layers.*.*_norm": SequenceParallel(),
    "layers.*.dropout": SequenceParallel(),
    "layers.*.attention": PrepareModuleInput(
        input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
    ),
    "layers.*.attention.w[qkv]": ColwiseParallel(),
    "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    "layers.*.feed_forward": PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
    ),
    "layers.*.feed_forward.w[13]": ColwiseParallel(),
    "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    "layers.*.feed_forward.dropout": SequenceParallel(sequence_dim=-1, use_local_output=True),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
}
PLANS = {
    "tensor": TENSOR,
    "loss": LOSS,
    "sequence on plain tensors": LOCAL_SEQUENCE,
    "sequence on DTensors": DTENSOR_SEQUENCE,
}

DROPPING = Shape(dropout=0.25)


def batches(steps: int, size: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(32, (size, 9), generator=generator) for _ in range(steps)]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    with loss_parallel():
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    return whole(loss)


def train(
    model: nn.Module, plan: Plan, of_rank: Callable[[Tensor], Tensor] = lambda batch: batch
) -> list[float]:
    """Losses, step by step. Gradients are clipped where no parameter is plain, as PyTorch needs it."""
    # On devices, PyTorch takes all parameters at once, and not both plain and distributed ones.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False)
    torch.manual_seed(3)
    losses = []
    for batch in batches(4):
        optimizer.zero_grad()
        loss = loss_of(model, of_rank(batch))
        backward(loss)
        if "norm" in plan:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return [each.item() for each in losses]


def model_of(shape: Shape) -> Llama:
    torch.manual_seed(1)
    model = Llama(shape)
    model.init_weights()
    return model


@pytest.mark.parametrize("plan", PLANS)
@in_mesh(2)
def test_losses_with_dropout_are_those_of_one_process(mesh: DeviceMesh, plan: str) -> None:
    model = model_of(DROPPING)
    expected = train(copy.deepcopy(model), PLANS[plan])
    parallelize_module(model, mesh, PLANS[plan], strict=True)
    assert model.head.weight is model.embedding.weight
    assert train(model, PLANS[plan]) == pytest.approx(expected, rel=1e-4)


def rows_of(mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    return lambda batch: batch.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]


def averaged_losses(losses: list[float], mesh: DeviceMesh) -> list[float]:
    together = torch.tensor(losses)
    dist.all_reduce(together, group=mesh["dp"].get_group())
    return (together / mesh["dp"].size()).tolist()


@pytest.mark.parametrize("plan", ["tensor", "sequence on DTensors"])
@in_mesh(4, 2, 2, names=("dp", "tp"))
def test_with_fsdp(mesh: DeviceMesh, plan: str) -> None:
    allow_reads_of_freed()
    model = model_of(Shape())
    expected = train(copy.deepcopy(model), PLANS[plan])
    parallelize_module(model, mesh["tp"], PLANS[plan])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    losses = train(model, PLANS[plan], rows_of(mesh))
    assert averaged_losses(losses, mesh) == pytest.approx(expected, rel=1e-4)


@in_mesh(2, 1, 2, names=("dp", "tp"))
def test_a_layer_that_is_called_past_fsdp_says_so(mesh: DeviceMesh) -> None:
    model = model_of(Shape())
    parallelize_module(model, mesh["tp"], TENSOR)
    fully_shard(model, mesh=mesh["dp"])
    layer = model.get_submodule("layers.0.feed_forward.w1")
    with pytest.raises(
        ValueError, match=r"module 'layers\.0\.feed_forward\.w1' .* expected weight on the mesh"
    ):
        layer(torch.ones(2, 16))


@in_mesh(4, 2, 2, names=("dp", "tp"))
def test_with_fsdp_in_mixed_precision(mesh: DeviceMesh) -> None:
    allow_reads_of_freed()
    model = model_of(Shape())
    expected = train(copy.deepcopy(model), TENSOR)
    parallelize_module(model, mesh["tp"], TENSOR)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    losses = train(model, TENSOR, rows_of(mesh))
    assert averaged_losses(losses, mesh) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("sharded", [False, True], ids=["tensor", "with fsdp"])
@in_mesh(4, 2, 2, names=("dp", "tp"))
def test_initialization_on_the_meta_device_is_that_of_one_process(mesh: DeviceMesh, sharded: bool) -> None:
    expected = model_of(Shape())
    with torch.device("meta"):
        model = Llama(Shape())
    parallelize_module(model, mesh["tp"], TENSOR)
    if sharded:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    model.to_empty(device=DEVICE)
    torch.manual_seed(1)
    Llama(Shape())  # draws as model_of does before it initializes
    model.init_weights()
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(whole(ours), theirs, rtol=0, atol=0, msg=name)


@in_mesh(2)
def test_generation_with_a_cache(mesh: DeviceMesh) -> None:
    model = model_of(Shape()).eval()
    prompt = batches(1)[0][:, :4]
    expected = model.generate(prompt, 8)
    parallelize_module(model, mesh, TENSOR)
    assert torch.equal(model.generate(prompt, 8), expected)
    with torch.inference_mode():
        assert torch.equal(model.generate(prompt, 8), expected)


@in_mesh(2)
def test_activation_checkpointing_draws_the_same_masks_again(mesh: DeviceMesh) -> None:
    def gradients(model: Llama, *, recompute: bool) -> None:
        for layer in model.layers:
            own: Any = type(layer).forward.__get__(layer)
            layer.forward = (
                (lambda *args, own=own: checkpoint(own, *args, use_reentrant=False)) if recompute else own
            )
        torch.manual_seed(5)
        backward(loss_of(model, batches(1)[0]))

    for independent in (False, True):
        plan = LOCAL_SEQUENCE | {
            "layers.*.dropout": SequenceParallel(use_local_output=True, independent_dropout=independent)
        }
        models = [parallelize_module(model_of(DROPPING), mesh, plan) for _ in range(2)]
        for model, recompute in zip(models, (False, True), strict=True):
            assert isinstance(model, Llama)
            gradients(model, recompute=recompute)
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            torch.testing.assert_close(gradient_of(one), gradient_of(other))
