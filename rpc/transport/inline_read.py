"""Threads that read a connection themselves, instead of being woken by the loop's thread, which reads
otherwise.

A thread that waits for a reply, or an idle one that waits for the next request, saves two switches between
threads if it reads the socket itself. One thread at a time may do so: the one that holds the *lease*. A
thread holds it for one *turn*:

1. Take the lease, and make the loop stop watching the socket. The loop watches it through an epoll object, so
   any thread can suspend and resume that by one system call.
2. Wait until the socket is readable, the thread is woken, or the time is over: first spinning for a moment,
   then asleep.
3. Receive, and parse. Incomplete frames, and frames of messages in chunks, are left to the loop.
4. Dispatch one frame after the other, by the same dispatcher as the loop, up to the first that only the loop
   may handle.
5. Leave. If anything is left, notify the loop, which continues with it; otherwise resume its watching.

A turn may end at any point, and the loop continues from there. This matters where a finalizer or a signal
handler that runs in the middle of a turn makes a blocking call itself: the thread below it could never read
the reply. So everything that a turn has received and not dispatched yet is recorded in the turn, and each
step is one operation of C code, which has happened or has not:

- ``unread`` gets the number of bytes received, within the C code that receives them;
- ``frames`` is set to the frames that these bytes consist of: from then on ``unread`` does not count;
- each frame is removed from ``frames`` before it is dispatched, and the loop removes all that are left.

What a turn has left when it ends belongs to the loop: until the loop has taken it over, no thread reads,
including the one whose turn it was.

*Spinning.* Putting a thread to sleep and waking it takes longer than many calls do. So a thread polls
repeatedly for a moment, if that was worthwhile recently. Each time that it was not, more of the next waits
sleep at once (exponential backoff); each short wait, asleep or not, takes back half of that. Between two
polls the thread yields its core; if it comes back late, other threads need the core, and it stops spinning.
If the others took whole time slices, the agent's next waits sleep at once, also if what the thread waited for
has come meanwhile: the kernel wakes a thread that sleeps soon, and lets one that has yielded wait. The
number of an agent's threads that spin at a time leaves one core to others. Reading in threads has the
same backoff: it is not worthwhile if frames for other threads arrive in between, as when a thousand calls are
in flight.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
from _thread import LockType, allocate_lock
from collections.abc import Callable
from threading import get_ident
from time import monotonic
from typing import Any, Final, Protocol

from rpc.errors import ProtocolError
from rpc.runtime.blocking import wait_for
from rpc.runtime.cpu_quota import usable_cores
from rpc.runtime.interrupts import interruptible, is_interruption, protected
from rpc.runtime.tasks import Task
from rpc.transport.byte_stream import ONE, Number, ReceiveBuffer, Watch, raise_event, receive
from rpc.wire.decoder import Decoder
from rpc.wire.frames import Frame, Kind, read_whole

__all__ = ["LOOP", "Awaited", "Backoff", "InlineReader", "Receiver", "Spinners", "Turn", "spin"]

logger = logging.getLogger(__name__)

_MOMENT_SECONDS: Final = 3e-3
"""Maximum time in seconds that a thread spins; waits up to this long count as short."""
_LATE_SECONDS: Final = 0.2e-3
"""Delay in seconds after yielding from which on other threads are taken to need the core."""
_CROWDED_SECONDS: Final = 1.5e-3
"""Delay in seconds after yielding from which on other threads are taken to compute whole time slices."""
_NEXT_FRAME_SECONDS: Final = 30e-6
"""Maximum time in seconds that an idle thread polls for a frame that is ``expected``."""
_SLICE_SECONDS: Final = 0.5
"""Maximum time in seconds of one sleep: a signal that arrives right before the system call would not
interrupt it.
"""
_FIRST_PENALTY: Final = 4
_LONGEST_PENALTY: Final = 256
_FEW: Final = 4
"""Maximum number of frames that arrive together and are not left to the loop."""
_HOLDER: Final = 0
_UNAWAITED_KINDS: Final = frozenset((Kind.ALIVE, Kind.ARRIVED))
"""Kinds of frames that no thread waits for: a large call's ``ARRIVED`` comes before its reply."""


class Receiver(Protocol):
    """The object that dispatches what threads have read. From any thread."""

    def take_inline(self, frames: list[Frame], *, keep: bool) -> Task | None:
        """Dispatch frames from the front of the list, up to the first that only the loop may handle, and
        remove them. With ``keep``, a task for an executor thread is returned, if there is one, and not
        started.
        """


class ReadConnection(Protocol):
    """What a connection does for its reader. From any thread."""

    @property
    def owner(self) -> Receiver: ...

    def read_by_loop(self, turn: Turn) -> None:
        """Make the loop call ``take_over``."""

    def deliver_soon(self, frames: list[Frame]) -> None:
        """Make the loop dispatch frames."""

    def prepare_soon(self) -> None:
        """Make the loop call ``prepare``, and watch ``watched`` from then on."""

    def dispose(self) -> None:
        """Close the descriptors: the last reading thread has left a connection that is closed."""


class Backoff:
    """Backoff for something that is tried as long as it is worthwhile: after each failure, more tries are
    skipped.

    If another thread updates it at the same time, an update may be lost, which does no harm.
    """

    __slots__ = ("penalty", "to_skip")

    def __init__(self) -> None:
        self.penalty = 0
        """Number of tries that the last failure made it skip; while 0, ``paid`` changes nothing."""
        self.to_skip = 0
        """Number of tries that are still to be skipped; while 0, ``may_try`` need not be called."""

    def may_try(self) -> bool:
        """Whether to try; each refusal reduces the number of tries to skip."""
        if self.to_skip <= 0:
            return True
        self.to_skip -= 1
        return False

    def paid(self) -> None:
        """Record a success: the next failure costs less, and fewer tries are skipped."""
        self.penalty //= 2
        self.to_skip = min(self.to_skip, self.penalty)

    def failed(self) -> None:
        """Record a failure: skip more of the next tries."""
        self.penalty = min(_LONGEST_PENALTY, max(_FIRST_PENALTY, 2 * self.penalty))
        self.to_skip = self.penalty


class Spinners:
    """The threads of one agent that spin right now: at most ``limit``, by default one fewer than there are
    cores.

    Attributes:
        crowded: backoff of all spins, for those in which other threads took whole time slices.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = usable_cores() - 1 if limit is None else limit
        self.threads: dict[int, None] = {}
        self.crowded = Backoff()


def spin(poll: Callable[[int], list[Any]], until: float, backoff: Backoff, spinners: Spinners) -> list[Any]:
    """Poll repeatedly, until the result is not empty, which is returned, or ``until`` on the monotonic clock.

    The thread is among ``spinners``, unless those are at their limit, or the machine is crowded. A spin
    without result is a failure of ``backoff``.
    """
    seen = poll(0)
    crowded = spinners.crowded
    if seen or len(spinners.threads) >= spinners.limit or (crowded.to_skip and not crowded.may_try()):
        return seen
    me = get_ident()
    spinners.threads[me] = None
    yielded = 0.0
    try:
        before = monotonic()
        while not seen and before < until and yielded <= _LATE_SECONDS:
            os.sched_yield()
            seen = poll(0)
            now = monotonic()
            yielded, before = now - before, now
    finally:
        spinners.threads.pop(me, None)
    if yielded > _CROWDED_SECONDS:
        crowded.failed()
    elif crowded.penalty:
        crowded.paid()
    if not seen:
        backoff.failed()
    return seen


class Turn:
    """One turn at reading. Turns are not reused, so that none is taken for a later one.

    Args:
        thread: identifier of the thread whose turn it is.
        idle: whether the thread has nothing else to do, and yields to one that waits for a reply.
        descriptor: descriptor that it receives from; none once the turn has ended.
        reader: reads the connection.

    Attributes:
        left_to_loop: None until the turn has ended; then whether the loop continues with what the turn has
            left.
        task: task for an idle thread, or None.
    """

    __slots__ = ("frames", "idle", "left_to_loop", "reader", "socket", "task", "thread", "unread")

    def __init__(self, thread: int, idle: bool, descriptor: int, reader: InlineReader) -> None:
        self.thread = thread
        self.idle = idle
        self.socket = Number(descriptor)
        self.reader = reader
        self.unread: list[int] = []
        self.frames: list[Frame] | None = None
        self.left_to_loop: bool | None = None
        self.task: Task | None = None

    def take_frames(self) -> list[Frame]:
        """Remove the remaining frames, and return them."""
        frames = self.frames or []
        taken = frames[:]
        frames.clear()
        return taken


LOOP: Final = Turn(0, False, -1, None)  # type: ignore[arg-type]  # nothing needs to be woken
"""Marker for all turns of the loop's thread."""
LOOP.left_to_loop = False


class Awaited:
    """A result that threads wait for: each by a turn at reading the connection that it arrives on, or on a
    lock of its own.

    Attributes:
        outcome: None until the result is here, or will not come.
    """

    def __init__(self) -> None:
        self.outcome: Any = None
        self._waiters: list[LockType | Turn] = []

    def done(self) -> bool:
        """Whether no thread needs to wait any more."""
        return self.outcome is not None

    def settle(self, outcome: Any) -> bool:
        """Set the outcome, and wake all waiting threads; returns whether there were any."""
        self.outcome = outcome
        waiters = self._waiters
        if not waiters:
            return False
        while waiters:
            try:
                waiter = waiters.pop()
            except IndexError:  # another thread wakes them too
                break
            if not isinstance(waiter, Turn):
                waiter.release()
            elif waiter.thread != get_ident():  # otherwise the thread is just dispatching the result
                waiter.reader.wake()
        return True

    def sleep(self, deadline: float) -> bool:
        """Wait until it is done, or woken; false if the deadline has passed."""
        lock = allocate_lock()
        lock.acquire()
        self._waiters.append(lock)
        try:
            return self.done() or wait_for(lock, deadline)
        finally:
            self._waits_no_more(lock)

    def _waits_no_more(self, waiter: LockType | Turn) -> None:
        with contextlib.suppress(ValueError):  # it has been woken
            self._waiters.remove(waiter)


def _are_unawaited(frames: list[Frame]) -> bool:
    return all(frame[0] in _UNAWAITED_KINDS for frame in frames)


class InlineReader:
    """Reads one connection on threads: those that wait for a reply, and idle ones (a ``TaskSource``).

    The methods are for any thread, except where noted.

    Attributes:
        closed: set by the loop; nothing is dispatched afterwards.
        buffer: receive buffer, set by the loop before any thread reads.
        is_between_frames: whether what arrives next begins with a frame; set by the loop after it has read.
        expected: set by a handler whose frame is usually followed by another at once. An idle thread then
            polls for that frame before it runs the task of the first, as it would wake the loop otherwise.
    """

    def __init__(
        self,
        connection: ReadConnection,
        descriptor: int,
        decoder: Decoder,
        buffer: ReceiveBuffer,
        spinners: Spinners,
    ) -> None:
        self._lease: dict[int, Turn] = {}
        """The turn that holds the lease, if one does, under ``_HOLDER``.

        Taking the lease is one operation of the dictionary. Elsewhere nothing that is called, allocated or
        repeated comes between reading the holder and changing it: there is no switch to another thread, a
        finalizer or a signal handler there.
        """
        self.closed = False
        self.is_between_frames = False
        self.expected = False
        self._connection = connection
        self._descriptor = descriptor
        self._decoder = decoder
        self.buffer = buffer
        self._spinners = spinners
        self._watch: Watch | None = None
        self._event = -1
        self._poll: Callable[[float | None], list[tuple[int, int]]] | None = None
        self._readable = [(descriptor, select.POLLIN)]
        """Result of a poll when there is data and nothing else; errors are left to the loop."""
        self._worth = Backoff()
        self._spinning = Backoff()
        self._expecting = Backoff()

    # ---- the loop's thread

    def prepare(self) -> bool:
        """Create the descriptors that threads need to read; false if there are none left, or they exist."""
        if self._poll is not None:
            return False
        try:
            self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._watch = Watch(self._descriptor)
        except OSError as error:
            logger.warning("only the agent's own thread will read a connection: %s", error)
            self.close()
            self._worth.failed()  # otherwise every call would try again, and warn
            return False
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        poll.register(self._event, select.POLLIN)
        self._poll = poll.poll
        return True

    def watched(self) -> int:
        """Descriptor that is readable when the loop must read: the socket's until ``prepare``."""
        return self._descriptor if self._watch is None else self._watch.descriptor

    def take_over(
        self, turn: Turn, decode: Callable[[int], object], deliver: Callable[[list[Frame]], object]
    ) -> None:
        """Make the loop dispatch what was received in a thread's turn, and read from now on.

        It calls ``decode`` with the number of bytes in the receive buffer, or ``deliver`` with frames.
        """
        lease = self._lease
        try:
            if lease[_HOLDER] is not turn:
                return
            lease[_HOLDER] = LOOP
        except KeyError:  # the turn has ended
            return
        try:
            if self.closed:
                return
            if turn.frames is not None:
                deliver(turn.take_frames())
            else:
                decode(sum(count for count in turn.unread if count > 0))
        finally:
            self.is_between_frames = self._decoder.is_between_frames()
            self._end(LOOP)

    def read_on_loop(self, read: Callable[[], bool]) -> bool:
        """Have the loop read, unless a thread does; returns whether there may be more, as ``read`` does."""
        if not self.take_lease():
            return False
        try:
            return read()
        finally:
            self.is_between_frames = self._decoder.is_between_frames()
            if self._lease.get(_HOLDER) is LOOP:  # which only this thread changes
                del self._lease[_HOLDER]

    def take_lease(self) -> bool:
        """Take the lease for the loop, if no thread has it; returns whether the loop has it."""
        return self._lease.setdefault(_HOLDER, LOOP) is LOOP

    def is_read_by_thread(self) -> bool:
        """Whether a thread other than the loop's has the lease."""
        return self._lease.get(_HOLDER) not in (None, LOOP)

    def close(self) -> None:
        """Close the descriptors. Only when no thread reads, or in a forked child."""
        if self._watch is not None:
            self._watch.close()
        if self._event >= 0:
            event, self._event = self._event, -1
            os.close(event)

    # ---- any thread

    def wake(self) -> None:
        """End the wait of the thread that reads, or of the next that does."""
        raise_event(self._event, ONE)

    def claim(self, *, idle: bool = False) -> Turn | None:
        """Take the lease for the current thread, which must call ``leave`` afterwards in all cases.

        Returns the thread's turn; None if another thread has the lease, or reading is not worthwhile. A
        thread that is ``idle`` has nothing else to do, and yields to one that waits for a reply.
        """
        if self._worth.to_skip and not self._worth.may_try():
            self.leave()  # a finalizer or a signal handler may run in the middle of a turn, and will wait
            return None
        lease, watch = self._lease, self._watch
        if watch is None or self._poll is None:
            self._connection.prepare_soon()
            return None
        turn = Turn(get_ident(), idle, self._descriptor, self)
        holder = lease.setdefault(_HOLDER, turn)
        if holder is not turn:
            if holder.thread == turn.thread:
                self.leave()  # this is a finalizer or a signal handler in the middle of that turn
            elif holder.idle and not idle:
                self._worth.failed()
                self.wake()
            return None
        watch.suspend()
        if lease.get(_HOLDER) is not turn:  # a finalizer or a signal handler that ran here has ended it
            watch.resume()
            return None
        if not self.closed and self.is_between_frames:
            return turn
        self.leave()
        return None

    def leave(self) -> None:
        """Give up the lease, if the current thread holds it, also if the loop waits for it.

        In the middle of a turn, the loop continues with what the turn has received and not dispatched.
        """
        turn = self._lease.get(_HOLDER)
        if turn is not None and turn.thread == get_ident():
            self._end(turn)

    def _end(self, turn: Turn) -> None:
        """End a turn. It may be called again by a finalizer that runs in the middle of it."""
        frames = turn.frames
        has_leftovers = any(count > 0 for count in turn.unread) if frames is None else bool(frames)
        turn.socket.value = -1
        if turn.left_to_loop is None:
            turn.left_to_loop = has_leftovers and not self.closed
        if turn.left_to_loop:
            self._connection.read_by_loop(turn)
            return
        if self._watch is not None:
            self._watch.resume()
        lease = self._lease
        try:
            if lease[_HOLDER] is turn:
                del lease[_HOLDER]
        except KeyError:
            pass
        if self.closed and self.take_lease():  # otherwise the thread that holds it by now does
            self._connection.dispose()

    @protected
    def wait_for(self, awaited: Awaited, deadline: float, turn: Turn) -> None:
        """Read on the current thread, which has claimed ``turn``, and give up the lease.

        Returns when ``awaited.outcome`` is set, or ``deadline`` on the monotonic clock has passed, or the
        turn was ended, or ``wake`` was called. A signal handler may interrupt it.
        """
        awaited._waiters.append(turn)
        try:
            spin_until = min(deadline, monotonic() + _MOMENT_SECONDS)
            while awaited.outcome is None and turn.left_to_loop is None:
                now = monotonic()
                if deadline <= now:
                    return
                readable = self._wait(min(deadline, now + _SLICE_SECONDS), spin_until)
                if readable is None or (readable and not self._read(turn, awaited)):
                    return
        finally:
            if turn.left_to_loop is None:
                self._end(turn)
            if awaited._waiters:
                awaited._waits_no_more(turn)

    def next_task(self, turn: Turn, timeout: float | None) -> Task | None:
        """Wait for a task on an idle thread, which has claimed ``turn``, and give up the lease.

        Returns None after ``timeout`` seconds, or if something arrived that only the loop may handle, or
        ``wake`` was called.
        """
        try:
            until = math.inf if timeout is None else monotonic() + timeout
            while turn.task is None and turn.left_to_loop is None:
                if not (self._wait(until, min(until, monotonic() + _MOMENT_SECONDS)) and self._read(turn)):
                    break
            else:  # the loop need not go on with anything
                if self.expected and turn.task is not None and turn.left_to_loop is None:
                    self.expected = False
                    if self._expected_has_come():
                        self._read(turn)
            task, turn.task = turn.task, None  # it must not die with the turn, which the loop may have
            return task
        finally:
            if turn.left_to_loop is None:
                self._end(turn)

    def _read(self, turn: Turn, awaited: Awaited | None = None) -> bool:
        """Receive and dispatch what has arrived; false if the loop must continue: with the rest, or because
        what arrived is not what is awaited.
        """
        turn.unread.clear()
        turn.frames = None
        turn.unread.extend(map(receive, (turn.socket,), *self.buffer.whole))
        frames: list[Frame] = []
        decoder, count = self._decoder, sum(turn.unread)
        try:
            end = read_whole(decoder.scratch, 0, count, decoder.max_frame_bytes, frames, _FEW)
        except (ProtocolError, MemoryError):  # the loop will find it again
            end = 0
        if end != count or not frames:  # the loop must parse it
            self._worth.failed()
            return False
        turn.frames = frames
        received = frames[:]
        has_ended = turn.left_to_loop is not None
        if has_ended:  # in the middle: the loop takes either these or the bytes
            return False
        keep = turn.idle and turn.task is None
        turn.task = self._connection.owner.take_inline(frames, keep=keep) or turn.task
        if frames or (awaited is not None and awaited.outcome is None and not _are_unawaited(received)):
            self._worth.failed()
            if turn.left_to_loop is not None:  # the turn was ended in the middle
                self._connection.deliver_soon(frames)
            return False
        if self._worth.penalty:
            self._worth.paid()
        return True

    def _expected_has_come(self) -> bool:
        """Poll for a moment for the expected frame, if that was worthwhile recently."""
        poll = self._poll
        if poll is None or not self._expecting.may_try():
            return False
        until = monotonic() + _NEXT_FRAME_SECONDS
        if spin(poll, until, self._expecting, self._spinners) != self._readable:
            return False
        self._expecting.paid()
        return True

    @interruptible
    def _wait(self, until: float, spin_until: float) -> bool | None:
        """Wait until the socket is readable; false when the time is over. None if ``wake`` was called, or the
        connection has ended: the kernel reports an error once, and the loop must receive it.

        ``until`` and ``spin_until`` are on the monotonic clock: the end of the wait, infinite for no limit,
        and the end of spinning.
        """
        poll = self._poll
        if poll is None:
            return None
        events: list[tuple[int, int]] = []
        try:
            if not self._spinning.to_skip or self._spinning.may_try():
                events = spin(poll, spin_until, self._spinning, self._spinners)
            if not events:
                events = poll(None if until == math.inf else max(0.0, 1000 * (until - monotonic())))
        except RuntimeError as error:  # a signal handler that runs inside another thread's poll may take long
            if is_interruption(error):
                raise
            return None
        if not events:
            return False
        if (self._spinning.penalty or self._spinning.to_skip) and monotonic() <= spin_until:
            self._spinning.paid()
        if events == self._readable:
            return True
        if events[-1][0] != self._event:
            self._worth.failed()
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        return None
