"""Backward passes of simulated workers: over several others, back the way that the forward pass came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

import torch
from torch import Tensor

import dist_autograd
import rpc
from tests.simulation.truth import Truth
from tests.simulation.worker import Worker

__all__ = ["BACKWARD", "differentiate"]

BACKWARD: Final = "backward"

_FACTOR: Final = 3.0
_MOST_WORKERS: Final = 4


class _Outcome:
    """What a thread of a simulated worker has come to, like a future."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[Any], object]] = []
        self._value: Any = None
        self._error: BaseException | None = None

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        self._callbacks.append(callback)

    def value(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value

    def run(self, function: Callable[[], object]) -> None:
        try:
            self._value = function()
        except Exception as error:
            self._error = error
        for callback in self._callbacks:
            callback(self)


@rpc.functions.async_execution
def hop(number: int, x: Tensor, route: list[str]) -> Any:
    """Multiply, here and at the workers that follow, in a context."""
    if number >= 0:
        Truth.now.ran(number)
    if route:
        return rpc.rpc_async(route[0], hop, args=(-1, x * _FACTOR, route[1:]), timeout=0)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(x * _FACTOR)
    return done


def differentiate(
    truth: Truth, here: Worker, chance: Random, begins: Callable[[Sequence[Worker]], object]
) -> None:
    """A forward pass over some workers, which may include this one and any twice; and its backward pass.

    Args:
        begins: called before the backward pass with the workers that take part.
    """
    names = [info.name for info in here.agent.get_worker_infos()]
    route = chance.choices(names, k=chance.randint(1, _MOST_WORKERS))
    find = here.agent.group.peers.view.resolve
    through = [find(name).incarnation for name in route]
    made = truth.begin(BACKWARD, here, through[0], 0.0)
    made.through = through
    outcome = _Outcome()

    def run() -> tuple[int, int, None]:
        x = torch.full((2,), float(made.number), requires_grad=True)
        with dist_autograd.context() as context_id:
            y = rpc.rpc_sync(route[0], hop, args=(made.number, x * x, route[1:]), timeout=0)
            begins([truth.workers[each] for each in dict.fromkeys((here.incarnation, *through))])
            dist_autograd.backward(context_id, [y.sum()])
            found = dist_autograd.get_gradients(context_id)
        exact = 2 * x.detach() * _FACTOR ** len(route)
        if x not in found or not torch.equal(found[x], exact):
            truth.broken(f"the gradient of call {made.number} is {found.get(x)}, not {exact}")
        return made.number, 0, None

    truth.follow(made, outcome)
    truth.threads.start(here.loop, lambda: outcome.run(run))
