"""The driver's session with the workers: programs by number, ids of values, and failures.

Everything is sent as steps, one for each flush and worker, in one order. Workers compute while the user's
program goes on; their failures are raised when the program waits for them.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, replace
from typing import Any, Final, Protocol, cast

from torch import Tensor
from torch.distributed.tensor.placement_types import Replicate

from rpc.agent.waiting import wait_futures
from rpc.errors import RpcError, WorkerLostError
from rpc.runtime import spans
from rpc.runtime.interrupts import interruptible, is_interruption, protected
from spmd.engine.driver.aliases import Value
from spmd.engine.driver.blocks import cut, has_blocks, holders, put_together
from spmd.engine.driver.bounded_cache import BoundedCache
from spmd.engine.driver.building import build
from spmd.engine.driver.copies import Copies, Sent, UnrecoverableError
from spmd.engine.driver.poison import poisoned
from spmd.engine.driver.recorder import ENTRIES_PER_PROGRAM, Recorder, Recording, lost, nowhere
from spmd.engine.driver.report import costliest
from spmd.engine.driver.sent_steps import Known, UnderWay, explained, has_ended, unanswered, were_cut_off
from spmd.engine.errors import OperationError, SpmdError
from spmd.engine.program.metas import Spec
from spmd.engine.program.program import REPLICATED, TO_LOCAL
from spmd.engine.program.repetition import Repetition
from spmd.engine.program.step_messages import Answer, EngineStep, Save
from spmd.workers.worker_set import Port, WorkerSet, cause_of

__all__ = ["PROGRAMS", "EnginePort", "Session"]

logger = logging.getLogger(__name__)

PROGRAMS: Final = 256
"""Maximum number of programs that the driver and each worker keep, by default."""

_MAX_OBSERVED: Final = 5000
"""Maximum number of values whose layouts are in the observed state, the newest."""

_MAX_LISTED: Final = 50
"""Maximum number of layouts, and of lines of the report, in the observed state, the largest."""

_AHEAD: Final = 16
"""Maximum number of steps that workers may be behind the driver."""

_NOT_REPEATED: Final = (
    "programs that had succeeded failed when they were repeated after the loss of a worker: end SPMD mode "
    "with spmd.shutdown(), begin it again, and go on from a checkpoint"
)

_INTERRUPTED: Final = (
    "the replacement of a lost worker was interrupted: end SPMD mode with spmd.shutdown(), and begin it again"
)

_ATTEMPTS: Final = 4
"""Maximum number of attempts to replace lost workers, as others may be lost meanwhile."""

_GRACE: Final = 2.0
"""Time in seconds for the others to end a step, once one worker has failed in it."""


class EnginePort(Port, Protocol):
    """A worker of SPMD mode, seen from the driver."""

    def regroup(self, generation: int) -> Any:
        """Make it form its process groups again, together with the others; returns a future."""
        ...


class _Remote:
    """Keeps a value on the workers, as long as it lives."""

    __slots__ = ("__weakref__", "error", "freed", "id", "spec")

    def __init__(self, number: int, freed: deque[int], spec: Spec) -> None:
        self.id = number
        self.freed = freed
        self.spec = spec
        self.error: SpmdError | None = None

    def __del__(self) -> None:
        self.freed.append(self.id)


def _described(spec: Spec, count: int) -> dict[str, Any]:
    """Describe values of one spec, for observers."""
    mesh = spec.layout.mesh
    return {
        "dtype": str(spec.dtype).removeprefix("torch."),
        "shape": list(spec.shape),
        "mesh": [] if mesh is None else list(mesh.shape),
        "placements": [str(each) for each in spec.layout.placements],
        "count": count,
        "bytes": spec.nbytes * count,
    }


class Session:
    """A recorder and the workers behind it.

    Attributes:
        counts: numbers of requests to the workers: ``programs``, those of them that were ``new``, and of
            those ``new_auto`` with a planner; ``uploads`` and their ``uploaded_bytes``, ``fetches``.
        planner: called with each recording before it is sent; what it returns is called afterwards.
        on_accelerators: whether workers compute on accelerators.
        copies: has lost workers replaced; None: a loss ends the mode.

    Args:
        ports: the workers.
        tensor_type: see ``Recorder``.
        programs: maximum number of programs that are kept, here and on each worker.
    """

    def __init__(
        self, ports: Sequence[EnginePort], tensor_type: type[Tensor], programs: int = PROGRAMS
    ) -> None:
        self.recorder = Recorder(self._run, tensor_type, programs * ENTRIES_PER_PROGRAM)
        self.on_accelerators = False
        self._ports = tuple(ports)
        self._set = WorkerSet(self._ports, "an SPMD step", _GRACE, has_ended)
        self._programs: BoundedCache[Any, Known] = BoundedCache(programs, self._drop)
        self._dropped: list[int] = []
        self._program_count = 0
        self._ids = 0
        self._freed: deque[int] = deque()
        self._remotes: dict[int, weakref.ref[_Remote]] = {}
        self._under_way: deque[UnderWay] = deque()
        self._lost: dict[int, OperationError] = {}
        self._error: Exception | None = None
        self._broken: Exception | None = None
        self._ending: OperationError | None = None
        self._generation = 0
        self._regrouping: list[Any] = []
        self._epoch = 0
        self._manual = False  # whether values that pass for replicated may be other ones on each worker
        self.copies: Copies | None = None
        self.counts: Counter[str] = Counter()
        self.planner: Callable[[Recording], Callable[[], None] | None] | None = None

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self._ports)

    def observed(self) -> dict[str, Any]:
        """State for observers: counts, the layouts of values on the workers, and the report. Does not wait
        for a lock.
        """
        remotes = [each() for each in list(self._remotes.values())[-_MAX_OBSERVED:]]
        layouts = Counter(each.spec for each in remotes if each is not None)
        largest = sorted(layouts.items(), key=lambda item: -item[0].nbytes * item[1])[:_MAX_LISTED]
        return {
            "workers": self.workers,
            "counts": dict(self.counts),
            "layouts": [_described(spec, count) for spec, count in largest],
            "moved": [asdict(each) for each in costliest(self.recorder, _MAX_LISTED)],
        }

    # ---- what is recorded

    @protected
    def _run(self, recording: Recording) -> None:
        """Take a recording over."""
        if self._broken is not None:
            raise self._broken
        if self.copies is not None:
            try:
                self._save_if_due(self.copies)
            except BaseException:
                self.recorder.recording = recording  # nothing of it was sent
                raise
        then = None if self.planner is None else self._plan(self.planner, recording)
        specs = tuple([value.spec for value in recording.inputs])
        uploads = [(place, value) for place, value in enumerate(recording.inputs) if value.remote is None]
        parts = [self._parts(value) for _, value in uploads]
        base = self._ids
        for number, (_, value) in enumerate(uploads, start=base):
            self._register(value, number)
        inputs = tuple([value.remote.id for value in recording.inputs])
        references = [weakref.ref(value) for value in recording.inputs]
        uploads.clear()
        recording.inputs.clear()
        value = None  # type: ignore[assignment]
        kept_inputs = tuple([place for place, each in enumerate(references) if each() is not None])
        outputs: list[int] = []
        alive: list[Value] = []
        for number, reference in enumerate(recording.made):
            if reference is not None and (made := reference()) is not None:
                outputs.append(number)
                alive.append(made)
        key = (specs, kept_inputs, tuple(recording.flat), tuple(outputs))
        known = self._programs[key]
        is_new = known is None
        if known is None:
            program, kept = build(specs, kept_inputs, recording.operations, outputs, recording.default_dtype)
            known = self._programs[key] = Known(self._program_count, program, kept)
            self._manual = self._manual or any(each.operator == TO_LOCAL for each in program.instructions)
            self._program_count += 1
        first = base + len(parts)
        self._ids = first + len(alive)
        for number, made in enumerate(alive, start=first):
            self._register(made, number)
        sent = sum([part.nbytes for several in parts for part in several])
        computes = bool(known.program.instructions)
        compiled = computes and is_new
        self.counts.update(programs=computes, new=compiled, uploads=len(parts), uploaded_bytes=sent)
        self.counts["new_auto"] += compiled and self.planner is not None
        gone = set(inputs).difference([inputs[place] for place in kept_inputs])
        self._send(
            UnderWay([], known, recording.positions, inputs, range(first, self._ids)),
            base,
            parts,
            tuple(recording.scalars),
            gone=gone,
        )
        if self.copies is not None and computes:
            self.copies.sent_program()
        if then is not None:
            then()

    @interruptible
    def _plan(
        self, planner: Callable[[Recording], Callable[[], None] | None], recording: Recording
    ) -> Callable[[], None] | None:
        return planner(recording)

    def _drop(self, known: Known) -> None:
        """Make the workers forget a program that was not used for long, in the next step.

        Steps in progress that run it come before that step, and none after it does.
        """
        self._dropped.append(known.number)

    def _register(self, value: Value, number: int) -> None:
        """Note that a value is, or will be, on the workers under this id."""
        value.data = None
        value.remote = _Remote(number, self._freed, value.spec)
        self._remotes[number] = weakref.ref(value.remote)

    @protected
    def _send(
        self,
        under_way: UnderWay,
        base: int,
        parts: Sequence[list[Tensor]] = (),
        scalars: tuple[Any, ...] = (),
        wanted: tuple[int, ...] = (),
        workers: Sequence[int] = (),
        gone: AbstractSet[int] = frozenset(),
        save: Save | None = None,
    ) -> None:
        """Make all workers do a step.

        Args:
            gone: ids that the program uses up.
            workers: workers whose values are requested.
            save: order to copy all values after the step.
        """
        if self._regrouping and self._broken is None:
            self._regroup()
        freed, used = [], set(under_way.inputs)
        for _ in range(len(self._freed)):
            number = self._freed.popleft()
            if number in used and number not in gone:
                self._freed.append(number)  # since it was taken as an input: free it in the next step
                continue
            del self._remotes[number]
            if number not in gone:
                freed.append(number)
        forget, self._dropped = tuple(self._dropped), []
        known, inputs = under_way.known, under_way.inputs
        sent = Sent(base, known, inputs, scalars, parts, tuple(freed), forget, wanted, workers, save)
        self._under_way.append(under_way)
        if self.copies is not None:
            self.copies.log.append((sent, under_way))
        self._transmit(sent, under_way)
        while len(self._under_way) > _AHEAD:
            self._settle_next()

    def _transmit(self, sent: Sent, under_way: UnderWay) -> None:
        known: Known | None = sent.known
        is_new = known is not None and known.epoch != self._epoch
        if known is not None and is_new:
            known.epoch, known.repetition = self._epoch, Repetition()
        under_way.number = self._set.number
        packed = None if known is None else known.repetition.pack(sent.base, sent.inputs, sent.scalars)
        common = EngineStep(
            under_way.number,
            sent.base,
            (),
            None if known is None else known.number,
            known.program if is_new and known is not None else None,
            packed,
            sent.freed,
            (),
            sent.forget,
            sent.save,
        )
        steps = [common] * len(self._ports)
        if sent.parts or sent.wanted:
            for worker in range(len(steps)):
                uploads = tuple([part[worker] for part in sent.parts])
                steps[worker] = replace(
                    common, uploads=uploads, wanted=sent.wanted if worker in sent.workers else ()
                )
        self._set.send(steps, under_way.answers)

    # ---- copies, and the loss of workers

    def begin_copies(self, copies: Copies) -> None:
        """Survive the loss of workers from now on."""
        with self.recorder.lock:
            self.copies = copies
            self._save(copies)
            self._complete_save(copies)

    def _save_if_due(self, copies: Copies) -> None:
        """Order a save if enough programs were sent since the last one. Before a second program is sent, the
        save under way must be complete.
        """
        if copies.is_due():
            self._save(copies)
        elif not copies.may_send():
            self._complete_save(copies)

    def _save(self, copies: Copies) -> None:
        """Order a save, once the one under way is complete."""
        self._complete_save(copies)
        order = copies.order(self._sharded_from, self._ids)
        self._send(UnderWay([]), self._ids, save=order)
        copies.ordered(order)
        self.counts["saves"] += 1

    def _complete_save(self, copies: Copies) -> None:
        while (error := copies.complete()) is not None:
            if not self._recover(None):
                self._broken = self._broken or unanswered("the order to copy its values", error)
                raise self._broken

    def _sharded_from(self, first: int) -> tuple[int, ...]:
        """Ids from a number on of which each worker may have another part."""
        found = []
        for number, reference in self._remotes.items():
            remote = reference() if number >= first else None
            if remote is not None and (
                self._manual or not all(isinstance(each, Replicate) for each in remote.spec.layout.placements)
            ):
                found.append(number)
        return tuple(found)

    def _recover(self, failed: dict[int, Exception] | None) -> bool:
        """Have lost workers replaced, and send the steps since the last save again; false if no worker is
        lost, or that cannot be.

        Args:
            failed: the errors of the step that was waited for, by worker; None: a save was.
        """
        copies = self.copies
        if copies is None or self._broken is not None or self._ending is not None:
            return False
        if failed and not any(isinstance(each, WorkerLostError) for each in failed.values()):
            return False
        attempts = 0
        repeated: list[UnderWay] = []
        failure: Exception | None = None
        try:
            while places := copies.gone():
                copies.cut_off(places)
                for step in (*repeated, *self._under_way):
                    self._set.wait(step.number, step.answers)
                repeated = []
                self._generation += 1
                try:
                    copies.recover(places, self._generation, self._set.number)
                except RpcError as error:  # another one is lost, or the one in the lost one's place
                    attempts += 1
                    if is_interruption(error) or attempts == _ATTEMPTS:
                        raise
                    failure = error
                    continue
                repeated = self._send_again(copies, places)
                if all(self._was_repeated(step) for step in repeated):
                    return True
                failure = SpmdError(_NOT_REPEATED)
            if failure is not None:  # and no worker is lost
                raise failure
        except UnrecoverableError as error:
            logger.warning("SPMD mode: the loss cannot be survived: %s", error)
        except BaseException as error:
            known = isinstance(error, RpcError | SpmdError)
            self._broken = cast("Exception", error) if known else SpmdError(_INTERRUPTED)
            raise
        return False

    def _was_repeated(self, step: UnderWay) -> bool:
        answers, failed = self._set.wait(step.number, step.answers)
        return not failed and not any(map(has_ended, answers))

    def _send_again(self, copies: Copies, places: Sequence[int]) -> list[UnderWay]:
        """Send the steps since the newest save, after lost workers were replaced; returns new records of
        those that the session does not wait for.
        """
        repeated: list[UnderWay] = []
        self._epoch += 1
        for place in places:
            self._set.replace(place, copies.ports[place])
        self._ports = copies.ports
        for sent, record in copies.log:
            if record in self._under_way:
                self._transmit(sent, record)
            else:
                repeated.append(UnderWay([], sent.known))
                self._transmit(replace(sent, wanted=()), repeated[-1])
        copies.sent_again()
        self.counts["losses"] += len(places)
        self.counts["repeated"] += sum([sent.known is not None for sent, _ in copies.log])
        return repeated

    # ---- waiting for workers

    def sync(self) -> None:
        """Run what is recorded, and wait until all workers have done it and freed the values no longer
        referenced.

        Raises:
            OperationError: an operation has failed.
            WorkerLostError: a worker is gone.
        """
        self.recorder.flush()
        with self.recorder.lock:
            if self._freed and self._broken is None:
                self._send(UnderWay([]), self._ids)
            self._wait()

    @protected
    def _wait(self) -> None:
        while self._under_way:
            self._settle_next()
        self._lost.clear()
        if self._broken is not None:
            raise self._broken
        if self._ending is not None:
            self._regroup()
            if self.copies is not None:  # what has failed is not to be done again
                self._save(self.copies)
                self._complete_save(self.copies)
            self._ending = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    @protected
    def _settle_next(self) -> list[Answer]:
        """Wait for the first step under way, and record what has failed. If a signal handler interrupts this,
        the step is still under way.
        """
        step = self._under_way[0]
        details = {"lines": step.described()} if spans.is_listened_to() else {}
        while True:
            answers, failed = self._set.wait(step.number, step.answers, **details)
            if not (failed or were_cut_off(answers)) or not self._recover(failed):
                break
        for worker, error in failed.items():
            self._broken = self._broken or unanswered(step.described(), error)
            answers[worker] = Answer()
        lost = {place: self._lost[each] for place, each in enumerate(step.inputs) if each in self._lost}
        if lost or any(each.failures for each in answers):
            self._lose(step, lost, answers)
        self._under_way.popleft()
        step.answers = []  # a copying session keeps the record
        return answers

    def _lose(self, step: UnderWay, lost: dict[int, OperationError], answers: Sequence[Answer]) -> None:
        """Record what a step has not made, since something has failed in it, or one of its inputs is lost.

        Args:
            lost: the lost inputs, and the reasons.
        """
        ends = [each for answer in answers for each in answer.failures if each.ends]
        reasons: list[OperationError | None]
        if ends:
            if self._ending is None:
                failure = ends[cause_of({place: each.cause for place, each in enumerate(ends)})]
                self._ending = explained(step, failure.index, failure.cause)
            self._error = self._error or self._ending
            reasons = [self._ending] * len(step.made)
        elif step.known is None:
            return
        else:
            program = step.known.program
            failed = {
                each.index: explained(step, each.index, each.cause)
                for answer in answers
                for each in answer.failures
            }
            values, news = poisoned(program, lost, failed)
            self._error = self._error or next(iter(news.values()), None)
            made = program.outputs[len(program.outputs) - len(step.made) :]
            reasons = [values.get(each) for each in made]
        for number, reason in zip(step.made, reasons, strict=True):
            if reason is not None:
                self._lost[number] = reason
                reference = self._remotes.get(number)
                if reference is not None and (remote := reference()) is not None:
                    remote.error = reason

    def _regroup(self) -> None:
        """Form new groups: a program has ended early on some worker, and with it the collectives of all. If a
        signal handler interrupts this, it is continued before the next step.
        """
        if not self._regrouping:
            self._generation += 1
            self._regrouping = [port.regroup(self._generation) for port in self._ports]
        try:
            wait_futures(self._regrouping)
        except RpcError as error:
            if is_interruption(error):
                raise
            # Some workers have new groups, and others have not.
            self._broken = unanswered("the request for new process groups after a failed operation", error)
            self._set.abort("another worker has failed")  # the others may wait for the one that has failed
            if self._broken is error:
                raise
            raise self._broken from None
        self._regrouping = []

    def drain(self) -> None:
        """Wait until the workers have done everything that they were sent, successfully or not."""
        with self.recorder.lock:
            while self._under_way:
                self._settle_next()

    def end(self) -> None:
        """End the workers, and delete their data, which must not be mistaken for later data."""
        self.drain()
        if self.copies is not None:
            self.copies.close()
        for reference in list(self._remotes.values()):
            if (remote := reference()) is not None:
                remote.error = nowhere()

    def _parts(self, value: Value) -> list[Tensor]:
        """Return each worker's shard of a value that is still on the driver."""
        assert value.data is not None, "a value that nobody has"
        if isinstance(value.data, list):  # the user's memory, which a copying session may send again
            return value.data if self.copies is None else [part.clone() for part in value.data]
        return cut(value.data, value.spec.layout, self.workers)

    # ---- values

    def fetch(self, value: Value) -> Tensor:
        """Return a value as a whole."""
        with self.recorder.lock:
            if not has_blocks(value.spec.layout):
                value = self.recorder.moved(value, REPLICATED)
            layout = value.spec.layout
            parts = self.fetch_parts(value, holders(layout, self.workers))
        return put_together(value.spec.shape, value.spec.dtype, layout, parts)

    def fetch_parts(self, value: Value, workers: Sequence[int]) -> dict[int, Tensor]:
        """Return the shards of a value on these workers, by worker."""
        with self.recorder.lock:
            if value.data is not None:
                parts = self._parts(value)
                return {worker: parts[worker].clone() for worker in workers}
            self.recorder.flush()
            if value.remote is None:
                raise nowhere()
            if not isinstance(value.remote.error, OperationError | None):
                raise lost(value.remote.error)
            if self.copies is not None and self.copies.is_due():
                self._save(self.copies)
            self.counts["fetches"] += 1
            step = UnderWay([], inputs=(value.remote.id,))
            self._send(step, self._ids, wanted=(value.remote.id,), workers=workers)
            while self._under_way[0] is not step:
                self._settle_next()
            answers = self._settle_next()
            self._wait()
            if value.remote.error is not None:
                raise lost(value.remote.error)
            return {worker: answers[worker].values[0] for worker in workers}
