"""Programs that run over several workers and train nothing: what the exactness of gradients is tested with.

A program is data. It has numbered *bodies*, each of which runs on one worker and is called exactly once;
body 0 is the main one. A body's steps work on named values: its parameters, what its steps make, and what
its worker has: ``leaf0`` to ``leaf2`` (parameters that require grad) and slots, where a body keeps a value
for later ones. Every name and every step's number occurs once in the whole program, so that what hooks saw
can be compared between two runs. ``str(program)`` shows it as indented steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

LEAVES = 3
"""How many leaves each worker has."""


class Numbers(Enum):
    """What the leaves' elements are."""

    INTEGERS = "integers"
    """Small integers, and operations whose gradients are integers too: any order of summation is exact."""
    REALS = "reals"


class Plan(Enum):
    """How the backward passes are run."""

    ONCE = "one backward of all roots"
    TWICE = "two backwards of all roots, one after the other"
    ONE_BY_ONE = "one backward for each root"
    AT_ONCE = "a backward for each root, at the same time"


class Style(Enum):
    """How a body is called."""

    SYNC = "rpc_sync"
    ASYNC = "rpc_async"
    REMOTE = "remote"
    PROXY = "rref.rpc_sync()"


class Manner(Enum):
    """What kind of function runs a body."""

    PLAIN = "a function"
    COROUTINE = "an async def function"
    CONTINUED = "an async_execution function, which goes on in callbacks"


@dataclass(frozen=True)
class Operation:
    """A local operation, of those in ``operations.py``."""

    number: int
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    variant: int

    def __str__(self) -> str:
        made = f"{', '.join(self.outputs)} = " if self.outputs else ""
        return f"{made}{self.name}({', '.join(self.inputs)})  # variant {self.variant}"


@dataclass(frozen=True)
class Call:
    """A call of another body. ``outputs`` are its results; of ``rpc_async`` they are named by the ``Wait``,
    and of ``remote`` there is one, a reference.
    """

    number: int
    worker: int
    body: int
    style: Style
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    grad: bool = True

    def __str__(self) -> str:
        made = f"{', '.join(self.outputs)} = " if self.outputs else ""
        what = f"{self.style.value} body{self.body} on worker{self.worker}"
        where = "" if self.grad else "  # under no_grad"
        return f"{made}{what}({', '.join(self.inputs)}){where}"


@dataclass(frozen=True)
class Wait:
    """Waits for an ``rpc_async``, given by its step's number."""

    number: int
    call: int
    outputs: tuple[str, ...]

    def __str__(self) -> str:
        return f"{', '.join(self.outputs)} = wait for {self.call}"


@dataclass(frozen=True)
class Fetch:
    """``to_here`` of a reference to a body's results."""

    number: int
    reference: str
    outputs: tuple[str, ...]

    def __str__(self) -> str:
        return f"{', '.join(self.outputs)} = {self.reference}.to_here()"


@dataclass(frozen=True)
class Keep:
    """Puts a value where later bodies on this worker find it."""

    number: int
    value: str
    slot: str

    def __str__(self) -> str:
        return f"{self.slot} = {self.value}"


Step = Operation | Call | Wait | Fetch | Keep


@dataclass(frozen=True)
class Body:
    """What one call does, and where."""

    worker: int
    manner: Manner
    parameters: tuple[str, ...]
    steps: tuple[Step, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """See the head of this module.

    Attributes:
        seed: what it was made from, and the leaves' elements are made from.
        workers: how many there are.
        numbers: what the leaves' elements are.
        bodies: by number; body 0 is the main one.
        roots: for each root, the values of body 0 whose sum it is.
        plan: how the backward passes are run.
        runs: so often it is run at the same time, over the same leaves.
        shared_context: all these runs are in one context; else each has its own.
        hooked: the workers whose leaves and module have hooks.
        driver: the worker that opens the contexts. If it is not body 0's, backward passes start from
            references to the roots, which are spread over all workers.
    """

    seed: int
    workers: int
    numbers: Numbers
    bodies: tuple[Body, ...]
    roots: tuple[tuple[str, ...], ...]
    plan: Plan
    runs: int
    shared_context: bool
    hooked: frozenset[int]
    driver: int

    @property
    def counts_arrivals(self) -> bool:
        """Whether it is counted how often the nodes run that stand for messages.

        That takes hooks on them. Where a node has none, a run that ends at it need not run it.
        """
        return self.seed % 5 != 0

    @property
    def steps(self) -> bool:
        """Whether the last backward of each run is asked for together with an optimizer's step."""
        together = self.plan is not Plan.AT_ONCE and not self.shared_context and not self.remote_root
        return together and self.seed % 3 == 0

    @property
    def remote_root(self) -> bool:
        """Whether the roots are on other workers than the driver."""
        return self.driver != self.bodies[0].worker

    def __str__(self) -> str:
        hooked = ", ".join(f"worker{worker}" for worker in sorted(self.hooked)) or "none"
        where = "one context" if self.shared_context else "a context each"
        lines = [
            f"program {self.seed}: {self.workers} workers, {self.numbers.value}",
            f"run {self.runs} times at once, in {where}",
            f"driven by worker{self.driver}; leaves and modules with hooks: {hooked}",
            *self._lines(0, ""),
            *(f"root {number} = sum of {', '.join(root)}" for number, root in enumerate(self.roots)),
            self.plan.value + (", the last with a step" if self.steps else ""),
        ]
        return "\n".join(lines)

    def _lines(self, number: int, indent: str) -> Iterator[str]:
        body = self.bodies[number]
        given = ", ".join(body.parameters)
        yield f"{indent}body{number} on worker{body.worker} ({given}), {body.manner.value}:"
        for step in body.steps:
            yield f"{indent}  {step.number:3}  {step}"
            if isinstance(step, Call):
                yield from self._lines(step.body, indent + "       ")
        if body.results:
            yield f"{indent}  returns {', '.join(body.results)}"
