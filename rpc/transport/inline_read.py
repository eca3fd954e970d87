"""Threads that read a connection themselves, instead of being woken by the loop that does.

A thread that waits for a reply, or has nothing to do but to wait for the next request, saves two hand-overs
if it reads the socket itself. One at a time may: who has the *lease*. A thread has it for one *turn*:

1. Take the lease, and stop the loop's watching the socket. The loop watches it through an epoll object, so
   that any thread can stop and resume that by one system call.
2. Wait until the socket is readable, or somebody wakes the thread, or the time is over: spinning for a
   moment, then asleep.
3. Receive, and parse. What is no whole frame, or about a message in chunks, is left to the loop.
4. Take in one frame after the other, by the same door as the loop, up to the first that needs the loop.
5. Leave. If anything is left, have the loop go on with it; else resume its watching.

A turn may end at any point, and the loop goes on from there. That matters where a finalizer or a signal
handler that runs in the middle of a turn makes a blocking call itself: what it waits for could never be read
by the thread below it. So what a turn has received and not yet taken in is always to be found in the turn,
and each step is one operation of C code, which has happened or has not:

- ``unread`` gets the number of bytes received, within the C code that receives them;
- ``frames`` is set to the frames that these bytes are: from then on ``unread`` does not count;
- each frame is popped off ``frames`` before anything is done with it, and the loop pops all that are left.

What a turn leaves when it has ended is the loop's alone: until the loop has taken it over nobody reads, the
thread whose turn it was included.

*Spinning.* To put a thread to sleep and to wake it takes longer than many calls do. So a thread looks again
and again for a moment, if that has paid lately. Each time that it does not, it sleeps at once for more of the
next waits (exponential backoff); a wait that was short, asleep or not, takes half of that back. Between two
looks it yields its core; if it comes back late, others need the core, and the spin is over and has not paid.
At most as many threads of an agent spin at a time as leave one core to others. Reading in threads is under
the same backoff: it does not pay where other frames come between, as when a thousand calls are under way.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
from _thread import LockType, allocate_lock
from collections.abc import Callable, Collection
from functools import partial
from threading import get_ident
from time import monotonic
from typing import Any, Final, Protocol

from rpc.runtime.blocking import wait_for
from rpc.runtime.cpu_quota import usable_cores
from rpc.runtime.interrupts import interruptible, protected
from rpc.runtime.tasks import Task
from rpc.transport import byte_stream
from rpc.transport.byte_stream import ONE, Number, ReceiveBuffer, Watch, raise_event, receive
from rpc.wire.decoder import Decoder
from rpc.wire.frames import Frame

__all__ = ["AVAILABLE", "LOOP", "Awaited", "Backoff", "InlineReader", "Receiver", "Spinners", "Turn", "spin"]

logger = logging.getLogger(__name__)

AVAILABLE: Final = byte_stream.AVAILABLE and hasattr(select, "epoll") and hasattr(os, "eventfd")
"""Whether threads can read here; elsewhere only the loop does."""

_MOMENT_SECONDS: Final = 3e-3
"""For how long a thread spins; a wait that is no longer was short."""
_LATE_SECONDS: Final = 0.2e-3
"""If a thread that yields is back so much later only, others need its core."""
_FOLLOWER_SECONDS: Final = 30e-6
_SLICE_SECONDS: Final = 0.5
"""A signal right before the system call would not end it, so waits are made in slices."""
_FIRST_PENALTY: Final = 4
_LONGEST_PENALTY: Final = 256
_HOLDER: Final = 0

_yield: Final[Callable[[], object]] = getattr(os, "sched_yield", int)


class Receiver(Protocol):
    """Who takes in what threads have read. From any thread."""

    followed: Collection[int]
    """Kinds of frames behind which another most likely comes at once."""

    def take_inline(self, frames: list[Frame], *, keep: bool) -> Task | None:
        """Take frames in from the front of the list, up to the first that needs the loop, removing them. With
        ``keep``, the thread wants something to do, which is returned, if there is anything.
        """


class ReadConnection(Protocol):
    """What a connection does for those who read it. From any thread."""

    @property
    def owner(self) -> Receiver: ...

    def read_by_loop(self, turn: Turn) -> None:
        """Have the loop call ``take_over``."""

    def deliver_soon(self, frames: list[Frame]) -> None:
        """Have the loop take frames in."""

    def prepare_soon(self) -> None:
        """Have the loop call ``prepare``, and watch what is ``watched`` from then on."""

    def dispose(self) -> None:
        """The last reader has left a connection that is closed: close the descriptors."""


class Backoff:
    """Something that is tried as long as it pays: after each failure it is left alone for longer.

    An update that is lost, since another thread made one at the same time, does no harm.
    """

    __slots__ = ("penalty", "rests")

    def __init__(self) -> None:
        self.penalty = 0
        """How often the last failure made it rest; while 0, ``paid`` changes nothing."""
        self.rests = 0
        """How often it is still to be left alone; while 0, ``may_try`` need not be asked."""

    def may_try(self) -> bool:
        """Whether to try; each refusal counts down."""
        if self.rests <= 0:
            return True
        self.rests -= 1
        return False

    def paid(self) -> None:
        """It has paid: the next failure costs less, and there is less left of the last one."""
        self.penalty //= 2
        self.rests = min(self.rests, self.penalty)

    def failed(self) -> None:
        """It has not paid: leave it alone for a while."""
        self.penalty = min(_LONGEST_PENALTY, max(_FIRST_PENALTY, 2 * self.penalty))
        self.rests = self.penalty


class Spinners:
    """The threads of one agent that spin right now: ``limit`` at most, by default one fewer than there are
    cores.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = usable_cores() - 1 if limit is None else limit
        self.threads: dict[int, None] = {}


def spin(poll: Callable[[int], list[Any]], until: float, backoff: Backoff, spinners: Spinners) -> list[Any]:
    """Poll again and again, until there is something to see, which is returned, or ``until`` on the monotonic
    clock. ``backoff`` is told if nothing was seen; the thread is among ``spinners``, unless there are enough.
    """
    seen = poll(0)
    if seen or len(spinners.threads) >= spinners.limit:
        return seen
    me = get_ident()
    spinners.threads[me] = None
    try:
        before = monotonic()
        while not seen and before < until:
            _yield()
            seen = poll(0)
            now = monotonic()
            if not seen and now - before > _LATE_SECONDS:
                break
            before = now
    finally:
        spinners.threads.pop(me, None)
    if not seen:
        backoff.failed()
    return seen


class Turn:
    """One turn at reading; a new one each time, so that none is taken for a later one.

    Args:
        thread: whose turn it is, by its identifier.
        idle: the thread has nothing else to do, and gives way to one that waits for a reply.
        descriptor: where it receives from: none any more when the turn has ended.
        reader: reads the connection.

    Attributes:
        left_to_loop: None until the turn has ended; then whether the loop is to go on with what is in it.
        task: what there is to do, for an idle thread.
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
        """Remove what is left of the frames, and return it."""
        frames = self.frames or []
        taken = frames[:]
        frames.clear()
        return taken

    def release(self) -> None:
        """From any thread: what the thread waits for is here, or will not come."""
        if self.thread != get_ident():  # else it is just taking that in
            self.reader.wake()


LOOP: Final = Turn(0, False, -1, None)  # type: ignore[arg-type]  # which nobody needs to wake
"""All turns of the loop's thread."""


class ReadLease:
    """The lease of one connection. From any thread.

    Attributes:
        holder: a function that returns the turn of who has the lease, or None.
        offer: a function that gives the lease to a turn if nobody has it, and returns who has it then.

    Taking it is one operation of a dictionary. Elsewhere there is no call between the look at who has it and
    the change: only at calls does Python let other threads, finalizers or signal handlers come between.
    """

    def __init__(self) -> None:
        self._held: dict[int, Turn] = {}
        self.holder: Callable[[], Turn | None] = partial(self._held.get, _HOLDER)
        self.offer: Callable[[Turn], Turn] = partial(self._held.setdefault, _HOLDER)

    def take(self, turn: Turn) -> bool:
        """Take the lease if nobody has it; returns whether ``turn`` has it now."""
        return self.offer(turn) is turn

    def pass_to_loop(self, turn: Turn) -> bool:
        """On the loop's thread, asked by the thread whose turn it is; false if it has ended."""
        held = self._held
        try:
            if held[_HOLDER] is turn:
                held[_HOLDER] = LOOP
                return True
        except KeyError:
            pass
        return False

    def leave(self, turn: Turn) -> None:
        """Give the lease up: by the thread whose turn it is, if it still is."""
        held = self._held
        try:
            if held[_HOLDER] is turn:
                held.pop(_HOLDER, None)
        except KeyError:
            return


class Awaited:
    """What threads wait for, each by reading the connection that it comes on, or on a lock of its own.

    Attributes:
        outcome: None until it is here, or will not come.
        claimed: the turn at reading that the current thread has claimed in advance, to wait for this.
    """

    outcome: Any = None
    claimed: Turn | None = None

    def __init__(self) -> None:
        self._waiters: list[LockType | Turn] = []

    def done(self) -> bool:
        """Whether nobody needs to wait any more."""
        return self.outcome is not None

    def wake(self) -> bool:
        """Wake all who wait; returns whether anybody did."""
        waiters = self._waiters
        if not waiters:
            return False
        while waiters:
            try:
                waiter = waiters.pop()
            except IndexError:  # another thread wakes them too
                break
            waiter.release()
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


class InlineReader:
    """How threads may read one connection: those that wait for a reply, and idle ones (a ``TaskSource``).

    The methods are for any thread, except where noted. ``closed``, set by the loop: nothing is taken in any
    more. ``buffer``, set by the loop before anybody reads: where to receive to.
    """

    def __init__(
        self,
        connection: ReadConnection,
        descriptor: int,
        decoder: Decoder,
        buffer: ReceiveBuffer,
        spinners: Spinners,
    ) -> None:
        self.lease = ReadLease()
        self.closed = False
        self._connection = connection
        self._descriptor = descriptor
        self._decoder = decoder
        self.buffer = buffer
        self._spinners = spinners
        self._watch: Watch | None = None
        self._event = -1
        self._poll: Callable[[float | None], list[tuple[int, int]]] | None = None
        self._readable = [(descriptor, select.POLLIN)]
        """What is polled when there is something to read, and nothing else: errors are for the loop."""
        self._worth = Backoff()
        self._spinning = Backoff()
        self._followers = Backoff()

    # ---- the loop's thread

    def prepare(self) -> bool:
        """Get the descriptors that threads need to read; false if there are none left, or some already."""
        if self._poll is not None:
            return False
        try:
            self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._watch = Watch(self._descriptor)
        except OSError as error:
            logger.warning("only the agent's own thread will read a connection: %s", error)
            self.close()
            self._worth.failed()  # else every call would try again, and warn
            return False
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        poll.register(self._event, select.POLLIN)
        self._poll = poll.poll
        return True

    def watched(self) -> int:
        """The descriptor that is readable when the loop shall read: the socket's until ``prepare``."""
        return self._descriptor if self._watch is None else self._watch.descriptor

    def take_over(
        self, turn: Turn, decode: Callable[[int], object], deliver: Callable[[list[Frame]], object]
    ) -> None:
        """Have the loop take in what was received in a thread's turn, and read from now on: by ``decode``, so
        many bytes in the receive buffer, or by ``deliver``, frames.
        """
        if not self.lease.pass_to_loop(turn):
            return
        try:
            if self.closed:
                return
            if turn.frames is not None:
                deliver(turn.take_frames())
            else:
                decode(sum(count for count in turn.unread if count > 0))
        finally:
            self._give_up(LOOP)

    def is_read_by_thread(self) -> bool:
        """Whether a thread other than the loop's has the lease."""
        return self.lease.holder() not in (None, LOOP)

    def close(self) -> None:
        """Close the descriptors. Only when nobody reads, or in a forked child."""
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
        """Take the lease for the current thread, which must ``leave`` then, whatever happens.

        Returns its turn; None if somebody else has the lease, or it does not pay. ``idle``: it has nothing
        else to do, and gives way to who waits for a reply.
        """
        if self._worth.rests and not self._worth.may_try():
            self.leave()  # a finalizer or a signal handler may be in the middle of a turn, and will wait
            return None
        lease, watch = self.lease, self._watch
        if watch is None or self._poll is None:
            self._connection.prepare_soon()
            return None
        turn = Turn(get_ident(), idle, self._descriptor, self)
        holder = lease.offer(turn)
        if holder is not turn:
            if holder.thread == turn.thread:
                self.leave()  # this is a finalizer or a signal handler in the middle of that turn
            elif holder.idle and not idle:
                self._worth.failed()
                self.wake()
            return None
        watch.suspend()
        if lease.holder() is not turn:  # ended by a call of a finalizer, or a signal handler, that ran here
            watch.resume()
            return None
        if not self.closed and self._decoder.is_between_frames():
            return turn
        self.leave()
        return None

    def leave(self) -> None:
        """Give up the lease, if the current thread has it: also one that waits for the loop.

        In the middle of a turn, the loop goes on with what it has received and not taken in.
        """
        turn = self.lease.holder()
        if turn is not None and turn.thread == get_ident():
            self._end(turn)

    def _end(self, turn: Turn) -> None:
        """End a turn; once more does no harm, where a finalizer does so in the middle of this."""
        frames = turn.frames
        has_leftovers = any(count > 0 for count in turn.unread) if frames is None else bool(frames)
        turn.socket.value = -1
        if turn.left_to_loop is None:
            turn.left_to_loop = has_leftovers and not self.closed
        if turn.left_to_loop:
            self._connection.read_by_loop(turn)
        else:
            self._give_up(turn)

    def _give_up(self, turn: Turn) -> None:
        if self._watch is not None:
            self._watch.resume()
        self.lease.leave(turn)
        if self.closed and self.lease.take(LOOP):  # else the thread that has it by now does
            self._connection.dispose()

    @protected
    def wait_for(self, awaited: Awaited, deadline: float, turn: Turn) -> None:
        """Read on the current thread, which has claimed ``turn``, and give up the lease.

        Returns when ``awaited.outcome`` is set, or ``deadline`` on the monotonic clock has passed, or the
        turn was ended or released. Ctrl-C interrupts.
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
        """For a thread that has claimed ``turn``, being idle: wait for something to do, and give up the
        lease.

        None after ``timeout`` seconds, or if something came that needs the loop, or ``wake`` was called.
        """
        try:
            until = math.inf if timeout is None else monotonic() + timeout
            while turn.task is None and turn.left_to_loop is None:
                if not (self._wait(until, min(until, monotonic() + _MOMENT_SECONDS)) and self._read(turn)):
                    break
            task, turn.task = turn.task, None  # it must not die with the turn, which the loop may have
            return task
        finally:
            if turn.left_to_loop is None:
                self._end(turn)

    def _read(self, turn: Turn, awaited: Awaited | None = None) -> bool:
        """Receive and take in what has come; false if the loop is to go on: it must take in the rest, or what
        came is not what is awaited.
        """
        turn.unread.clear()
        turn.frames = None
        turn.unread.extend(map(receive, (turn.socket,), *self.buffer.whole))
        frames = self._decoder.whole_frames(sum(turn.unread))
        if frames is None:  # the loop must make out what it is
            self._worth.failed()
            return False
        turn.frames = frames
        has_ended = turn.left_to_loop is not None
        if has_ended:  # in the middle: the loop takes either these or the bytes
            return False
        owner, is_followed = self._connection.owner, False
        if turn.idle and turn.task is None:
            last = frames[-1].kind
            turn.task = owner.take_inline(frames, keep=True)
            is_followed = turn.task is not None and last in owner.followed
        else:
            owner.take_inline(frames, keep=False)
        if frames or (awaited is not None and awaited.outcome is None):
            self._worth.failed()
            if turn.left_to_loop is not None:  # it was ended in the middle
                self._connection.deliver_soon(frames)
            return False
        if self._worth.penalty:
            self._worth.paid()
        if is_followed and self._follower_has_come():
            self._read(turn)  # now, since it would wake the loop as soon as this thread leaves
        return True

    def _follower_has_come(self) -> bool:
        """Look for a moment whether it has, if that has paid."""
        poll = self._poll
        if poll is None or not self._followers.may_try():
            return False
        if spin(poll, monotonic() + _FOLLOWER_SECONDS, self._followers, self._spinners) == self._readable:
            self._followers.paid()
            return True
        return False

    @interruptible
    def _wait(self, until: float, spin_until: float) -> bool | None:
        """Wait until the socket is readable; false when the time is over, None if ``wake`` was called, or the
        connection has ended: of an error the kernel tells once, and the loop shall hear it.

        ``until`` is on the monotonic clock, infinite for no limit, ``spin_until`` for how long to spin if at
        all.
        """
        poll = self._poll
        if poll is None:
            return None
        events: list[tuple[int, int]] = []
        try:
            if not self._spinning.rests or self._spinning.may_try():
                events = spin(poll, spin_until, self._spinning, self._spinners)
            if not events:
                events = poll(None if until == math.inf else max(0.0, 1000 * (until - monotonic())))
        except RuntimeError:  # a signal handler runs inside another thread's poll: what it does may take long
            return None
        if not events:
            return False
        if (self._spinning.penalty or self._spinning.rests) and monotonic() <= spin_until:
            self._spinning.paid()
        if events == self._readable:
            return True
        if events[-1][0] != self._event:
            self._worth.failed()
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        return None
