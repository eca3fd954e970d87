"""Models to train: one spread over workers, beside the same in one process; and one that shares a weight.
Optimizers that fail or wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import dist_autograd
import rpc
from dist_optim import DistributedOptimizer
from rref import RemoteModule
from tests.support.default_device import placed
from tests.support.serving import wait_at_gate

PLACES = ("worker1", "worker2", "worker1")
"""Where the layers of a ``Spread`` live, in most tests."""


def batches(count: int, seed: int = 0) -> list[Tensor]:
    """Inputs of shape (5, 4)."""
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(5, 4, generator=random) for _ in range(count)]


def layer(inputs: int, outputs: int, seed: int) -> nn.Linear:
    """A layer that is the same wherever it is made."""
    made = nn.Linear(inputs, outputs)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random))
    return made


class Spread:
    """Three layers, each on a worker; and the same in this process, to compare with.

    Args:
        places: of the layers.
    """

    def __init__(self, *places: str) -> None:
        sizes = [(4, 6), (6, 6), (6, 3)]
        self.remote = [
            RemoteModule(placed(place), layer, args=(*size, number))
            for number, (place, size) in enumerate(zip(places, sizes, strict=True))
        ]
        self.local = nn.Sequential(*(layer(*size, number) for number, size in enumerate(sizes)))

    def references(self) -> list[rpc.RRef[nn.Parameter]]:
        """To the parameters of the spread model, in the order of those of the local one."""
        return [reference for module in self.remote for reference in module.remote_parameters()]

    def loss(self, inputs: Tensor) -> Tensor:
        """Of the spread model."""
        outputs = inputs
        for module in self.remote:
            outputs = module(outputs).tanh()
        return outputs.square().sum()

    def local_loss(self, inputs: Tensor) -> Tensor:
        """Of the local model."""
        outputs = inputs
        for module in self.local:
            outputs = module(outputs).tanh()
        return outputs.square().sum()

    def train(
        self,
        optimizer: DistributedOptimizer,
        inputs: list[Tensor],
        before_step: Callable[[int], Any] = lambda context_id: None,
    ) -> None:
        """Trains the spread model, one step for each batch."""
        for batch in inputs:
            with dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [self.loss(batch)])
                before_step(context_id)
                optimizer.step(context_id)

    def train_local(
        self, optimizer: torch.optim.Optimizer, inputs: list[Tensor], before_step: Callable[[], Any] = int
    ) -> None:
        """Trains the local model, one step for each batch."""
        for batch in inputs:
            optimizer.zero_grad()
            torch.autograd.backward(self.local_loss(batch))
            before_step()
            optimizer.step()

    def values(self) -> list[Tensor]:
        """The parameters of the spread model as they are now."""
        return [reference.to_here().detach() for reference in self.references()]

    def check_same(self) -> None:
        """Both models have the same parameters."""
        torch.testing.assert_close(self.values(), [each.detach() for each in self.local.parameters()])


class Tied(nn.Module):
    """Its input and output share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).tanh() @ self.weight.t()


def look_at_grad(model: rpc.RRef[nn.Module]) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.local_value().parameters()]


class FailsOnWorker1(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if rpc.get_worker_info().name == "worker1":
            raise ArithmeticError("no step here")
        super().step(closure)


class Held(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        wait_at_gate()


def notes_of(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", ()))
