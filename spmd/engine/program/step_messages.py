"""Messages between the driver and a worker: one step for each flush, answered when it is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from rpc.runtime.current import current_agent
from rpc.serialization.codecs import PICKLE
from rpc.serialization.payload import Source
from rref.shared_calls import SharedCall
from spmd.engine.program.program import Program

__all__ = ["Answer", "EngineStep", "Failure", "Save", "from_message"]


@dataclass(frozen=True, slots=True)
class Save:
    """An order to copy all values that a worker has.

    Attributes:
        number: number of the save, from 0.
        sharded: ids of values that are new since the last save, and of which each worker has another part:
            these are copied to the neighbour as well.
    """

    number: int
    sharded: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineStep:
    """A step for a worker. Values have ids: from ``base`` on first those of uploads, then of the values that
    the program makes.

    Attributes:
        sequence: number of the step, from 0; steps are done in this order.
        base: the first id.
        uploads: this worker's shards of new tensors.
        program: number of the program; None: nothing is run.
        definition: the program, if it is sent for the first time.
        run: the ids of its inputs, and its scalars, as ``Repetition`` packs them.
        freed: ids of values that are no longer needed, not even by this step; inputs that the program uses up
            are not listed.
        wanted: ids of values that the answer must contain.
        forget: numbers of programs that neither this step nor a later one runs.
        save: the values are copied after this step; None: they are not.
        packed: one list for the steps of all workers, with what is serialized once for all, once it is made:
            the common part, and the call of a worker that gets nothing else.
    """

    sequence: int
    base: int
    uploads: tuple[Tensor, ...] = ()
    program: int | None = None
    definition: Program | None = None
    run: Any = None
    freed: tuple[int, ...] = ()
    wanted: tuple[int, ...] = ()
    forget: tuple[int, ...] = ()
    save: Save | None = None
    packed: list[Any] = field(default_factory=list, repr=False, compare=False)

    def message(self) -> tuple[Any, ...]:
        """Return the arguments of ``from_message``. What all workers get is serialized once for all."""
        if not self.packed:
            common = replace(self, uploads=(), wanted=())
            buffers = current_agent().serializer.codecs[PICKLE].dumps(common, None, alone=True).buffers
            self.packed.append(buffers[0] if len(buffers) == 1 else common)
        return self.packed[0], self.wanted, *self.uploads

    def call(self) -> SharedCall | None:
        """Return the call of ``do`` for all workers that get the same: no uploads, and no values wanted.

        None if it has memory beside its pickle, such as constants, which each worker gets in its own way.
        """
        if len(self.packed) < 2:
            args = self.message()
            self.packed.append(SharedCall("do", args) if isinstance(args[0], bytes | bytearray) else None)
        shared: SharedCall | None = self.packed[1]
        return shared

    def __reduce__(self) -> Any:
        return EngineStep, (
            self.sequence,
            self.base,
            self.uploads,
            self.program,
            self.definition,
            self.run,
            self.freed,
            self.wanted,
            self.forget,
            self.save,
        )


def from_message(
    common: bytes | EngineStep, wanted: tuple[int, ...], uploads: Sequence[Tensor], driver: Source
) -> EngineStep:
    """Return the step that a driver has sent: what all workers get, and this worker's own part."""
    step = common
    if not isinstance(step, EngineStep):
        loaded: EngineStep = current_agent().serializer.codecs[PICKLE].loads({}, [step], None, driver)
        step = loaded
    return replace(step, uploads=tuple(uploads), wanted=wanted)


@dataclass(frozen=True, slots=True)
class Failure:
    """An instruction that has failed.

    Attributes:
        index: its number in the program; -1: the program could not be run at all.
        cause: the error that it raised.
        ends: whether none of the program's results exist; otherwise only those that depend on the instruction
            are lost, and replaced by zeros.
    """

    index: int
    cause: Exception
    ends: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    """A worker's answer when a step is done: local tensors that were requested, or errors."""

    values: tuple[Tensor, ...] = ()
    failures: tuple[Failure, ...] = ()
