"""``loss_parallel`` against cross entropy in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional

from spmd.tensor_parallel import loss_parallel
from tests.group.spmd.meshes import backward, gradient_of, in_mesh, whole


def compare(
    mesh: DeviceMesh,
    logits: Tensor,
    target: Tensor,
    placements: tuple[Placement, ...],
    target_placements: tuple[Placement, ...] | None = None,
    **options: Any,
) -> None:
    alone = logits.clone().requires_grad_()
    expected = functional.cross_entropy(alone, target, **options)
    upstream = torch.rand_like(expected)
    backward(expected, upstream)
    sharded = distribute_tensor(logits, mesh, placements).requires_grad_()
    given = target if target_placements is None else distribute_tensor(target, mesh, target_placements)
    with loss_parallel():
        loss = functional.cross_entropy(sharded, given, **options)
    assert isinstance(loss, DTensor)
    torch.testing.assert_close(loss.full_tensor(), expected)
    replicated = (Replicate(),) * mesh.ndim
    backward(loss, distribute_tensor(upstream, mesh, replicated))
    assert isinstance(sharded.grad, DTensor)
    assert sharded.grad.placements == placements
    assert alone.grad is not None
    torch.testing.assert_close(sharded.grad.full_tensor(), alone.grad)


@in_mesh(2)
def test_every_kind_of_target_and_reduction(mesh: DeviceMesh) -> None:
    for shape in ((6, 9), (2, 10, 5), (9,)):
        classes = shape[1] if len(shape) > 1 else shape[0]
        dim = 1 if len(shape) > 1 else 0
        logits = 10 * torch.randn(shape)
        indices = torch.randint(classes, shape[:dim] + shape[dim + 1 :])
        probabilities = torch.rand(shape).softmax(dim)
        some = indices.clone()
        if some.ndim:
            some.view(-1)[::2] = -100
        for weight in (None, torch.rand(classes)):
            for reduction in ("none", "sum", "mean"):
                for smoothing in (0.0, 0.3):
                    for target in (indices, some, probabilities):
                        compare(
                            mesh,
                            logits,
                            target,
                            (Shard(dim),),
                            weight=weight,
                            reduction=reduction,
                            label_smoothing=smoothing,
                        )


@in_mesh(4)
def test_fewer_classes_than_ranks(mesh: DeviceMesh) -> None:
    compare(mesh, torch.randn(5, 3), torch.randint(3, (5,)), (Shard(1),), label_smoothing=0.1)


@in_mesh(4, 2, 2, names=("dp", "tp"))
def test_samples_sharded_by_another_dimension_of_the_mesh(mesh: DeviceMesh) -> None:
    for reduction in ("none", "sum", "mean"):
        logits, target = torch.randn(5, 6), torch.tensor([1, -100, 3, 5, 0])
        rows = (Shard(0), Replicate())
        compare(mesh, logits, target, (Shard(0), Shard(1)), rows, reduction=reduction)
        compare(mesh, logits, target, (Replicate(), Shard(1)), reduction=reduction)
        weight = torch.rand(6)
        compare(mesh, logits, target, (Shard(0), Shard(1)), rows, reduction=reduction, weight=weight)
        sequences, words = torch.randn(2, 6, 4), torch.randint(6, (2, 4))
        layout = (Shard(2), Shard(1))
        compare(mesh, sequences, words, layout, (Shard(1), Replicate()), reduction=reduction)


@in_mesh(4, 2, 2, names=("dp", "tp"))
def test_mean_over_a_mesh_is_replicated_and_scalar_backward_works(mesh: DeviceMesh) -> None:
    logits = distribute_tensor(torch.randn(4, 6), mesh, (Shard(0), Shard(1))).requires_grad_()
    target = distribute_tensor(torch.tensor([0, 1, 2, 3]), mesh, (Shard(0), Replicate()))
    alone = whole(logits).detach().requires_grad_()
    expected = functional.cross_entropy(alone, whole(target))
    backward(expected)
    with loss_parallel():
        loss = functional.cross_entropy(logits, target)
        backward(loss)
    assert loss.item() == pytest.approx(expected.item())
    torch.testing.assert_close(gradient_of(logits), alone.grad)
    logits.grad = None
    with loss_parallel():
        backward(functional.cross_entropy(logits, target, reduction="sum"))
    torch.testing.assert_close(gradient_of(logits), 4 * gradient_of(alone))


@in_mesh(2)
def test_half_precision_is_computed_in_single(mesh: DeviceMesh) -> None:
    logits = torch.randn(4, 8).bfloat16()
    target = torch.randint(8, (4,))
    with loss_parallel():
        loss = functional.cross_entropy(distribute_tensor(logits, mesh, [Shard(1)]), target)
    expected = functional.cross_entropy(logits.float(), target).bfloat16()
    assert whole(loss) == expected


@in_mesh(2)
def test_everything_else_is_left_alone(mesh: DeviceMesh) -> None:
    handlers = dict(DTensor._op_dispatcher._custom_op_handlers)
    values = torch.randn(4, 6)
    sharded = distribute_tensor(values, mesh, [Shard(1)]).requires_grad_()
    alone = values.clone().requires_grad_()
    with pytest.raises(ZeroDivisionError), loss_parallel():
        raise ZeroDivisionError
    with loss_parallel():
        with loss_parallel():
            nn.CrossEntropyLoss()(values, torch.tensor([0, 1, 2, 3]))
        for dim in (0, 1):
            result = functional.log_softmax(sharded, dim)
            expected = functional.log_softmax(alone, dim)
            torch.testing.assert_close(whole(result), expected)
            backward((whole(result) * values).sum())
            backward((expected * values).sum())
            assert sharded.grad is not None
            torch.testing.assert_close(gradient_of(sharded), alone.grad)
        functional.cross_entropy(sharded, torch.tensor([0, 1, 2, 3]))
    assert DTensor._op_dispatcher._custom_op_handlers == handlers


@in_mesh(2)
def test_wrong_layouts_are_refused(mesh: DeviceMesh) -> None:
    logits, target = torch.randn(4, 6), torch.tensor([0, 1, 2, 3])
    rows = distribute_tensor(logits, mesh, [Shard(0)])
    with (
        loss_parallel(),
        pytest.raises(ValueError, match="exactly one mesh dim to shard tensor dimension 1"),
    ):
        functional.cross_entropy(rows, target)
    classes = distribute_tensor(logits, mesh, [Shard(1)])
    with loss_parallel(), pytest.raises(RuntimeError, match=r"Expected \(Replicate\(\),\) but got"):
        functional.cross_entropy(classes, distribute_tensor(target, mesh, [Shard(0)]))
    with loss_parallel(), pytest.raises(IndexError, match="from 0 to 5, got 0 to 6"):
        functional.cross_entropy(classes, torch.tensor([0, 1, 2, 6]))
    with loss_parallel(), pytest.raises(ValueError, match=r"shape \[4\].*got .* with shape \[3\]"):
        functional.cross_entropy(classes, target[:3])


@in_mesh(2, 2, 1, names=("dp", "tp"))
def test_a_plain_target_is_refused_where_samples_are_sharded(mesh: DeviceMesh) -> None:
    logits = distribute_tensor(torch.randn(4, 6), mesh, (Shard(0), Shard(1)))
    with loss_parallel(), pytest.raises(ValueError, match="requires a DTensor"):
        functional.cross_entropy(logits, torch.tensor([0, 1, 2, 3]))
