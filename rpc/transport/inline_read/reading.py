"""Threads that read a connection themselves, instead of being woken by the loop that does.

``role.py`` has the theory. Here are the steps of a thread's turn:

1. Take the role, and stop the loop's watching the socket. The loop watches it through an epoll object, so
   that any thread can stop and resume that by one system call.
2. Wait until the socket is readable, or somebody calls ``release``, or the time is over. The other side
   often needs little more time than it takes to put a thread to sleep and to wake it, and where both sides
   sleep, so does the processor, which takes far longer to wake. So look again and again for a moment, if the
   last waits were that short (see ``Promptness``), and sleep at once if not. Only as many threads look at a
   time as leave one core to those who compute. A thread that finds other processes on its core, or other
   threads of its own process computing, which its looking would keep from the interpreter, sleeps, and does
   not look for the next few times.
3. Receive. Whether it is still the thread's turn is looked at, and the count appended to ``unread``, within
   the C code that receives, where no signal handler runs: it is noted, or nothing was received.
4. If what came is what the thread waits for, or what any thread may take in, take it: it is stored first,
   then ``unread`` is cleared. An exception between the two leaves frames that the loop takes in once more,
   which does no harm. Of a frame that stands for a message in shared memory it would do harm, since memory is
   given back once. So the thread only looks at such a message, and takes it by one operation, as the loop
   does: whose it is is clear at any time. What it has taken it stores, or who ends its turn.
5. Leave. If anything is unread, have the loop take over; else resume its watching and give up the role.

Nothing else is decoded, and the decoder's state does not change.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
from collections.abc import Callable
from threading import get_ident
from time import monotonic, process_time, thread_time
from typing import Final, Protocol, TypeVar

from rpc.runtime.cpu_quota import usable_cores
from rpc.transport import syscalls
from rpc.transport.inline_read.promptness import Promptness
from rpc.transport.inline_read.role import LOOP, ReaderRole, Turn
from rpc.transport.inline_read.trial import Trial
from rpc.transport.inline_read.turn import AwaitedReply, ThreadTurn
from rpc.wire.decoder import Decoder
from rpc.wire.frames import Frame, Kind

__all__ = ["AVAILABLE", "DirectReading"]

logger = logging.getLogger(__name__)

AVAILABLE: Final = syscalls.AVAILABLE and hasattr(select, "epoll") and hasattr(os, "eventfd")
"""Whether threads can read here; elsewhere only the loop does."""

_MOMENT_SECONDS: Final = 3e-3
"""For how long a thread looks before it sleeps."""
_LATE_SECONDS: Final = 0.2e-3
"""If a thread that gives way is back so much later only, other processes need its core."""
_SAMPLE_SECONDS: Final = 50e-6
_COMPUTING_SHARE: Final = 0.2
"""If other threads of this process compute for so much of the time, they need the interpreter."""
_RESTS: Final = 8
"""In either case, so many waits are without a look."""
_FOLLOWER_SECONDS: Final = 30e-6
_MAY_LOOK: Final = usable_cores() - 1
"""How many threads may look at a time. Where there is one core only, the other side needs it."""
_give_way: Final[Callable[[], object]] = getattr(os, "sched_yield", int)
_SLICE_SECONDS: Final = 0.5
"""A signal right before the system call would not end it, so waits are made in slices."""


T_co = TypeVar("T_co", covariant=True)

_looking: Final[dict[int, None]] = {}
"""The threads that look, by their identifiers."""
if AVAILABLE:
    os.register_at_fork(after_in_child=_looking.clear)


class Station(Protocol[T_co]):
    """Who stands by, and what it makes of frames."""

    def takes(self, frame: Frame) -> bool:
        """Whether it takes a frame; else the loop does."""

    def take(self, frames: list[Frame], *, busy: bool = False) -> T_co | None:
        """Take frames in, before anything else is read. What it raises, the loop shall find, too.

        Args:
            busy: the thread has something to do already.

        Returns:
            What the thread has to do; None if that was all.
        """

    def is_followed(self, frames: list[Frame]) -> bool:
        """Whether another frame most likely comes right behind these."""


class ReadConnection(Protocol):
    """What a connection does for those who read it."""

    def read_by_loop(self, turn: Turn) -> None:
        """From any thread: have the loop call ``take_over``."""

    def prepare_soon(self) -> None:
        """From any thread: have the loop call ``prepare``, and watch what is ``watched`` from then on."""

    def dispose(self) -> None:
        """The last reader has left a connection that is closed: close the descriptors."""


class DirectReading:
    """How threads may read one connection. The methods are for any thread, except where noted.

    Args:
        connection: whose socket it is.
        descriptor: the socket's.
        decoder: the connection's.
    """

    __slots__ = (
        "_buffer",
        "_connection",
        "_decoder",
        "_descriptor",
        "_event",
        "_followers",
        "_poll",
        "_replies_soon",
        "_requests_soon",
        "_rests",
        "_watch",
        "closed",
        "role",
    )

    def __init__(self, connection: ReadConnection, descriptor: int, decoder: Decoder) -> None:
        self.role = ReaderRole()
        self.closed = False
        """Nothing is taken in any more; set by the loop."""
        self._connection = connection
        self._descriptor = descriptor
        self._decoder = decoder
        self._buffer = syscalls.ReceiveBuffer(decoder.scratch)
        self._watch: syscalls.Watch | None = None
        self._event = -1
        self._poll: Callable[[float | None], list[tuple[int, int]]] | None = None
        self._replies_soon = Promptness()
        self._requests_soon = Promptness()
        self._followers = Trial()
        self._rests = 0
        """How many more waits are without a look."""

    # ---- the loop's thread

    def prepare(self) -> bool:
        """Get the descriptors that threads need to read; false if there are none left, or some already."""
        if self._poll is not None:
            return False
        try:
            self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._watch = syscalls.Watch(self._descriptor)
        except OSError as error:
            logger.warning("only the agent's own thread will read a connection: %s", error)
            self.close()
            return False
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        poll.register(self._event, select.POLLIN)
        self._poll = poll.poll
        return True

    def watched(self) -> int:
        """The descriptor that is readable when the loop shall read: the socket's until ``prepare``."""
        return self._descriptor if self._watch is None else self._watch.descriptor

    def take_over(self, turn: Turn, take_in: Callable[[int], object]) -> None:
        """Have the loop take in what was received in a thread's turn, and read from now on."""
        if not self.role.pass_to_loop(turn):
            return
        try:
            with contextlib.suppress(IndexError):
                while True:
                    count = turn.unread.pop(0)  # by this, what was received is the loop's
                    if count > 0 and not self.closed:
                        take_in(count)
        finally:
            self._give_up(LOOP)

    def is_read_by_thread(self) -> bool:
        """Whether a thread other than the loop's has the role."""
        return self.role.holder() not in (None, LOOP)

    def close(self) -> None:
        """Close the descriptors. Only when nobody reads, or in a forked child."""
        if self._watch is not None:
            self._watch.close()
        if self._event >= 0:
            event, self._event = self._event, -1
            os.close(event)

    # ---- any thread

    def release(self) -> None:
        """End the wait of the thread that reads, or of the next that does."""
        syscalls.raise_event(self._event, syscalls.ONE)

    def claim(self, *, stands_by: bool = False) -> Turn | None:
        """Take the role for the current thread, which must ``leave`` then, whatever happens.

        Args:
            stands_by: it has nothing else to do, and gives way to who waits for a reply.

        Returns:
            Its turn; None if somebody else has the role, or it does not pay.
        """
        role = self.role
        if role.worth.rests and not role.worth.invites():
            return None
        watch = self._watch
        if watch is None or self._poll is None:
            self._connection.prepare_soon()
            return None
        turn = ThreadTurn(stands_by, self._descriptor)
        if role.offer(turn) is not turn:
            self._refused(stands_by)
            return None
        watch.suspend()
        if role.holder() is not turn:  # a signal handler that ran here has called, which ended it
            watch.resume()
            return None
        if not self.closed and self._decoder.is_between_frames():
            return turn
        self.leave()
        return None

    def _refused(self, stands_by: bool) -> None:
        """The role is taken: see whether it should be."""
        if self.role.own_turn() is not None:
            self.leave()  # this is a signal handler or a finalizer, or an exception came before ``leave``
            return
        holder = self.role.holder()
        if holder is not None and holder.stands_by and not stands_by:
            self.role.worth.was_in_vain()
            self.release()

    def leave(self) -> None:
        """Give up the role, if the current thread has it."""
        try:
            self._end_turn()
        except BaseException:  # Ctrl-C, for nothing here fails
            self._end_turn()
            raise

    def _end_turn(self) -> None:
        turn = self.role.own_turn()
        if isinstance(turn, ThreadTurn):
            self._end(turn)

    def _end(self, turn: ThreadTurn) -> None:
        turn.socket.value = -1
        if turn.offered is not None:
            turn.deliver()
        if turn.unread and not self.closed:
            self._connection.read_by_loop(turn)
        else:
            self._give_up(turn)

    def _give_up(self, turn: Turn) -> None:
        if self._watch is not None:
            self._watch.resume()
        self.role.leave(turn)
        if self.closed and self.role.take(LOOP):  # else the thread that has it by now does
            self._connection.dispose()

    def read_reply(self, call: AwaitedReply, deadline: float, turn: Turn | None = None) -> None:
        """Wait for a reply on the current thread, which has claimed ``turn``, or does so now.

        Returns when ``call.outcome`` is set, or ``deadline`` on the monotonic clock has passed, or the
        loop must go on. Ctrl-C interrupts.
        """
        try:
            if turn is None:
                turn = self.claim()
            if isinstance(turn, ThreadTurn):
                self._receive_reply(turn, call, deadline)
                if self.role.holder() is turn:
                    self._end(turn)
        except BaseException:
            self.leave()
            if isinstance(turn, ThreadTurn):
                turn.deliver()
            raise

    def _receive_reply(self, turn: ThreadTurn, call: AwaitedReply, deadline: float) -> None:
        role, soon = self.role, self._replies_soon
        moment_is_over = min(deadline, monotonic() + _MOMENT_SECONDS)
        while call.outcome is None and role.holder() is turn:
            now = monotonic()
            if deadline <= now:
                soon.note(False)
                return
            readable = self._wait(min(deadline, now + _SLICE_SECONDS), moment_is_over, soon)
            if readable is None:
                return
            if not readable:
                continue
            unread = turn.unread
            unread.extend(map(syscalls.receive, (turn.socket,), *self._buffer.whole))
            frames = self._decoder.whole_frames(sum(unread))
            if frames is not None and len(frames) == 1 and frames[0][0] == Kind.IN_SEGMENT:
                taken = self._take_from_segment(turn, call, frames[0])
            else:
                taken = frames is not None and role.holder() is turn and call.take_in(frames)
                if taken:
                    unread.clear()
            if not taken:
                role.worth.was_in_vain()
                return
            if role.worth.penalty:
                role.worth.was_of_use()

    def _take_from_segment(self, turn: ThreadTurn, call: AwaitedReply, frame: Frame) -> bool:
        """Take the reply that a frame stands for; false if it is another's, or the loop must have it."""
        reply = call.look(frame, turn.taken) if frame.call_id == call.call_id else None
        if reply is None or (reply.header and not call.takes(reply.header)):
            return False
        turn.take(call, reply)
        return True

    def next_request(self, timeout: float | None, station: Station[T_co]) -> T_co | None:
        """Having claimed the role: wait for something to do, and give up the role.

        Frames that give nothing to do are taken in meanwhile.

        Args:
            timeout: seconds; None for no limit.
            station: who stands by.

        Returns:
            What it has made of the frames that came; None if the thread has the role no more, anything else
            comes, or ``release`` is called.
        """
        try:
            turn = self.role.own_turn()
            if not isinstance(turn, ThreadTurn):
                return None
            unread, role = turn.unread, self.role
            task: T_co | None = None
            while task is None and not unread and role.holder() is turn:
                now = monotonic()
                until = math.inf if timeout is None else now + timeout
                if not self._wait(until, min(until, now + _MOMENT_SECONDS), self._requests_soon):
                    return None
                unread.extend(map(syscalls.receive, (turn.socket,), *self._buffer.whole))
                frames = self._decoder.whole_frames(sum(unread))
                if frames is None or not all(map(station.takes, frames)):
                    self.role.worth.was_in_vain()
                    return None
                task = self._given(turn, frames, station)
                if (
                    task is not None
                    and station.is_followed(frames)
                    and self._followers.invites()
                    and self._follower_has_come()
                ):
                    # Taken in now, since it would wake the loop as soon as this thread leaves.
                    unread.extend(map(syscalls.receive, (turn.socket,), *self._buffer.whole))
                    frames = self._decoder.whole_frames(sum(unread))
                    if frames is not None and all(map(station.takes, frames)):
                        self._given(turn, frames, station, busy=True)
            if role.holder() is turn:
                self._end(turn)
            return task
        finally:
            if self.role.holder() is not None:
                self.leave()

    def _given(
        self, turn: ThreadTurn, frames: list[Frame], station: Station[T_co], *, busy: bool = False
    ) -> T_co | None:
        """Have who stands by take frames in that were received in this turn."""
        try:
            count = turn.unread.pop()  # by this, they are this thread's
        except IndexError:  # a finalizer that ran here has called, which ended the turn: they are the loop's
            return None
        try:
            task = station.take(frames, busy=busy)
        except Exception:  # one is malformed: the loop finds that too, and knows what to do
            turn.unread.append(count)
            return None
        if self.role.worth.penalty:
            self.role.worth.was_of_use()
        return task

    def _follower_has_come(self) -> bool:
        """Look for a moment whether it has, and note whether that paid."""
        has_come = bool(self._look(monotonic() + _FOLLOWER_SECONDS))
        if has_come:
            self._followers.was_of_use()
        else:
            self._followers.was_in_vain()
        return has_come

    def _look(self, until: float) -> list[tuple[int, int]]:
        """Look whether the socket is readable; again and again, if there is a core for that.

        Args:
            until: on the monotonic clock.
        """
        poll, me = self._poll, get_ident()
        if poll is None:
            return []
        try:
            events = poll(0)
            if events or (len(_looking) >= _MAY_LOOK and me not in _looking):
                return events
            _looking[me] = None
            now = monotonic()
            back_by = until
            sampled, computed = now, math.inf
            while not events and now < back_by:
                back_by = min(until, now + _LATE_SECONDS)
                _give_way()  # the other side may be waiting for this very core
                events = poll(0)
                now = monotonic()
                if now - sampled > _SAMPLE_SECONDS:
                    before, computed = computed, _computed_by_others()
                    if computed - before > _COMPUTING_SHARE * (now - sampled):
                        break
                    sampled = now
            if not events and now < until:
                self._rests = _RESTS
        except RuntimeError:  # a signal handler runs inside another thread's poll
            return []
        finally:
            _looking.pop(me, None)
        return events

    def _wait(self, until: float, moment_is_over: float, soon: Promptness) -> bool | None:
        """Wait until the socket is readable; false when the time is over, None if ``release`` was called.

        Args:
            until: on the monotonic clock; infinite for no limit.
            moment_is_over: the same, until when to look.
            soon: whether it has become readable within a moment lately.
        """
        assert self._poll is not None
        events: list[tuple[int, int]] = []
        try:
            if self._rests > 0:
                self._rests -= 1
            elif soon.expected:
                events = self._look(moment_is_over)
            events = events or self._poll(_milliseconds_until(until))
        except RuntimeError:  # a signal handler runs inside another thread's poll: what it does may take long
            return None
        if not events:
            return False
        was_short = monotonic() <= moment_is_over
        if len(events) == 1 and events[0][0] == self._descriptor:
            soon.note(was_short)
            return True
        if not was_short:
            soon.note(False)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        return None


def _computed_by_others() -> float:
    """Seconds that the other threads of this process have computed."""
    return process_time() - thread_time()


def _milliseconds_until(when: float) -> float | None:
    """As ``poll`` takes it; None if that is never."""
    return None if when == math.inf else max(0.0, 1000 * (when - monotonic()))
