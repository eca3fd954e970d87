"""A program run over the workers of a group: what each of them does for it.

All functions here are called remotely, except ``run_over_workers`` and ``leftovers``, which the worker
that leads the test calls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

import dist_autograd
import rpc
from dist_autograd.api import autograd
from dist_optim import DistributedOptimizer
from tests.fuzz.autograd.interpretation import (
    Calls,
    Future,
    Run,
    Station,
    Strike,
    Values,
    interpret,
    no_strike,
    roots_of,
    wait_for_all,
)
from tests.fuzz.autograd.observations import Observed
from tests.fuzz.autograd.places import devices, synchronize
from tests.fuzz.autograd.program import Call, Manner, Plan, Program, Style
from tests.fuzz.autograd.reference import passes

_stations: dict[int, Station] = {}
_runs: dict[tuple[int, int], Run] = {}
_doers: list[rpc.RRef[Doer]] = []
_steps: dict[tuple[int, int], list[Tensor | None]] = {}
"""By run: the gradients that this worker's optimizer has stepped with."""


def name_of(worker: int) -> str:
    """The name of a worker in the group."""
    return f"worker{worker}"


def run_over_workers(
    program: Program, timeout: float, strikes: Mapping[int, Strike] | None = None
) -> tuple[list[Observed], Observed]:
    """What each run sees, and what the hooks of leaves and modules see, which all runs share.

    Args:
        timeout: seconds that it may take.
        strikes: by worker, what is to go wrong there.
    """
    shared = Observed()
    for worker in range(program.workers):
        strike = (strikes or {}).get(worker, no_strike)
        rpc.rpc_sync(name_of(worker), prepare, args=(program, strike))
    try:
        runs = rpc.rpc_sync(name_of(program.driver), drive, args=(program.seed,), timeout=timeout)
    finally:
        for worker in range(program.workers):
            shared.update(rpc.rpc_sync(name_of(worker), forget, args=(program.seed,)))
    return runs, shared


def leftovers(workers: Iterable[int]) -> list[str]:
    """What workers still have of contexts and backwards, though all are over; waits a while for none."""
    left = {name_of(worker): rpc.rpc_sync(name_of(worker), wait_until_free) for worker in workers}
    return [f"{worker} is left with {counts}" for worker, counts in left.items() if any(counts.values())]


# ---- before and after


def introduce(workers: int) -> None:
    """Makes what the calls through proxies need, once in a group's life."""
    _doers[:] = [rpc.remote(name_of(worker), Doer) for worker in range(workers)]


def dismiss() -> None:
    """Undoes ``introduce``."""
    _doers.clear()


def prepare(program: Program, strike: Strike) -> None:
    """Makes this worker's part of a program."""
    worker = rpc.get_worker_info().id
    neighbour = name_of((worker + 1) % program.workers)

    def visit(value: Tensor) -> Tensor:
        returned: Tensor = rpc.rpc_sync(neighbour, itself, args=(value,))
        return returned

    station = _stations[program.seed] = Station(program, worker, visit, strike)
    for index in range(program.runs):
        _runs[program.seed, index] = Run(station)
    synchronize()


def itself(value: Tensor) -> Tensor:
    """What it is given."""
    return value


def forget(seed: int) -> Observed:
    """Drops this worker's part of a program; what its hooks have seen."""
    station = _stations.pop(seed)
    for index in range(station.program.runs):
        _runs.pop((seed, index)).close()
        _steps.pop((seed, index), None)
    return Observed(seen=dict(station.seen))


def wait_until_free(seconds: float = 30.0) -> dict[str, int]:
    """Waits until this worker knows of no context and runs no backward; counts of what is left."""
    deadline = time.monotonic() + seconds
    while True:
        mine = autograd()
        counts = {"contexts": len(mine.contexts), "backwards": len(mine.backwards)}
        if not any(counts.values()) or time.monotonic() > deadline:
            return counts
        time.sleep(0.002)


# ---- the driver


def drive(seed: int) -> list[Observed]:
    """Runs the program as often as it wants, all at once; what each run saw."""
    program = _stations[seed].program
    if program.shared_context:
        with dist_autograd.context() as context_id:
            me = rpc.get_worker_info()
            runs = [
                rpc.rpc_async(me, run_forward_and_backward, args=(seed, index, context_id))
                for index in range(program.runs)
            ]
            all_roots = [run.wait() for run in runs]
            return [_observed(program, index, context_id, roots) for index, roots in enumerate(all_roots)]
    start = threading.Barrier(program.runs)

    def run_in_own_context(index: int) -> Observed:
        start.wait()
        with dist_autograd.context() as context_id:
            roots = run_forward_and_backward(seed, index, context_id)
            observed = _observed(program, index, context_id, roots)
            synchronize()  # this thread's streams are not those that the answer is sent on
            return observed

    with ThreadPoolExecutor(program.runs) as threads:
        return list(threads.map(run_in_own_context, range(program.runs)))


def run_forward_and_backward(seed: int, index: int, context_id: int) -> list[Tensor]:
    """One run; the values of the roots."""
    program = _stations[seed].program
    if not program.remote_root:
        roots = main(seed, index)
        optimizer = _optimizer(program, index) if program.steps else None

        def run(some: list[Tensor], retain: bool) -> None:
            if optimizer is None or retain:
                dist_autograd.backward(context_id, some, retain)
            else:
                optimizer.backward_and_step(context_id, some)

        _run_passes(program.plan, roots, run)
        return [root.detach() for root in roots]
    references = rpc.rpc_sync(name_of(program.bodies[0].worker), main_for_another, args=(seed, index))
    _run_passes(program.plan, references, lambda some, retain: some[0].backward(context_id, retain))
    return [reference.to_here().detach() for reference in references]


def _optimizer(program: Program, index: int) -> DistributedOptimizer:
    workers = map(name_of, range(program.workers))
    parameters = [
        each for name in workers for each in rpc.rpc_sync(name, parameters_of, args=(program.seed,))
    ]
    return DistributedOptimizer(Witness, parameters, program.seed, index)


def parameters_of(seed: int) -> list[rpc.RRef[Tensor]]:
    """References to all that gets a gradient on this worker."""
    return [rpc.RRef(each) for each in _stations[seed].parameters().values()]


class Witness(torch.optim.Optimizer):
    """Changes nothing, and keeps the gradients that it steps with.

    Args:
        seed, index: of the run that it is for.
    """

    def __init__(self, parameters: Any, seed: int, index: int) -> None:
        super().__init__(parameters, {})
        self._run = seed, index

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # nobody uses what it returns
        [group] = self.param_groups
        gradients = [each.grad for each in group["params"]]
        _steps[self._run] = [None if each is None else each.clone() for each in gradients]


def _observed(program: Program, index: int, context_id: int, roots: list[Tensor]) -> Observed:
    observed = Observed(roots=roots)
    for worker in range(program.workers):
        observed.update(rpc.rpc_sync(name_of(worker), observe, args=(program.seed, index, context_id)))
    return observed


def main(seed: int, index: int) -> Values:
    """Body 0; the roots."""
    run = _runs[seed, index]
    return wait_for_all(interpret(_Calling(index), run, 0, [], roots_of(run.program, run)))


def main_for_another(seed: int, index: int) -> list[rpc.RRef[Tensor]]:
    """Body 0; references to the roots, which live on all workers in turn."""
    program = _stations[seed].program
    return [
        rpc.remote(name_of((program.driver + 1 + number) % program.workers), itself, args=(root,))
        for number, root in enumerate(main(seed, index))
    ]


def _run_passes(plan: Plan, roots: list[Any], run: Callable[[list[Any], bool], None]) -> None:
    each = passes(plan, roots)
    if plan is not Plan.AT_ONCE:
        for some, retain in each:
            run(some, retain)
        return
    start = threading.Barrier(len(each))

    def run_with_others(one: tuple[list[Any], bool]) -> None:
        start.wait()
        run(*one)

    with ThreadPoolExecutor(len(each)) as threads:
        list(threads.map(run_with_others, each))


def observe(seed: int, index: int, context_id: int) -> Observed:
    """What this worker saw of one run, the context's gradients included."""
    observed = _runs[seed, index].observed()
    gradients = dist_autograd.get_gradients(context_id)
    for name, parameter in _stations[seed].parameters().items():
        observed.gradients[name] = gradients.pop(parameter, None)
        if parameter.grad is not None:
            observed.gradients[f"{name}.grad"] = parameter.grad
    if _stations[seed].program.steps:
        for name, gradient in zip(_stations[seed].parameters(), _steps[seed, index], strict=True):
            observed.gradients[f"{name} in the step"] = gradient
    for number, gradient in enumerate(gradients.values()):
        observed.gradients[f"worker{_stations[seed].worker} unknown tensor {number}"] = gradient
    return observed


# ---- bodies


class _Calling(Calls):
    """Calls of other workers, made in the current context.

    Args:
        index: of the run.
    """

    def __init__(self, index: int) -> None:
        self._index = index

    def sync(self, run: Run, call: Call, values: Values) -> Values:
        with torch.set_grad_enabled(call.grad):
            if call.style is Style.PROXY:
                results = _doers[call.worker].rpc_sync().run_body(*self._args(run, call, values))
            else:
                results = rpc.rpc_sync(*self._function(run, call), args=self._args(run, call, values))
        return _unpack(results)

    def start(self, run: Run, call: Call, values: Values) -> Future:
        return rpc.rpc_async(*self._function(run, call), args=self._args(run, call, values))

    def received(self, value: Any) -> Values:
        return _unpack(value)

    def remote(self, run: Run, call: Call, values: Values) -> rpc.RRef[Any]:
        return rpc.remote(*self._function(run, call), args=self._args(run, call, values))

    def fetch(self, run: Run, reference: rpc.RRef[Any]) -> Values:
        return _unpack(reference.to_here())

    def _function(self, run: Run, call: Call) -> tuple[str, Callable[..., Any]]:
        manner = run.program.bodies[call.body].manner
        return name_of(call.worker), _FUNCTIONS[manner]

    def _args(self, run: Run, call: Call, values: Values) -> tuple[Any, ...]:
        return run.program.seed, self._index, call.body, _pack(values, call.body)


def run_body(seed: int, index: int, number: int, arguments: Any) -> Any:
    """Runs a body in a plain function."""
    return _pack(wait_for_all(_interpret(seed, index, number, arguments)), number)


async def run_body_in_coroutine(seed: int, index: int, number: int, arguments: Any) -> Any:
    """Runs a body in a coroutine."""
    body = _interpret(seed, index, number, arguments)
    value: Any = None
    while True:
        try:
            future: Any = body.send(value)
        except StopIteration as end:
            return _pack(end.value, number)
        value = await future


@rpc.functions.async_execution
def run_body_in_callbacks(seed: int, index: int, number: int, arguments: Any) -> torch.futures.Future[Any]:
    """Runs a body up to where it waits, and goes on where what it waits for is completed."""
    body = _interpret(seed, index, number, arguments)
    results: torch.futures.Future[Any] = torch.futures.Future(devices=devices())

    def go_on(previous: Future | None) -> None:
        synchronize()
        try:
            future = body.send(previous.value() if previous else None)
        except StopIteration as end:
            results.set_result(_pack(end.value, number))
        except Exception as error:  # the caller's
            results.set_exception(error)
        else:
            future.add_done_callback(go_on)

    go_on(None)
    return results


class Doer:
    """Runs bodies in a method."""

    def run_body(self, seed: int, index: int, number: int, arguments: Any) -> Any:
        """Runs a body."""
        return run_body(seed, index, number, arguments)


def _interpret(seed: int, index: int, number: int, arguments: Any) -> Any:
    return interpret(_Calling(index), _runs[seed, index], number, _unpack(arguments))


_FUNCTIONS: dict[Manner, Callable[..., Any]] = {
    Manner.PLAIN: run_body,
    Manner.COROUTINE: run_body_in_coroutine,
    Manner.CONTINUED: run_body_in_callbacks,
}


def _pack(values: Values, number: int) -> Any:
    """The values in one container or another."""
    match number % 3:
        case 0:
            return tuple(values)
        case 1:
            return {"values": list(values)}
        case _:
            return [(value,) for value in values]


def _unpack(packed: Any) -> Values:
    match packed:
        case tuple():
            return list(packed)
        case dict():
            values: Values = packed["values"]
            return values
        case _:
            return [value for (value,) in packed]
