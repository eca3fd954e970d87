"""Messages of bytes between workers, received into posted buffers: ``agent.messages.bulk``.

Collectives are built on this. A message goes to a *tag* of a worker. The n-th message fills the n-th buffer
that this worker has posted for that sender and tag (``matching.py``), whichever way messages are sent:

- up to 64 KiB in one small frame;
- through shared memory, if the two workers share some: one copy in, one copy out, or none with ``into=None``;
- otherwise over the connection, from the sender's buffers, and directly into the posted ones, if those were
  posted before the message began to arrive.

The call id of a frame of kind ``BULK`` is the tag, times 2^32, plus the message's number. A small message is
the only buffer of its frame. The frame of a large one has more buffers: the message follows the first buffer,
which has one byte if the sender waits for a report of its arrival, and is empty otherwise. ``BULK_CREDIT``
has a tag as its call id, and one buffer: the total cost of the messages that were matched, u64, and the
number of a message that has arrived, or -1, i64. ``BULK_CLOSE`` has a tag, too, and the number of messages
that its sender has sent under it, modulo 2^32, u32.

A stream is forgotten when both sides have closed it and everything has arrived: nothing can arrive under its
tag any more. Until then, the side that has closed it drops what arrives, and gives credit for it.

Only ``Transfer.wait`` blocks. When a worker is lost, all posts for it whose messages have not arrived fail at
once, and so do all messages sent to it that are not known to have arrived.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from struct import Struct
from typing import Any, Final, NamedTuple

from rpc.bulk.matching import SEQUENCES, Inbound, Outbound
from rpc.bulk.transfer import Transfer, as_bytes
from rpc.errors import ForkedProcessError, NotInitializedError, ProtocolError, RpcError, WorkerLostError
from rpc.group.peer import Peer
from rpc.runtime.interrupts import ensure_deferred, protected
from rpc.runtime.tasks import Task
from rpc.serialization.payload import Payload
from rpc.transport.base import SMALL_BYTES
from rpc.wire.frames import Frame, Kind, encode, encode_small
from rpc.wire.reassembly import Incomplete
from rpc.wire.targets import Merger, MergingTarget, Target

__all__ = ["MAX_TAG", "RESERVED_TAGS", "Bulk"]

MAX_TAG: Final = (1 << 32) - 1

RESERVED_TAGS: Final = 1 << 30
"""The first tag that ``reserve`` returns; there are as many below."""

_END: Final = Struct("<I")
_CREDIT: Final = Struct("<Qq")
_NONE: Final = -1


class _Arrived(NamedTuple):
    sequence: int
    buffers: list[memoryview]
    """The message; a large one follows the first buffer."""

    def message(self) -> list[memoryview]:
        return self.buffers if isinstance(self.buffers, Incomplete) else self.buffers[1:] or self.buffers


class _Stream:
    """All messages between this worker and one other under one tag, in both directions."""

    def __init__(self, peer: Peer, tag: int) -> None:
        self.peer = peer
        self.tag = tag
        self.incoming = f"a message from worker '{peer.name}' (tag {tag})"
        self.outgoing = f"a message to worker '{peer.name}' (tag {tag})"
        self.inbound: Inbound[Transfer, _Arrived] = Inbound()
        self.outbound: Outbound[Transfer] = Outbound()
        self.targets: dict[int, Target] = {}
        """Targets of messages that began to arrive after their post, and are not matched yet, by number."""
        self.unacknowledged: dict[int, Transfer] = {}
        """Messages that were sent from the user's memory, and are not known to have arrived, by number."""
        self.is_closed = False

    @property
    def awaits(self) -> bool:
        """Whether a message, or the report of an arrival, is awaited."""
        return bool(self.unacknowledged or self.outbound or self.inbound.has_posts())

    def is_over(self) -> bool:
        """Whether both sides have closed it, and nothing is in progress."""
        return self.is_closed and self.inbound.is_complete() and not self.unacknowledged

    def targets_before(self, transfer: Transfer) -> list[Target]:
        """Return the targets that must be taken back before a post is: those of all messages that go to
        another post then, or to none.
        """
        first = self.inbound.number_of(transfer)
        if first is None:
            return []
        if self._is_merged_from(transfer, first):
            target = self.targets.get(first)
            return [] if target is None or isinstance(target, MergingTarget) else [target]
        return list(self._targets_from(first).values())

    def take_back(self, transfer: Transfer) -> MergingTarget | None:
        """Take back a post whose ``targets_before`` are. Returns the target that its message is merged into,
        which must be taken back next.
        """
        first = self.inbound.number_of(transfer)
        if first is None or not self._is_merged_from(transfer, first):
            self.inbound.withdraw(transfer)
            return None
        # What was merged cannot go to another post: all keep their messages, and this one's is dropped.
        self.inbound.replace(transfer, Transfer(self.peer, self.incoming, None, lambda _: False))
        target = self.targets.get(first)
        return target if isinstance(target, MergingTarget) else None

    def _targets_from(self, first: int) -> dict[int, Target]:
        return {
            sequence: target
            for sequence, target in self.targets.items()
            if (sequence - first) % SEQUENCES < SEQUENCES // 2
        }

    def _is_merged_from(self, transfer: Transfer, first: int) -> bool:
        """Whether the message for this post, or a later one, is merged, or may have been begun to be."""
        return any(isinstance(target, MergingTarget) for target in self._targets_from(first).values()) or any(
            post.merger is not None and post.merger.has_begun for post in self.inbound.posts_from(transfer)
        )

    def take(self, arrived: _Arrived) -> tuple[list[memoryview] | None, Target | None]:
        """Take out a message that is matched; None if it is in the posted buffers. Also returns its target,
        to be released without the lock.
        """
        target = self.targets.pop(arrived.sequence, None)
        return arrived.message() if target is None or target.is_taken_back else None, target

    def take_all(self) -> list[Transfer]:
        """Remove and return all transfers that have not ended, and will not."""
        sent = list(self.unacknowledged.values())
        self.unacknowledged.clear()
        return [*self.inbound.take_posts(), *self.outbound.take_waiting(), *sent]


class Bulk:
    """The bulk messages of one agent. From any thread.

    Args:
        share: sends a message through shared memory, if possible.
        sent_large: called with a worker and the number of bytes of a large message that was sent to it.
        lose: disconnects a worker for good, for a reason.

    Example::

        received = agent.messages.bulk.post(left, tag=7, into=torch.empty(1024).numpy())
        sent = agent.messages.bulk.send(right, tag=7, buffers=torch.ones(1024).numpy())
        received.wait(timeout=30)
        sent.wait(timeout=30)
    """

    def __init__(
        self,
        share: Callable[[Peer, int, int, Payload, float], bool],
        sent_large: Callable[[Any, int], object],
        lose: Callable[[Any, str], object],
    ) -> None:
        self._share = share
        self._sent_large = sent_large
        self._lose = lose
        self._lock = threading.RLock()  # a finalizer that runs while it is held may send
        self._streams: dict[tuple[int, int], _Stream] = {}
        self._reserved: dict[int, int] = {}
        self._ended: type[NotInitializedError] | None = None

    def register(self, on: Callable[..., object]) -> None:
        """Register the handlers of its kinds of messages; ``on`` is ``Dispatcher.on``."""
        on(Kind.BULK, self.received, any_thread=True)
        on(Kind.BULK_CREDIT, self.credited, any_thread=True)
        on(Kind.BULK_CLOSE, self.closed, any_thread=True)

    @protected
    def send(self, peer: Peer, tag: int, buffers: Any) -> Transfer:
        """Send one message: the bytes of one or several buffers. Does not block.

        Args:
            peer: the receiver.
            tag: 0 to 2^32 - 1. Each tag takes a little memory until it is closed.
            buffers: contiguous buffers. They must not change until the transfer is done: at once if the
                message was copied, as small ones and those through shared memory are, otherwise when it has
                arrived.

        Raises:
            SerializationError: the message is larger than the receiver accepts.
            WorkerLostError: the receiver is lost.
        """
        ensure_deferred()
        views = as_bytes(buffers)
        stream = self._stream(peer, tag)
        transfer = Transfer(peer, stream.outgoing, views, partial(self._withdraw, stream))
        peer.check_size(transfer.size)
        with self._lock:
            self._check(peer)
            self._check_open(stream)
            stream.outbound.add(transfer, transfer.size)
        self._send_waiting(stream)
        return transfer

    @protected
    def post(
        self,
        peer: Peer,
        tag: int,
        into: Any = None,
        expected: int = 0,
        merge: Callable[[int, memoryview], object] | None = None,
    ) -> Transfer:
        """Receive the next message from a worker under a tag. Does not block.

        Args:
            peer: the sender.
            tag: as for ``send``.
            into: one or several writable, contiguous buffers, which the message fills in order; their total
                size must be that of the message. None: ``wait`` returns the message's own memory, without
                another copy.
            expected: without ``into``, the number of bytes that the message is likely to have; a thread that
                waits for a long one uses less processor time.
            merge: merges the message into ``into``, one buffer, which it does not fill then. Called with the
                offset of each part of the message and the part, while the message arrives if it arrives on
                bulk streams. Several threads call it at once, for different parts. If the message was sent as
                one buffer, offsets are multiples of ``MERGE_ALIGNMENT``. If the transfer is cancelled in the
                middle, the message is dropped.

        Raises:
            WorkerLostError: the sender is lost, and no message of it is left.
        """
        ensure_deferred()
        targets = None if into is None else as_bytes(into)
        if targets is not None and any(each.readonly for each in targets):
            raise TypeError("a buffer to receive into is read-only")
        stream = self._stream(peer, tag)
        merger = None if merge is None else Merger(merge)
        transfer = Transfer(peer, stream.incoming, targets, partial(self._withdraw, stream), expected, merger)
        with self._lock:
            self._check_open(stream)
            pairs = stream.inbound.posted(transfer)
            if not pairs:
                try:
                    self._check(peer)
                    if stream.inbound.take_hopeless():
                        raise RpcError(f"{stream.incoming} will not come: that worker has closed the tag")
                except BaseException:
                    stream.inbound.withdraw(transfer)
                    raise
            arrived = [(each, *stream.take(came)) for each, came in pairs]
        for each, message, _ in arrived:
            each.deliver(message)
            each.fill()
        self._report(stream)
        return transfer

    def reserve(self, peer: Peer, count: int) -> int:
        """Reserve ``count`` tags that are not in use with a worker, from ``RESERVED_TAGS`` on; returns the
        first.

        Two workers must not both reserve tags with each other.

        Raises:
            RpcError: all tags are reserved.
        """
        with self._lock:
            first = self._reserved.get(peer.incarnation, RESERVED_TAGS)
            if first + count > 2 * RESERVED_TAGS:
                raise RpcError(f"all tags for messages between this worker and '{peer.name}' were used once")
            self._reserved[peer.incarnation] = first + count
        return first

    @protected
    def close_tag(self, peer: Peer, tag: int) -> None:
        """Send and receive no more under a tag: messages that still arrive are dropped, waiting ones fail.

        Once the other worker has closed the tag, too, and nothing is in progress, its memory is freed.
        Callers are not notified of that, so a tag must not be used again.
        """
        try:
            stream = self._stream(peer, tag)
        except (WorkerLostError, NotInitializedError):
            return
        with self._taken_back(stream.targets.values):
            if stream.is_closed:
                return
            stream.is_closed = True
            stream.targets.clear()
            ended = [*stream.inbound.close(), *stream.outbound.take_waiting()]
            end = _END.pack(stream.outbound.end)
            self._forget_if_over(stream)
        for transfer in ended:
            transfer.end(RpcError(f"{transfer.what} has failed: this worker has closed the tag"))
        with contextlib.suppress(WorkerLostError):
            peer.send_small(encode_small(Kind.BULK_CLOSE, tag, {}, (end,)), 0)
        self._report(stream)

    def closed(self, peer: Peer, frame: Frame) -> None:
        """Handle that a worker has closed a tag, under which it has sent this many messages."""
        if frame.header or len(frame.buffers) != 1 or len(frame.buffers[0]) != _END.size:
            raise ProtocolError("a malformed end of bulk messages")
        try:
            stream = self._stream(peer, frame.call_id)
        except (WorkerLostError, NotInitializedError):
            return
        except ValueError as error:
            raise ProtocolError(str(error)) from error
        with self._lock:
            if stream.inbound.end is not None:
                raise ProtocolError(f"tag {stream.tag} is closed twice")
            (end,) = _END.unpack(frame.buffers[0])
            # Otherwise they would be written to after their posts have failed.
            for sequence in stream.targets:
                if (sequence - end) % SEQUENCES < SEQUENCES // 2:
                    raise ProtocolError(f"message {sequence} of tag {stream.tag} comes after the last one")
            stream.inbound.end = end
            hopeless = stream.inbound.take_hopeless()
            self._forget_if_over(stream)
        for transfer in hopeless:
            transfer.end(RpcError(f"{transfer.what} will not come: that worker has closed the tag"))

    @property
    def tags(self) -> int:
        """Number of tags in use, counted for each worker."""
        return len(self._streams)

    def peers(self) -> list[Peer]:
        """All workers from which a message, or the report of an arrival, is awaited."""
        with self._lock:
            return [stream.peer for stream in self._streams.values() if stream.awaits]

    def _forget_if_over(self, stream: _Stream) -> None:
        """Forget a stream that is over. With the lock."""
        if stream.is_over():
            self._streams.pop((stream.peer.incarnation, stream.tag), None)

    def _check_open(self, stream: _Stream) -> None:
        """Raise if the tag is closed. With the lock."""
        if stream.is_closed:
            raise RpcError(f"this worker has closed tag {stream.tag} for worker '{stream.peer.name}'")

    def _stream(self, peer: Peer, tag: int) -> _Stream:
        try:
            return self._streams[peer.incarnation, tag]
        except KeyError:
            if type(tag) is not int or not 0 <= tag <= MAX_TAG:
                raise ValueError(f"a tag is a number from 0 to {MAX_TAG}, not {tag!r}") from None
            with self._lock:
                self._check(peer)
                return self._streams.setdefault((peer.incarnation, tag), _Stream(peer, tag))

    def _check(self, peer: Peer) -> None:
        """Raise if nothing more can be sent or received. With the lock."""
        if self._ended is not None:
            raise self._ended("RPC has been shut down, or this process was forked: bulk messages have ended")
        if peer.lost is not None:
            raise peer.lost_error()

    # ---- sending

    def _send_waiting(self, stream: _Stream) -> None:
        """Send the waiting messages that may be sent."""
        while True:
            with self._lock:
                following = stream.outbound.next()
                if following is None:
                    return
                sequence, transfer = following
                stream.unacknowledged[sequence] = transfer
            self._send(stream, sequence, transfer)

    def _send(self, stream: _Stream, sequence: int, transfer: Transfer) -> None:
        error: Exception | None = None
        try:
            if not self._transmit(stream, sequence, transfer):
                return  # it ends when it has arrived
        except Exception as failure:
            error = failure
            if not isinstance(failure, WorkerLostError):
                # Its receiver must neither wait for it forever, nor take the next message for it.
                self._lose(stream.peer, f"a bulk message to it cannot be sent: {failure}")
        with self._lock:
            mine = stream.unacknowledged.pop(sequence, None) is not None
            self._forget_if_over(stream)
        if mine:
            transfer.end(error)

    def _transmit(self, stream: _Stream, sequence: int, transfer: Transfer) -> bool:
        """Send one message; returns whether its buffers are copied, so that they may change."""
        peer, call_id = stream.peer, stream.tag * SEQUENCES + sequence
        buffers = transfer.buffers or []
        if transfer.size <= SMALL_BYTES:
            peer.send_small(encode_small(Kind.BULK, call_id, {}, (b"".join(buffers),)), 0)
            return True
        if self._share(peer, Kind.BULK, call_id, Payload({}, [b"", *buffers]), 0):
            return True
        frame, size = encode(Kind.BULK, call_id, {}, [b"\1", *buffers])
        peer.send(frame, size, wait=0)
        self._sent_large(peer, size)
        return False

    def credited(self, peer: Peer, frame: Frame) -> Task | None:
        """Handle a worker's report of what was matched and what has arrived there. May return a task."""
        with self._lock:
            if len(frame.buffers) != 1 or len(frame.buffers[0]) != _CREDIT.size:
                raise ProtocolError("a malformed credit")
            matched, sequence = _CREDIT.unpack(frame.buffers[0])
            if sequence != _NONE:
                peer.session.bulk_arrived(frame.call_id * SEQUENCES + sequence)
            stream = self._streams.get((peer.incarnation, frame.call_id))
            if stream is None:
                return None  # both have closed it
            stream.outbound.reported(matched)
            arrived = stream.unacknowledged.pop(sequence, None)
            self._forget_if_over(stream)
        if arrived is not None:
            arrived.end()
        return (self._send_waiting, stream) if stream.outbound else None

    # ---- receiving

    def received(self, peer: Peer, frame: Frame) -> Task | None:
        """Handle a message that has arrived. May return a task for an executor thread: a long copy."""
        tag, sequence = divmod(frame.call_id, SEQUENCES)
        first, *rest = frame.buffers or [None]
        if first is None or frame.header or (rest and len(first) > 1):
            raise ProtocolError("a malformed bulk message")
        buffers = frame.buffers if rest else [memoryview(first)]
        try:
            stream = self._stream(peer, tag)
        except (WorkerLostError, NotInitializedError):
            return None  # the end came between
        with self._lock:
            target = stream.targets.get(sequence)
            if isinstance(buffers, Incomplete):
                stream.targets.pop(sequence, None)
            elif target is not None and not target.is_of(buffers):
                raise ProtocolError(f"message {sequence} of a stream comes twice")
            arrived = _Arrived(sequence, buffers)
            matched = stream.inbound.arrived(sequence, arrived, sum(map(len, arrived.message())))
            pairs = [(each, *stream.take(came)) for each, came in matched]
            self._forget_if_over(stream)
        self._report(stream, sequence if rest and first else _NONE)
        left = [transfer for transfer, message, _ in pairs if transfer.deliver(message)]
        return (_fill, left) if left else None

    def find_target(self, peer: Peer, kind: int, call_id: int, sizes: Sequence[int]) -> Target | None:
        """Return the target of a large message that begins to arrive: the buffers posted for it, if their
        size is equal.
        """
        if kind != Kind.BULK:
            return None
        tag, sequence = divmod(call_id, SEQUENCES)
        with self._lock:
            stream = self._streams.get((peer.incarnation, tag))
            if stream is None or sequence in stream.targets:
                return None
            transfer = stream.inbound.post_of(sequence)
            if transfer is None or not transfer.buffers or sum(sizes[1:]) != transfer.size:
                return None
            if transfer.merger is None:
                target = Target(transfer.buffers)
            elif len(sizes) == 2:
                target = MergingTarget(transfer.buffers, transfer.merger)
            else:
                return None
            stream.targets[sequence] = target
        return target

    def _report(self, stream: _Stream, arrived: int = _NONE) -> None:
        """Report to the sender what it needs in order to continue, if anything."""
        with self._lock:
            if not stream.inbound.is_report_due() and arrived == _NONE:
                return
            credit = _CREDIT.pack(stream.inbound.matched, arrived)
        try:
            frame = encode_small(Kind.BULK_CREDIT, stream.tag, {}, (credit,))
            stream.peer.send_patiently(frame)  # otherwise all chunks would be short
        except WorkerLostError:
            return  # ``peer_gone`` follows

    # ---- the end

    @contextlib.contextmanager
    def _taken_back(self, targets: Callable[[], Iterable[Target]]) -> Iterator[None]:
        """Hold the lock when these targets are taken back.

        A target is taken back without the lock, since that waits for the threads that write to it, and they
        may send: the function that merges, or a finalizer in any thread. Until it is taken back, it stays
        that of its message, which may be matched meanwhile; and other messages may get targets. The targets
        are not released before the lock is.
        """
        while True:
            with self._lock:
                found = list(targets())
                left = [each for each in found if not each.is_taken_back]
                if not left:
                    yield
                    return
            for each in left:
                each.take_back()

    def _withdraw(self, stream: _Stream, transfer: Transfer) -> bool:
        with self._taken_back(lambda: stream.targets_before(transfer)):
            if not stream.inbound.has(transfer):
                return stream.outbound.withdraw(transfer)
            merging = stream.take_back(transfer)
        if merging is not None:
            merging.take_back()
        return True

    def peer_broke(self, peer: Peer) -> None:
        """Handle that the connection to a worker broke: large messages that have begun to arrive will begin
        again.
        """
        with self._taken_back(lambda: self._targets(peer)):
            for stream in self._streams.values():
                if stream.peer is peer:
                    stream.targets.clear()

    def _targets(self, peer: Peer | None = None) -> list[Target]:
        """Return the targets of messages of one worker, or of all. With the lock."""
        streams = [each for each in self._streams.values() if peer is None or each.peer is peer]
        return [target for stream in streams for target in stream.targets.values()]

    def send_again(self, lost: tuple[Peer, int]) -> None:
        """Send a message again that was lost with its connection, from the user's memory."""
        peer, call_id = lost
        tag, sequence = divmod(call_id, SEQUENCES)
        with self._lock:
            stream = self._streams.get((peer.incarnation, tag))
            transfer = None if stream is None else stream.unacknowledged.get(sequence)
        if stream is not None and transfer is not None:
            self._send(stream, sequence, transfer)

    def peer_gone(self, peer: Peer, reason: str) -> None:
        """Handle that a worker is lost. Messages of it that have arrived can still be received."""
        with self._taken_back(lambda: self._targets(peer)):
            mine = [stream for stream in self._streams.values() if stream.peer is peer]
            transfers = [each for stream in mine for each in stream.take_all()]
            for stream in mine:
                stream.targets.clear()
                if not stream.inbound:
                    del self._streams[peer.incarnation, stream.tag]
            self._reserved.pop(peer.incarnation, None)
        for transfer in transfers:
            transfer.end(peer.lost_error(f"{transfer.what} was not delivered"))

    def close(self) -> None:
        """End all transfers: this worker has left."""
        with self._lock:
            self._ended = NotInitializedError
        with self._taken_back(self._targets):
            transfers = self._take_all()
        self._end(transfers, "RPC has been shut down")

    def abandon(self) -> None:
        """Drop all transfers in a forked child, since they are the parent's. Takes no lock of the
        parent's.
        """
        self._ended = ForkedProcessError
        self._lock = threading.RLock()
        self._end(self._take_all(), "this process was forked")

    def _take_all(self) -> list[Transfer]:
        """Remove all streams, and return their transfers that have not ended."""
        streams, self._streams = self._streams, {}
        return [each for stream in streams.values() for each in stream.take_all()]

    def _end(self, transfers: list[Transfer], reason: str) -> None:
        for transfer in transfers:
            assert self._ended is not None
            transfer.end(self._ended(f"{reason}: {transfer.what} was not delivered before"))


def _fill(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        transfer.fill()
