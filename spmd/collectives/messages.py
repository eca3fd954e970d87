"""Messages between a group's ranks outside of collectives: sends and receives, failures, farewells, and
progress.

Every pair of ranks has one ordered stream of *notes*. A small tensor is sent with its note. For a large one
the note is an offer; the receiver answers when it has a tensor for it, and only then the data is sent, on a
second stream, in the order of the answers. So no large data is kept for a receive that is still to be posted,
and sends and receives may be posted in any order without blocking each other.

A receive takes the first note, in the order of arrival, that has its tag and comes from its source.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from struct import Struct
from time import monotonic
from typing import Final

import torch

from rpc.bulk.point_to_point import Bulk
from rpc.bulk.transfer import Transfer
from rpc.errors import ProtocolError, RpcError, WorkerLostError
from rpc.group.peer import Peer
from rpc.runtime.blocking import Event, wait_for_event
from rpc.runtime.tasks import Task
from spmd.collectives.errors import KINDS, CollectiveError, CollectiveMismatchError, RankLostError
from spmd.collectives.flight_recorder import Record
from spmd.collectives.formation import DATA, NOTES
from spmd.collectives.membership import Membership
from spmd.collectives.memory import bytes_of
from spmd.collectives.work import GroupWork

__all__ = ["ANY", "Messages"]

ANY: Final = -1
"""Source of a receive from any rank."""

_SMALL_BYTES: Final = 32 << 10
_HEADER: Final = Struct("<BqQ24s")  # kind, tag or number of the offer, bytes, dtype
_NUMBER_BYTES: Final = 8
_ANSWER_SECONDS: Final = 1.0
"""Timeout in seconds for the answer of a rank's agent about its progress."""


class _Kind(enum.IntEnum):
    SMALL = 0  # a tensor; its bytes follow
    OFFER = 1  # a tensor; the number of the offer follows
    ACCEPT = 2
    REFUSE = 3  # the reason follows
    FAIL = 4  # the group has failed; the number is that of the error's class, and the reason follows
    LEAVE = 5  # this rank takes part no more
    ASK = 6  # question: the number of collectives that the rank has begun
    ANSWER = 7  # the answer, in place of the size; the number is that of the question


@dataclass(slots=True, eq=False)
class _Receive:
    tensor: torch.Tensor
    source: int
    tag: int
    work: GroupWork


@dataclass(slots=True, eq=False)
class _Arrival:
    source: int
    tag: int
    size: int
    dtype: str
    rest: bytes
    is_offer: bool


class _Question:
    """A question about the progress of the other ranks."""

    def __init__(self, asked: Sequence[int]) -> None:
        self.unanswered = set(asked)
        self.behind: set[int] = set()
        self.is_answered = Event()

    def answered(self, rank: int, is_behind: bool) -> None:
        self.unanswered.discard(rank)
        if is_behind:
            self.behind.add(rank)
        if not self.unanswered:
            self.is_answered.set()


class Messages:
    """The notes and tensors between one rank and all others. From any thread; nothing here blocks.

    Args:
        bulk: bulk messages of the agent.
        peers: the workers, by rank.
        members: notified of failures and farewells.
        tags: the first tag of the group with each rank, by rank.
        run_soon: runs tasks on other threads: long copies.
        record: records a send or a receive in the flight recorder.
    """

    def __init__(
        self,
        bulk: Bulk,
        peers: Sequence[Peer],
        members: Membership,
        tags: Sequence[int],
        run_soon: Callable[[Sequence[Task]], object],
        record: Callable[[str, Sequence[torch.Tensor], float], Record | None] = lambda *_: None,
    ) -> None:
        self._bulk, self._peers, self._members = bulk, peers, members
        self._tags = tags
        self._run_soon = run_soon
        self._record = record
        self._lock = threading.RLock()
        self._receives: list[_Receive] = []
        self._arrivals: list[_Arrival] = []
        self._offers: dict[int, tuple[int, torch.Tensor, GroupWork]] = {}
        self._numbers = itertools.count()
        self._accepted: dict[int, deque[tuple[torch.Tensor, GroupWork] | None]] = {}
        self._coming: dict[Transfer, int] = {}
        self._sending = threading.Lock()
        self._closed = False
        self._posts: dict[int, Transfer] = {}
        self.begun = 0
        """Number of collectives that this rank has begun."""
        self._questions: dict[int, _Question] = {}
        self._others = [rank for rank in range(members.size) if rank != members.rank]
        members.watch(self._end_hopeless)

    def begin(self) -> None:
        """Start to receive from all others."""
        for rank in self._others:
            self._listen(rank)

    # ---- sends and receives

    def send(self, tensor: torch.Tensor, to: int, tag: int, limit: float = 0.0) -> GroupWork:
        """Send a contiguous tensor, which must not change until the work is done.

        Args:
            limit: time in seconds after which a waiting thread gives up; 0 for none. The tensor is not sent
                then.
        """
        size, dtype = tensor.nbytes, str(tensor.dtype).encode()
        text = f"send of {size} bytes to {self._members.describe(to)}, tag {tag}"
        work = GroupWork(text, [tensor], run_soon=self._run_soon)
        with self._lock:
            self._members.check_rank(to)
            work.show("send", [tensor])
            work.record = self._record(f"send {self._members.rank}->{to}", [tensor], limit)
            if size <= _SMALL_BYTES:
                note = _HEADER.pack(_Kind.SMALL, tag, size, dtype)
                try:
                    message = self._bulk.send(
                        self._peers[to], self._tags[to] + NOTES, [note, bytes_of(tensor)]
                    )
                except RpcError as error:
                    raise self._as_lost(to, error) from error
                message.on_done(partial(self._ended, to, work, tensor))
            else:
                number = next(self._numbers)
                self._offers[number] = to, tensor, work
                work.expires(limit, partial(self._offers.pop, number, None))
                self._note(to, _Kind.OFFER, tag, size, dtype, number.to_bytes(_NUMBER_BYTES, "little"))
        return work

    def receive(self, tensor: torch.Tensor, source: int, tag: int, limit: float) -> GroupWork:
        """Receive into a contiguous tensor, from a rank or from ``ANY``.

        Args:
            limit: time in seconds after which a waiting thread gives up; 0 for none.
        """
        whom = "any rank" if source == ANY else self._members.describe(source)
        text = f"receive of {tensor.nbytes} bytes from {whom}, tag {tag}"
        work = GroupWork(text, [tensor], run_soon=self._run_soon)
        receive = _Receive(tensor, source, tag, work)
        work.expires(limit, partial(self._forget, receive))
        with self._lock:
            arrival = next((each for each in self._arrivals if _fits(receive, each)), None)
            if arrival is not None:
                self._arrivals.remove(arrival)
            else:
                self._check_sources(source)
                self._receives.append(receive)
            work.show("recvAnySource" if source == ANY else "recv", [tensor])  # as other backends do
            sender = "?" if source == ANY else source
            work.record = self._record(f"recv {self._members.rank}<-{sender}", [tensor], limit)
        if arrival is not None:
            self._match(receive, arrival)
        return work

    def _check_sources(self, source: int) -> None:
        """Raise if no message can come any more."""
        if source != ANY:
            self._members.check_rank(source)
            return
        self._members.check()
        if self._others and all(rank in self._members.gone for rank in self._others):
            self._members.check_rank(self._others[0])

    def _forget(self, receive: _Receive) -> None:
        with self._lock:
            if receive in self._receives:
                self._receives.remove(receive)

    def _match(self, receive: _Receive, arrival: _Arrival) -> None:
        """Give a note to its receive."""
        tensor, work, source = receive.tensor, receive.work, arrival.source
        work.sender = source
        problem = self._what_does_not_fit(receive, arrival)
        number = int.from_bytes(arrival.rest, "little") if arrival.is_offer else 0
        if problem is not None:
            if arrival.is_offer:
                self._note(source, _Kind.REFUSE, number, rest=problem.encode())
            work.finish(CollectiveMismatchError(problem))
        elif not arrival.is_offer:
            bytes_of(tensor)[:] = arrival.rest
            work.finish()
        else:
            with self._lock:  # data comes in the order in which offers are accepted
                try:
                    message = self._bulk.post(
                        self._peers[source], self._tags[source] + DATA, bytes_of(tensor)
                    )
                except RpcError as error:
                    work.finish(self._as_lost(source, error))
                    return
                self._coming[message] = source
                self._note(source, _Kind.ACCEPT, number)
            message.on_done(partial(self._came_into, source, work, tensor))
            self._end_hopeless()  # if it has become so meanwhile

    def _what_does_not_fit(self, receive: _Receive, arrival: _Arrival) -> str | None:
        tensor = receive.tensor
        dtype = str(tensor.dtype)
        if (tensor.nbytes, dtype) == (arrival.size, arrival.dtype):
            return None
        return (
            f"rank {self._members.rank} receives {tensor.nbytes} bytes of {dtype} with tag {receive.tag}, "
            f"but rank {arrival.source} has sent {arrival.size} bytes of {arrival.dtype}"
        )

    def _ended(self, rank: int, work: GroupWork, _: torch.Tensor, message: Transfer) -> None:
        error = message.error()
        work.finish(None if error is None else self._as_lost(rank, error))

    def _came_into(self, rank: int, work: GroupWork, tensor: torch.Tensor, message: Transfer) -> None:
        self._coming.pop(message, None)
        self._ended(rank, work, tensor, message)

    def _as_lost(self, rank: int, error: BaseException) -> CollectiveError:
        if self._members.failed or rank in self._members.gone:
            return self._why(rank)
        if isinstance(error, WorkerLostError):
            return RankLostError(f"{self._members.describe(rank)} is gone: {error}")
        return CollectiveError(f"{self._members.describe(rank)}: {error}")

    # ---- notes

    def _note(
        self, to: int, kind: _Kind, number: int = 0, size: int = 0, dtype: bytes = b"", rest: bytes = b""
    ) -> None:
        """Send a note; the loss of its receiver is noticed elsewhere."""
        try:
            note = _HEADER.pack(kind, number, size, dtype)
            self._bulk.send(self._peers[to], self._tags[to] + NOTES, [note, rest])
        except RpcError:
            return

    def _listen(self, rank: int) -> None:
        while True:
            try:
                message = self._bulk.post(self._peers[rank], self._tags[rank] + NOTES)
            except RpcError:
                return
            self._posts[rank] = message
            if self._closed:
                message.cancel()
                return
            if not message.done():
                message.on_done(partial(self._came, rank))
                return
            if not self._take(rank, message):
                return

    def _came(self, rank: int, message: Transfer) -> None:
        if self._take(rank, message):
            self._listen(rank)

    def _take(self, rank: int, message: Transfer) -> bool:
        """Handle a note of a rank. Returns whether more may come."""
        if message.error() is not None:
            return False
        note = b"".join(message.wait())
        if len(note) < _HEADER.size:
            raise ProtocolError(f"a note of {len(note)} bytes")
        kind, number, size, dtype = _HEADER.unpack_from(note)
        rest = note[_HEADER.size :]
        if kind in (_Kind.SMALL, _Kind.OFFER):
            is_offer = kind == _Kind.OFFER
            if len(rest) != (_NUMBER_BYTES if is_offer else size):
                raise ProtocolError(f"a note with {len(rest)} bytes for a tensor of {size}")
            name = dtype.rstrip(b"\0").decode(errors="replace")
            self._arrived(_Arrival(rank, number, size, name, rest, is_offer))
        elif kind == _Kind.ACCEPT:
            self._accept(rank, number)
        elif kind == _Kind.REFUSE:
            with self._lock:
                offer = self._offers.pop(number, None)
            if offer is not None:
                offer[2].finish(CollectiveMismatchError(rest.decode(errors="replace")))
        elif kind == _Kind.FAIL:
            kind_of_error = KINDS[number] if 0 <= number < len(KINDS) else CollectiveError
            self._members.fail(kind_of_error(rest.decode(errors="replace")), tell=False)
        elif kind == _Kind.LEAVE:
            self._members.leave(rank, "it has left the process group")
        elif kind == _Kind.ASK:
            self._note(rank, _Kind.ANSWER, number, self.begun)
        elif kind == _Kind.ANSWER:
            question = self._questions.get(number)
            if question is not None:
                question.answered(rank, size < self.begun)
        else:
            raise ProtocolError(f"a note of kind {kind}")
        return True

    def _arrived(self, arrival: _Arrival) -> None:
        with self._lock:
            receive = next((each for each in self._receives if _fits(each, arrival)), None)
            if receive is None:
                self._arrivals.append(arrival)
                return
            self._receives.remove(receive)
        self._match(receive, arrival)

    def _accept(self, to: int, number: int) -> None:
        with self._lock:
            offer = self._offers.pop(number, None) if self._offers.get(number, (to,))[0] == to else None
            self._accepted.setdefault(to, deque()).append(offer[1:] if offer is not None else None)
        self._run_soon([(self._send_accepted, to)])

    def _send_accepted(self, to: int) -> None:
        """Send what a rank has accepted, in order: one thread at a time."""
        with self._sending:
            queue = self._accepted[to]
            while queue:
                accepted = queue.popleft()
                if accepted is None:  # it has expired: an empty message is sent in its place, and fails there
                    with contextlib.suppress(RpcError):
                        self._bulk.send(self._peers[to], self._tags[to] + DATA, b"")
                    continue
                tensor, work = accepted
                try:
                    message = self._bulk.send(self._peers[to], self._tags[to] + DATA, bytes_of(tensor))
                except RpcError as error:
                    work.finish(self._as_lost(to, error))
                else:
                    message.on_done(partial(self._ended, to, work, tensor))

    # ---- who is behind

    def ask_who_is_behind(self) -> list[int]:
        """Return the ranks that say that they have not begun the collective which this one waits in; if there
        are none, those that do not answer soon.
        """
        asked = [rank for rank in self._others if rank not in self._members.gone]
        number = next(self._numbers)
        question = self._questions[number] = _Question(asked)
        for rank in asked:
            self._note(rank, _Kind.ASK, number)
        try:
            wait_for_event(question.is_answered, monotonic() + _ANSWER_SECONDS)
        finally:
            del self._questions[number]
        return sorted(question.behind or question.unanswered)

    # ---- the end

    def tell_failure(self, failure: CollectiveError) -> None:
        """Notify all others that the group has failed."""
        for rank in self._others:
            self._note(rank, _Kind.FAIL, KINDS.index(type(failure)), rest=str(failure).encode())

    def _end_hopeless(self) -> None:
        """End the operations that wait for ranks that are gone, or all if the group has failed."""
        members = self._members
        with self._lock:
            everybody_gone = all(rank in members.gone for rank in self._others)
            receives = [
                each
                for each in self._receives
                if members.failed or each.source in members.gone or (each.source == ANY and everybody_gone)
            ]
            self._receives = [each for each in self._receives if each not in receives]
            # Other threads end offers and messages meanwhile, without the lock.
            offers = [
                number
                for number, (to, _, _) in self._offers.copy().items()
                if members.failed or to in members.gone
            ]
            refused = [offer for number in offers if (offer := self._offers.pop(number, None)) is not None]
            coming = [
                message
                for message, source in self._coming.copy().items()
                if members.failed or source in members.gone
            ]
            # Small messages are here; others will not come any more.
            self._arrivals = [
                each for each in self._arrivals if not (each.is_offer and each.source in members.gone)
            ]
        for message in coming:
            message.cancel()  # unless its data is here
        for receive in receives:
            source = self._others[0] if receive.source == ANY else receive.source
            receive.work.finish(self._why(source))
        for to, _, work in refused:
            work.finish(self._why(to))

    def _why(self, rank: int) -> CollectiveError:
        if self._members.failed:
            return self._members.error()
        return RankLostError(f"{self._members.describe(rank)} is gone: {self._members.gone[rank]}")

    def close(self) -> None:
        """Take part no more."""
        if self._closed:
            return
        self._closed = True
        if self._members.failure is not None:
            self.tell_failure(self._members.failure)
        for rank in self._others:
            self._note(rank, _Kind.LEAVE)
        for message in list(self._posts.values()):
            message.cancel("the process group has ended")


def _fits(receive: _Receive, arrival: _Arrival) -> bool:
    return receive.tag == arrival.tag and receive.source in (ANY, arrival.source)
