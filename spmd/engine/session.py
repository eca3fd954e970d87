"""Between the recorder and the workers: programs by number, ids of values, and what has gone wrong.

Everything goes out as steps, one for each flush and worker, in one order. Workers compute while the user's
program goes on; what failed there is raised when the program waits for them.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from torch import Tensor

from rpc.errors import RpcError, WorkerLostError
from spmd.engine.aliases import Value
from spmd.engine.errors import OperationError
from spmd.engine.parts import cut, has_blocks, holders, put_together
from spmd.engine.places import Place, described
from spmd.engine.program import REPLICATED, Instruction, Meta, Program, Ref, Scalar
from spmd.engine.recorder import Entry, Recorder, Recording
from spmd.engine.steps import Answer, Step

__all__ = ["Port", "Session"]

_AHEAD: Final = 16
"""Steps that workers may be behind the driver."""


class Port(Protocol):
    """A worker, as the driver sees it."""

    name: str

    def send(self, step: Step) -> Any:
        """Have it do a step; a future of its ``Answer``."""
        ...


class _Remote:
    """Keeps a value on the workers, as long as it lives."""

    __slots__ = ("__weakref__", "error", "freed", "id")

    def __init__(self, number: int, freed: deque[int]) -> None:
        self.id = number
        self.freed = freed
        self.error: Exception | None = None

    def __del__(self) -> None:
        self.freed.append(self.id)


@dataclass(eq=False)
class _Known:
    """A program that the workers have.

    Attributes:
        number: its.
        kept: for each of its instructions, which of the recorded operations it is.
    """

    number: int
    program: Program
    kept: list[int]


@dataclass(eq=False)
class _UnderWay:
    """A step that the workers have not answered yet, and what is to be said if it fails."""

    answers: list[Any]
    known: _Known | None
    operations: list[tuple[Entry, tuple[int, ...]]]
    places: list[Place]
    made: list[weakref.ref[_Remote]]
    inputs: list[weakref.ref[_Remote]]


class Session:
    """A recorder and the workers behind it.

    Args:
        ports: the workers.
    """

    def __init__(self, ports: Sequence[Port]) -> None:
        self.recorder = Recorder(self._run)
        self._ports = tuple(ports)
        self._programs: dict[Any, _Known] = {}
        self._ids = 0
        self._sequence = 0
        self._freed: deque[int] = deque()
        self._under_way: deque[_UnderWay] = deque()
        self._error: Exception | None = None
        self._broken: Exception | None = None

    @property
    def workers(self) -> int:
        """How many there are."""
        return len(self._ports)

    # ---- what is recorded

    def _run(self, recording: Recording) -> None:
        """Take a recording over."""
        if self._broken is not None:
            raise self._broken
        outputs: list[int] = []
        alive: list[Value] = []
        for number, reference in enumerate(recording.made):
            if reference is not None and (value := reference()) is not None:
                outputs.append(number)
                alive.append(value)
        key = (
            tuple([value.spec for value in recording.inputs]),
            tuple(recording.operations),
            tuple(outputs),
        )
        known = self._programs.get(key)
        is_new = known is None
        if known is None:
            known = self._programs[key] = _Known(len(self._programs), *_build(recording, outputs))
        uploads = [value for value in recording.inputs if value.remote is None]
        parts = [self._parts(value) for value in uploads]
        base = self._ids
        self._ids += len(uploads) + len(alive)
        for number, value in enumerate([*uploads, *alive], start=base):
            value.remote = _Remote(number, self._freed)
            value.data = None
        inputs = [value.remote for value in recording.inputs]
        self._send(
            base,
            parts,
            known,
            is_new,
            tuple([each.id for each in inputs]),
            tuple(recording.scalars),
            (),
            _UnderWay(
                [],
                known,
                recording.operations,
                recording.places,
                [weakref.ref(value.remote) for value in alive],
                [weakref.ref(each) for each in inputs],
            ),
        )

    def _send(
        self,
        base: int,
        parts: list[list[Tensor]],
        known: _Known | None,
        is_new: bool,
        inputs: tuple[int, ...],
        scalars: tuple[Any, ...],
        wanted: tuple[int, ...],
        under_way: _UnderWay,
        workers: Sequence[int] | None = None,
    ) -> None:
        freed = []
        while self._freed:
            freed.append(self._freed.popleft())
        for worker, port in enumerate(self._ports):
            step = Step(
                self._sequence,
                base,
                tuple([part[worker] for part in parts]),
                None if known is None else known.number,
                known.program if is_new and known is not None else None,
                inputs,
                scalars,
                tuple(freed),
                wanted if workers is None or worker in workers else (),
            )
            under_way.answers.append(port.send(step))
        self._sequence += 1
        self._under_way.append(under_way)
        while len(self._under_way) > _AHEAD:
            self._settle(self._under_way.popleft())

    # ---- waiting for workers

    def sync(self) -> None:
        """Run what is recorded, and wait until all workers have done it.

        Raises:
            OperationError: an operation has failed.
            WorkerLostError: a worker is gone.
        """
        self.recorder.flush()
        with self.recorder.lock:
            self._wait()

    def _wait(self) -> None:
        while self._under_way:
            self._settle(self._under_way.popleft())
        if self._broken is not None:
            raise self._broken
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _settle(self, step: _UnderWay) -> list[Answer]:
        """Wait for a step, and note what has failed."""
        answers: list[Answer] = []
        for port, future in zip(self._ports, step.answers, strict=True):
            try:
                answers.append(future.wait())
            except WorkerLostError as error:
                self._broken = self._broken or error
                answers.append(Answer())
            except RpcError as error:
                self._broken = self._broken or error
                answers.append(Answer())
        failure = next((each.failure for each in answers if each.failure is not None), None)
        if failure is not None:
            error = _explained(step, failure.index, failure.cause)
            self._lose(step, error)
            self._error = self._error or error
        else:
            lost = next((one.error for each in step.inputs if (one := each()) and one.error), None)
            if lost is not None:
                self._lose(step, lost)
        return answers

    def _parts(self, value: Value) -> list[Tensor]:
        """Each worker's part of a value that is still here."""
        assert value.data is not None, "a value that nobody has"
        if isinstance(value.data, list):
            return value.data
        return cut(value.data, value.spec.layout, self.workers)

    def _lose(self, step: _UnderWay, error: Exception) -> None:
        for reference in step.made:
            remote = reference()
            if remote is not None:
                remote.error = error

    def fetch(self, value: Value) -> Tensor:
        """A value, whole."""
        with self.recorder.lock:
            if not has_blocks(value.spec.layout):
                value = self.recorder.moved(value, REPLICATED)
            layout = value.spec.layout
            parts = self.fetch_parts(value, holders(layout, self.workers))
        return put_together(value.spec.shape, value.spec.dtype, layout, parts)

    def fetch_parts(self, value: Value, workers: Sequence[int]) -> dict[int, Tensor]:
        """What these workers have of a value, by worker."""
        with self.recorder.lock:
            if value.data is not None:
                parts = self._parts(value)
                return {worker: parts[worker].clone() for worker in workers}
            self.recorder.flush()
            step = _UnderWay([], None, [], [], [], [weakref.ref(value.remote)])
            self._send(self._ids, [], None, False, (), (), (value.remote.id,), step, workers)
            while self._under_way[0] is not step:
                self._settle(self._under_way.popleft())
            self._under_way.popleft()
            answers = self._settle(step)
            self._wait()
            if value.remote.error is not None:
                raise value.remote.error
            return {worker: answers[worker].values[0] for worker in workers}


def _explained(step: _UnderWay, index: int, cause: Exception) -> OperationError:
    """An error with the user's line."""
    if step.known is None or index < 0:
        error = OperationError(f"workers could not run a program: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        return error
    number = step.known.kept[index]
    entry = step.operations[number][0]
    where = described(step.places[number])
    instruction = step.known.program.instructions[index]
    metas = _metas(step.known.program)
    given = ", ".join(_shown(each, metas) for each in instruction.args)
    error = OperationError(
        f"{entry.operator}({given}) has failed at {where}: {type(cause).__name__}: {cause}",
        where,
        entry.operator,
    )
    error.__cause__ = cause
    return error


def _metas(program: Program) -> list[Meta | None]:
    found: list[Meta | None] = list(program.inputs)
    for each in program.instructions:
        found += each.results
    return found


def _shown(arg: Any, metas: list[Meta | None]) -> str:
    if isinstance(arg, Ref):
        meta = metas[arg.index]
        return "?" if meta is None else f"{str(meta.dtype).removeprefix('torch.')}{list(meta.shape)}"
    if isinstance(arg, Scalar):
        return "number"
    if isinstance(arg, tuple):
        return f"[{', '.join(_shown(each, metas) for each in arg)}]"
    return str(arg)


# ---- from a recording to a program


def _build(recording: Recording, outputs: list[int]) -> tuple[Program, list[int]]:
    """The program of a recording without what nobody uses; for each instruction, which operation it is."""
    starts: list[int] = []
    count = 0
    for entry, _ in recording.operations:
        starts.append(count)
        count += len(entry.specs)
    used = set(outputs)
    kept: list[int] = []
    for number in reversed(range(len(recording.operations))):
        entry, refs = recording.operations[number]
        if entry.effect or any(starts[number] + offset in used for offset in range(len(entry.specs))):
            kept.append(number)
            used.update(refs)
    kept.reverse()
    first_scalars: list[int] = []
    scalars = 0
    for entry, _ in recording.operations:
        first_scalars.append(scalars)
        scalars += _scalars((entry.args, entry.kwargs))
    place = {-1 - index: index for index in range(len(recording.inputs))}
    instructions: list[Instruction] = []
    following = len(recording.inputs)
    for number in kept:
        entry, refs = recording.operations[number]

        def fill(tree: Any, refs: tuple[int, ...] = refs, first: int = first_scalars[number]) -> Any:
            if isinstance(tree, Ref):
                return Ref(place[refs[tree.index]])
            if isinstance(tree, Scalar):
                return Scalar(first + tree.index)
            if isinstance(tree, tuple):
                return tuple(fill(each, refs, first) for each in tree)
            return tree

        args: Any = tuple(fill(each) for each in entry.args)
        kwargs: Any = tuple((name, fill(each)) for name, each in entry.kwargs)
        results: list[Meta | None] = []
        for offset, spec in enumerate(entry.specs):
            is_used = starts[number] + offset in used
            results.append(spec.meta if spec is not None and is_used else None)
            place[starts[number] + offset] = following
            following += 1
        instructions.append(Instruction(entry.operator, args, kwargs, tuple(results)))
    inputs = tuple(value.spec.meta for value in recording.inputs)
    return Program(inputs, tuple(instructions), tuple(place[each] for each in outputs)), kept


def _scalars(tree: Any) -> int:
    if isinstance(tree, Scalar):
        return 1
    return sum(_scalars(each) for each in tree) if isinstance(tree, tuple) else 0
