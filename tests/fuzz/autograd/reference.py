"""A program run in one process, on PyTorch's own autograd: what must come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.autograd.interpretation import (
    Calls,
    Future,
    Run,
    Station,
    Values,
    interpret,
    roots_of,
    wait_for_all,
)
from tests.fuzz.autograd.observations import Observed
from tests.fuzz.autograd.program import Call, Plan, Program


@dataclass
class _Reference:
    """Stands for an RRef."""

    owner: int
    values: Values


def run_in_one_process(program: Program) -> tuple[Observed, Observed]:
    """What one run sees, and what the hooks of leaves and modules see, which all runs share."""
    stations = [Station(program, worker, torch.Tensor.clone) for worker in range(program.workers)]
    runs = [Run(station) for station in stations]
    main = runs[program.bodies[0].worker]
    roots = wait_for_all(interpret(_Copying(runs), main, 0, [], roots_of(program, main)))
    for some, retain in passes(program.plan, roots):
        torch.autograd.backward(some, retain_graph=retain)
    context, shared = Observed(), Observed()
    for run, station in zip(runs, stations, strict=True):
        context.update(run.observed())
        times = program.runs if program.shared_context else 1
        for name, parameter in station.parameters().items():
            gradient = parameter.grad
            context.gradients[name] = None if gradient is None else gradient * times
            if program.steps:
                context.gradients[f"{name} in the step"] = context.gradients[name]
        shared.update(Observed(seen={key: seen * program.runs for key, seen in station.seen.items()}))
        run.close()
    context.roots = [root.detach() for root in roots]
    return context, shared


def passes(plan: Plan, roots: Sequence[Tensor]) -> list[tuple[list[Tensor], bool]]:
    """For each backward pass its roots, and whether the graph is kept for another."""
    match plan:
        case Plan.ONCE:
            return [(list(roots), False)]
        case Plan.TWICE:
            return [(list(roots), True), (list(roots), False)]
        case Plan.ONE_BY_ONE:
            return [([root], root is not roots[-1]) for root in roots]
        case Plan.AT_ONCE:
            return [([root], True) for root in (*roots, *roots)[: max(2, len(roots))]]


class _Copying(Calls):
    """Calls that run at once, with copies of what is sent."""

    def __init__(self, runs: list[Run]) -> None:
        self._runs = runs

    def sync(self, run: Run, call: Call, values: Values) -> Values:
        return _copies(self._run(call, values), call.grad)

    def start(self, run: Run, call: Call, values: Values) -> Future:
        future: Future = torch.futures.Future()
        future.set_result(self.sync(run, call, values))
        return future

    def received(self, value: Any) -> Values:
        results: Values = value
        return results

    def remote(self, run: Run, call: Call, values: Values) -> _Reference:
        return _Reference(call.worker, self._run(call, values))

    def fetch(self, run: Run, reference: _Reference) -> Values:
        return reference.values if reference.owner == run.worker else _copies(reference.values)

    def _run(self, call: Call, values: Values) -> Values:
        body = interpret(self, self._runs[call.worker], call.body, _copies(values, call.grad))
        return wait_for_all(body)


def _copies(values: Values, grad: bool = True) -> Values:
    """What arrives: a tensor that occurs twice arrives as one."""
    copies = {id(value): value for value in values}
    with torch.set_grad_enabled(grad):
        for key, value in copies.items():
            if isinstance(value, Tensor):
                copies[key] = value.clone()
    return [copies[id(value)] for value in values]
