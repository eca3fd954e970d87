"""Runs the bodies of a program, wherever they run: in one process or on a worker each.

A ``Station`` is what a worker has of a program: leaves, a module, an embedding, and what their hooks saw. A
``Run`` is what it has of one run of the program. How values travel is left to ``Calls``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node

from tests.fuzz.autograd.observations import Observed, Seen
from tests.fuzz.autograd.operations import OPERATIONS
from tests.fuzz.autograd.places import device, recorded
from tests.fuzz.autograd.program import (
    LEAVES,
    Call,
    Fetch,
    Keep,
    Numbers,
    Operation,
    Plan,
    Program,
    Style,
    Wait,
)

Values = list[Any]
Future = torch.futures.Future[Any]
Finish = Callable[[dict[str, Any]], Values]

Visit = Callable[[Tensor], Tensor]
Strike = Callable[[str], None]
"""Is called with the key of each hook and custom function that runs; it may raise, or worse."""

_ARRIVAL = "arrival "


def no_strike(_key: str) -> None:
    """Nothing goes wrong."""


class Station:
    """One worker's part of a program.

    Args:
        worker: which one.
        visit: sends a tensor to another worker and back.
        strike: by default nothing goes wrong.
    """

    def __init__(self, program: Program, worker: int, visit: Visit, strike: Strike = no_strike) -> None:
        self.program = program
        self.visit = visit
        self.strike = strike
        self.worker = worker
        self.numbers = program.numbers
        self.seen: defaultdict[str, Seen] = defaultdict(list)
        generator = torch.Generator().manual_seed(program.seed * 10 + worker)

        def numbers(*shape: int) -> Tensor:
            if self.numbers is Numbers.INTEGERS:
                return torch.randint(-1, 2, shape, generator=generator).double().to(device())
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(device())

        self.leaves = [numbers(3, 3).requires_grad_() for _ in range(LEAVES)]
        self.embedding = torch.nn.Embedding(3, 3, sparse=device() == "cpu", _weight=numbers(3, 3))
        self.module = torch.nn.Linear(3, 3).double().to(device())
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.copy_(numbers(*parameter.shape))
        if worker in program.hooked:
            self._add_hooks()

    def parameters(self) -> dict[str, Tensor]:
        """All that gets a gradient, by name."""
        return {
            **{f"worker{self.worker} leaf{index}": leaf for index, leaf in enumerate(self.leaves)},
            **{f"worker{self.worker} {name}": found for name, found in self.module.named_parameters()},
            f"worker{self.worker} embedding": self.embedding.weight,
        }

    def _add_hooks(self) -> None:
        def leaf_hook(gradient: Tensor | None) -> Tensor | None:
            self.record(f"leaf hook of worker{self.worker}", gradient)
            return None if gradient is None else gradient.clamp(-20, 20)

        def module_hook(_module: Any, inputs: Any, outputs: Any) -> None:
            self.record(f"module hook of worker{self.worker}, output", outputs[0])
            self.record(f"module hook of worker{self.worker}, input", inputs[0])

        self.leaves[0].register_hook(leaf_hook)  # type: ignore[no-untyped-call]
        if self.program.plan is not Plan.AT_ONCE:  # PyTorch's module hooks sometimes miss one of two at once
            self.module.register_full_backward_hook(module_hook)

    def record(self, key: str, seen: Tensor | None) -> None:
        """Notes what a hook of a leaf or module was given."""
        self.strike(key)
        self.seen[key].append(None if seen is None else seen.detach().cpu().clone())


class Run:
    """One run's part on one worker. Steps and backward passes of several threads write to it."""

    def __init__(self, station: Station) -> None:
        self.program = station.program
        self.visit: Visit = station.visit
        self._strike = station.strike
        self.worker = station.worker
        self.numbers = station.numbers
        self.module: torch.nn.Module = station.module
        self.embedding = station.embedding
        self.leaves = {f"leaf{index}": leaf for index, leaf in enumerate(station.leaves)}
        self.slots: dict[str, Any] = {}
        self.seen: defaultdict[str, Seen] = defaultdict(list)
        self._retained: dict[str, Tensor] = {}
        self._runs: list[tuple[str, int]] = []
        self._nodes: dict[int, Node] = {}

    def record(self, key: str, seen: Tensor | None) -> None:
        """Notes what a hook or custom function was given."""
        self._strike(key)
        self.seen[key].append(None if seen is None else seen.detach().cpu().clone())

    def retain(self, key: str, value: Tensor) -> None:
        """Has an intermediate value's gradient kept."""
        if self.program.plan is not Plan.AT_ONCE:  # PyTorch does not add to ``.grad`` atomically
            value.retain_grad()
            self._retained[key] = value

    def arrived(self, what: str, values: Sequence[Any]) -> None:
        """Counts the runs of the nodes that a message's tensors hang on, in programs where that is done."""
        nodes = {
            id(value.grad_fn): value.grad_fn
            for value in values
            if isinstance(value, Tensor) and value.grad_fn is not None
        }
        for index, node in enumerate(nodes.values()):
            if id(node) in self._nodes:
                continue
            if self.program.counts_arrivals:
                self._watch(node, f"{_ARRIVAL}{what} #{index}")
            else:
                self._nodes[id(node)] = node

    def made(self, step: Operation, values: Sequence[Tensor]) -> None:
        """Counts the runs of all nodes that a step has made."""
        waiting = [value.grad_fn for value in reversed(values)]
        index = 0
        while waiting:
            node = waiting.pop()
            if node is None or id(node) in self._nodes or node.name().endswith("AccumulateGrad"):
                continue
            self._watch(node, f"{step.number} {step.name}, {node.name()} #{index}")
            index += 1
            waiting += [following for following, _ in node.next_functions]

    def pass_over(self, values: Sequence[Tensor]) -> None:
        """Leaves out the nodes that a step has made."""
        waiting = [value.grad_fn for value in values]
        while waiting:
            node = waiting.pop()
            if node is not None and id(node) not in self._nodes:
                self._nodes[id(node)] = node
                waiting += [following for following, _ in node.next_functions]

    def _watch(self, node: Node, key: str) -> None:
        self._nodes[id(node)] = node
        runs = self._runs
        node.register_prehook(lambda _gradients: runs.append((key, torch._C._current_graph_task_id())))

    def observed(self) -> Observed:
        """What was seen so far; gradients and roots are not known here."""
        executions = Counter(key for key, _ in self._runs)
        passes: defaultdict[str, set[int]] = defaultdict(set)
        arrivals: Counter[str] = Counter()
        for key, running in self._runs:
            if key.startswith(_ARRIVAL):
                message = key.removeprefix(_ARRIVAL).rpartition(" ")[0]
                passes[message].add(running)
                arrivals[message] = max(arrivals[message], len(passes[message]), executions[key])
        executions = Counter({key: n for key, n in executions.items() if not key.startswith(_ARRIVAL)})
        return Observed(
            seen=dict(self.seen),
            executions=executions,
            arrivals=arrivals,
            retained={key: value.grad for key, value in self._retained.items()},
        )

    def close(self) -> None:
        """Lets go of the graph, which refers to this object by its hooks."""
        self._nodes.clear()
        self._retained.clear()
        self.slots.clear()


class Calls(Protocol):
    """How bodies are called, and how values travel."""

    def sync(self, run: Run, call: Call, values: Values) -> Values:
        """``rpc_sync``, or through a proxy."""
        ...

    def start(self, run: Run, call: Call, values: Values) -> Future:
        """``rpc_async``; ``received`` makes the results of the future's value."""
        ...

    def received(self, value: Any) -> Values:
        """The results of a call that was started."""
        ...

    def remote(self, run: Run, call: Call, values: Values) -> Any:
        """``remote``: a reference to the results."""
        ...

    def fetch(self, run: Run, reference: Any) -> Values:
        """``to_here``."""
        ...


def interpret(
    calls: Calls, run: Run, number: int, arguments: Values, finish: Finish | None = None
) -> Generator[Future, Any, Values]:
    """Runs a body, as a generator that yields each future it waits for and is sent its value.

    Args:
        number: of the body.
        finish: makes the results from all values; by default they are those that the body names.
    """
    body = run.program.bodies[number]
    run.arrived(f"arguments of body{number}", arguments)
    values: dict[str, Any] = {**run.leaves, **dict(zip(body.parameters, arguments, strict=True))}
    started: dict[int, tuple[Call, Future]] = {}

    def find(name: str) -> Any:
        return recorded(run.slots[name] if name.startswith("slot") else values[name])

    def receive(what: str, names: tuple[str, ...], received: Values) -> None:
        run.arrived(what, received)
        values.update(zip(names, received, strict=True))

    for step in body.steps:
        match step:
            case Operation():
                inputs = tuple(find(name) for name in step.inputs)
                rule = OPERATIONS[step.name]
                made = rule.compute(run, f"{step.number} {step.name}", step.variant, inputs)
                values.update(zip(step.outputs, made, strict=True))
                if rule.calls:
                    run.pass_over(made)
                else:
                    run.made(step, made or inputs[:1])
            case Call(style=Style.ASYNC):
                started[step.number] = step, calls.start(run, step, [find(name) for name in step.inputs])
            case Call(style=Style.REMOTE):
                values[step.outputs[0]] = calls.remote(run, step, [find(name) for name in step.inputs])
            case Call():
                results = calls.sync(run, step, [find(name) for name in step.inputs])
                receive(f"results of body{step.body}", step.outputs, results)
            case Wait():
                call, future = started.pop(step.call)
                receive(f"results of body{call.body}", step.outputs, calls.received((yield future)))
            case Fetch():
                receive(f"fetch {step.number}", step.outputs, calls.fetch(run, values[step.reference]))
            case Keep():
                run.slots[step.slot] = find(step.value)
    return [find(name) for name in body.results] if finish is None else finish(values)


def roots_of(program: Program, run: Run) -> Finish:
    """Makes the roots from body 0's values.

    A backward that begins at a reference has one root only: there their sum stands for several.
    """

    def finish(values: dict[str, Any]) -> Values:
        found = {**run.slots, **values}
        roots = [
            torch.stack([found[name].sum() * (index + 1) for index, name in enumerate(names)]).sum()
            for names in program.roots
        ]
        one = program.remote_root and program.plan in (Plan.ONCE, Plan.TWICE)
        return [torch.stack(roots).sum()] if one else roots

    return finish


def wait_for_all(body: Generator[Future, Any, Values]) -> Values:
    """Runs a body to its end on this thread; its results."""
    value: Any = None
    while True:
        try:
            future = body.send(value)
        except StopIteration as end:
            results: Values = end.value
            return results
        value = future.wait()
