"""``DistributedOptimizer.clip_grad_norm_``: the norm over all owners, and the gradients scaled by it."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn, optim

import dist_autograd
from dist_optim import DistributedOptimizer
from rref import RemoteModule
from tests.group.dist_optim.models import PLACES, Spread, batches
from tests.support.default_device import placed
from tests.support.serving import first_of, in_worker0
from tests.support.workers import RunWorkers, Worker


def clip_to(max_norm: float, norm_type: float) -> None:
    model, norms = Spread(*PLACES), list[Tensor]()
    spread = DistributedOptimizer(optim.SGD, model.references(), lr=0.1)
    inputs = batches(2)
    model.train(
        spread,
        inputs,
        lambda context_id: norms.append(spread.clip_grad_norm_(context_id, max_norm, norm_type)),
    )
    parameters = list(model.local.parameters())
    model.train_local(
        optim.SGD(parameters, lr=0.1),
        inputs,
        lambda: norms.append(nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)),
    )
    model.check_same()
    torch.testing.assert_close(norms[:2], norms[2:], check_device=False)


@in_worker0(world_size=3)
def test_clipping_by_the_norm_over_all_owners_is_that_of_one_process() -> None:
    for max_norm, norm_type in ((0.5, 2.0), (0.5, 1.0), (0.01, float("inf")), (1000.0, 2.0), (0.3, 3.0)):
        clip_to(max_norm, norm_type)


class Pair(nn.Module):
    """Both parameters get one and the same tensor as their gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.zeros(4))
        self.other = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.one + self.other) * x


def clip_shared_gradient(_: Worker) -> list[list[float]]:
    module = RemoteModule(placed("worker1"), Pair)
    optimizer = DistributedOptimizer(optim.SGD, module.remote_parameters(), lr=1.0)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [module(torch.full((4,), 2.0)).sum()])
        assert optimizer.clip_grad_norm_(context_id, 8**0.5) == 32**0.5
        assert optimizer.clip_grad_norm_(context_id, 100.0).item() == pytest.approx(8**0.5)
        optimizer.step(context_id)
    return [reference.to_here().tolist() for reference in module.remote_parameters()]


def test_a_gradient_that_two_parameters_share_is_scaled_once(run_workers: RunWorkers) -> None:
    for weight in first_of(run_workers, clip_shared_gradient):
        assert weight == pytest.approx([-1.0] * 4)


@in_worker0()
def test_a_norm_that_is_not_finite_is_told_and_can_be_refused() -> None:
    module = RemoteModule(placed("worker1"), Pair)
    optimizer = DistributedOptimizer(optim.SGD, module.remote_parameters(), lr=1.0)
    with dist_autograd.context() as context_id:
        assert optimizer.clip_grad_norm_(context_id, 1.0) == 0  # nothing to clip yet
        dist_autograd.backward(context_id, [module(torch.full((4,), float("inf"))).sum()])
        with pytest.raises(RuntimeError, match=r"norm of order 2\.0 of the gradients is inf"):
            optimizer.clip_grad_norm_(context_id, 1.0, error_if_nonfinite=True)
        assert optimizer.clip_grad_norm_(context_id, 1.0) == float("inf")
        optimizer.step(context_id)
    assert module.remote_parameters()[0].to_here().isnan().all()  # as in PyTorch: infinity times zero


def scale_beside_a_backward(_: Worker) -> float:
    weight = torch.nn.Parameter(torch.ones(1))
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [weight * 4])
        other = threading.Thread(target=dist_autograd.backward, args=(context_id, [weight * 100]))

        def halve(gradient: Tensor) -> Tensor:
            other.start()
            other.join(0.1)  # until it waits, or is through
            return gradient / 2

        dist_autograd.change_gradients(context_id, [weight], halve)
        other.join()
        return dist_autograd.get_gradients(context_id)[weight].item()


def test_what_a_backward_adds_while_gradients_are_scaled_is_not_lost(run_workers: RunWorkers) -> None:
    assert first_of(run_workers, scale_beside_a_backward, world_size=1) == 102.0
