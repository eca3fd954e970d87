"""Messages of bytes from worker to worker, received into posted buffers: ``agent.messages.bulk``.

What collectives are built on. A message goes to a *tag* of a worker; the n-th one fills the n-th buffer that
this worker has posted for that sender and tag (``matching.py``), however they are sent:

- up to 64 KiB in one small frame;
- through shared memory, where the two share some: one copy in, one copy out, or none with ``into=None``;
- else over the connection, from where the buffers lie, and straight into the posted ones, if they were there
  when the message began to come.

The call id of a frame of kind ``BULK`` is the tag, times 2^32, and the message's number. A small one has one
buffer, the message. A large one has more: the message comes after the first, which has one byte if the sender
waits to be told of its arrival, and else none. ``BULK_CREDIT`` has a tag for its call id, and one buffer: the
cost of all messages that were matched u64, and the number of a message that has arrived, or -1, i64.
``BULK_CLOSE`` has a tag, too, and how many messages its sender has sent under it, modulo 2^32, u32.

A stream is forgotten when both sides have said that and all has arrived: nothing can come under its tag any
more. Until then the side that has closed it drops what comes, and gives the credit for it.

Nothing here blocks but ``Transfer.wait``. When a worker is gone, all that was posted for it and has not come
fails at once, and so does all that was sent to it and is not known to have arrived.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
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
"""Tags from here on, as many as there are below, are given by ``reserve``."""

_END: Final = Struct("<I")
_CREDIT: Final = Struct("<Qq")
_NONE: Final = -1


class _Arrived(NamedTuple):
    sequence: int
    buffers: list[memoryview]
    """The message; a large one comes after the first."""

    def message(self) -> list[memoryview]:
        return self.buffers[1:] or self.buffers


class _Stream:
    """All messages between this worker and one other under one tag, both ways."""

    def __init__(self, peer: Peer, tag: int) -> None:
        self.peer = peer
        self.tag = tag
        self.incoming = f"a message from worker '{peer.name}' (tag {tag})"
        self.outgoing = f"a message to worker '{peer.name}' (tag {tag})"
        self.inbound: Inbound[Transfer, _Arrived] = Inbound()
        self.outbound: Outbound[Transfer] = Outbound()
        self.targets: dict[int, Target] = {}
        """Of messages, by number, that began to come when they had a post, and are not matched yet."""
        self.unacknowledged: dict[int, Transfer] = {}
        """By number: sent from where they lie, and not known to have arrived."""
        self.is_closed = False

    @property
    def awaits(self) -> bool:
        """Whether a message, or the word that one has arrived, is to come."""
        return bool(self.unacknowledged or self.outbound or self.inbound.has_posts())

    def is_over(self) -> bool:
        """Whether both sides have closed it, and nothing is under way."""
        return self.is_closed and self.inbound.is_complete() and not self.unacknowledged

    def take_back(self, transfer: Transfer) -> bool:
        """Take back a post, and the targets of all messages that go to another now, or to none."""
        first = self.inbound.number_of(transfer)
        if first is None:
            return False
        later = {
            sequence: target
            for sequence, target in self.targets.items()
            if (sequence - first) % SEQUENCES < SEQUENCES // 2
        }
        if any(isinstance(target, MergingTarget) for target in later.values()) or any(
            post.merger is not None and post.merger.has_begun for post in self.inbound.posts_from(transfer)
        ):
            # What was merged cannot go to another post: all keep their messages, and this one's is dropped.
            if first in later:
                later[first].take_back()
            self.inbound.replace(transfer, Transfer(self.peer, self.incoming, None, lambda _: False))
            return True
        for target in later.values():
            target.take_back()
        return self.inbound.withdraw(transfer)

    def take_back_targets(self) -> None:
        for target in self.targets.values():
            target.take_back()
        self.targets.clear()

    def take_all(self) -> list[Transfer]:
        """All transfers that have not ended, and will not."""
        sent = list(self.unacknowledged.values())
        self.unacknowledged.clear()
        return [*self.inbound.take_posts(), *self.outbound.take_waiting(), *sent]


class Bulk:
    """The bulk messages of one agent. From any thread.

    Args:
        share: sends a message through shared memory, if it can.
        sent_large: told of a worker and how many bytes were sent to it.
        lose: cuts off a worker, and says why.

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

    @protected
    def send(self, peer: Peer, tag: int, buffers: Any) -> Transfer:
        """Send one message: the bytes of some buffers, or of one. Does not block.

        Args:
            peer: to whom.
            tag: 0 to 2^32 - 1. Each costs a little memory for as long as there is an agent.
            buffers: contiguous. They must not change until the transfer is done: at once if the message was
                copied, as small ones and those through shared memory are, else when it has arrived.

        Raises:
            SerializationError: the message is larger than that worker accepts.
            WorkerLostError: it is gone.
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
            peer: from whom.
            tag: as for ``send``.
            into: writable, contiguous buffers, or one, which the message fills in order; they must have its
                size in all. None: ``wait`` returns the message's own memory, without another copy.
            expected: without ``into``, the number of bytes that the message is likely to have; a thread that
                waits for a long one uses less of the processor.
            merge: the message does not fill ``into``, one buffer, but is merged into it: called with the
                offset of each part of the message and the part, while the message arrives if it comes on bulk
                streams. Several threads call it at once, for different parts. If the message was sent as one
                buffer, offsets are multiples of ``MERGE_ALIGNMENT``. If the transfer is cancelled in the
                middle, the message is dropped.

        Raises:
            WorkerLostError: that worker is gone, and no message of its is left.
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
            arrived = [(each, self._take(stream, came)) for each, came in pairs]
        for each, message in arrived:
            each.deliver(message)
            each.fill()
        self._report(stream)
        return transfer

    def reserve(self, peer: Peer, count: int) -> int:
        """The first of ``count`` tags that nobody uses with a worker, from ``RESERVED_TAGS`` on.

        Two workers must not both reserve tags with each other.

        Raises:
            RpcError: all are reserved.
        """
        with self._lock:
            first = self._reserved.get(peer.incarnation, RESERVED_TAGS)
            if first + count > 2 * RESERVED_TAGS:
                raise RpcError(f"all tags for messages between this worker and '{peer.name}' were used once")
            self._reserved[peer.incarnation] = first + count
        return first

    @protected
    def close_tag(self, peer: Peer, tag: int) -> None:
        """Send and receive no more under a tag: what still comes is dropped, what waits fails.

        When the other worker has closed it, too, and nothing is under way, nothing is left of it. Whether and
        when it has is not told, so the tag must not be used again.
        """
        try:
            stream = self._stream(peer, tag)
        except (WorkerLostError, NotInitializedError):
            return
        with self._lock:
            if stream.is_closed:
                return
            stream.is_closed = True
            stream.take_back_targets()
            ended = [*stream.inbound.close(), *stream.outbound.take_waiting()]
            end = _END.pack(stream.outbound.end)
            self._forget_if_over(stream)
        for transfer in ended:
            transfer.end(RpcError(f"{transfer.what} has failed: this worker has closed the tag"))
        with contextlib.suppress(WorkerLostError):
            peer.send_small(encode_small(Kind.BULK_CLOSE, tag, {}, (end,)), 0)
        self._report(stream)

    def closed(self, peer: Peer, frame: Frame) -> None:
        """A worker has closed a tag, and says how many messages it has sent."""
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
            for sequence in stream.targets:  # else they would be written to after their posts have failed
                if (sequence - end) % SEQUENCES < SEQUENCES // 2:
                    raise ProtocolError(f"message {sequence} of tag {stream.tag} comes after the last one")
            stream.inbound.end = end
            hopeless = stream.inbound.take_hopeless()
            self._forget_if_over(stream)
        for transfer in hopeless:
            transfer.end(RpcError(f"{transfer.what} will not come: that worker has closed the tag"))

    @property
    def tags(self) -> int:
        """How many tags are in use, each counted for each worker."""
        return len(self._streams)

    def peers(self) -> list[Peer]:
        """All workers from which a message is awaited, or word that one has arrived."""
        with self._lock:
            return [stream.peer for stream in self._streams.values() if stream.awaits]

    def _forget_if_over(self, stream: _Stream) -> None:
        """With the lock."""
        if stream.is_over():
            self._streams.pop((stream.peer.incarnation, stream.tag), None)

    def _check_open(self, stream: _Stream) -> None:
        """With the lock."""
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
        """With the lock: raise if nothing more can come or go."""
        if self._ended is not None:
            raise self._ended("RPC has been shut down, or this process was forked: bulk messages have ended")
        if peer.lost is not None:
            raise peer.lost_error()

    # ---- sending

    def _send_waiting(self, stream: _Stream) -> None:
        """Send what waits and may be sent."""
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
                # Its receiver must not wait in vain, nor take the next one for it.
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
        """A worker says what has been matched there, and what has arrived. May return what is to be done."""
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
        """A message has come. May return what is to be done on an executor thread: a long copy."""
        tag, sequence = divmod(frame.call_id, SEQUENCES)
        if isinstance(frame.buffers, Incomplete):
            self._lose(peer, frame.buffers.reason)  # whoever waits for this message must not wait longer
            return None
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
            if target is not None and not target.is_of(buffers):
                raise ProtocolError(f"message {sequence} of a stream comes twice")
            arrived = _Arrived(sequence, buffers)
            matched = stream.inbound.arrived(sequence, arrived, sum(map(len, arrived.message())))
            pairs = [(each, self._take(stream, came)) for each, came in matched]
            self._forget_if_over(stream)
        self._report(stream, sequence if rest and first else _NONE)
        left = [transfer for transfer, message in pairs if transfer.deliver(message)]
        return (_fill, left) if left else None

    def _take(self, stream: _Stream, arrived: _Arrived) -> list[memoryview] | None:
        """With the lock: a message that is matched; None if it is in the posted buffers."""
        target = stream.targets.pop(arrived.sequence, None)
        return arrived.message() if target is None or target.is_taken_back else None

    def find_target(self, peer: Peer, kind: int, call_id: int, sizes: Sequence[int]) -> Target | None:
        """A large message begins to come: the buffers posted for it, if there are any of its size."""
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
        """Tell the sender what it needs to know to go on, if anything."""
        with self._lock:
            if not stream.inbound.is_report_due() and arrived == _NONE:
                return
            credit = _CREDIT.pack(stream.inbound.matched, arrived)
        try:
            frame = encode_small(Kind.BULK_CREDIT, stream.tag, {}, (credit,))
            stream.peer.send_patiently(frame)  # else all chunks would be short
        except WorkerLostError:
            return  # ``peer_gone`` follows

    # ---- the end

    def _withdraw(self, stream: _Stream, transfer: Transfer) -> bool:
        with self._lock:
            return stream.take_back(transfer) or stream.outbound.withdraw(transfer)

    def peer_broke(self, peer: Peer) -> None:
        """The connection to a worker broke: large messages that have begun to come will begin again."""
        with self._lock:
            for stream in self._streams.values():
                if stream.peer is peer:
                    stream.take_back_targets()

    def send_again(self, lost: tuple[Peer, int]) -> None:
        """A message was lost with its connection: send it again, from where it lies."""
        peer, call_id = lost
        tag, sequence = divmod(call_id, SEQUENCES)
        with self._lock:
            stream = self._streams.get((peer.incarnation, tag))
            transfer = None if stream is None else stream.unacknowledged.get(sequence)
        if stream is not None and transfer is not None:
            self._send(stream, sequence, transfer)

    def peer_gone(self, peer: Peer, reason: str) -> None:
        """A worker is gone. What has arrived from it can still be received."""
        with self._lock:
            mine = [stream for stream in self._streams.values() if stream.peer is peer]
            for stream in mine:
                stream.take_back_targets()
            transfers = [each for stream in mine for each in stream.take_all()]
            for stream in mine:
                if not stream.inbound:
                    del self._streams[peer.incarnation, stream.tag]
            self._reserved.pop(peer.incarnation, None)
        for transfer in transfers:
            transfer.end(peer.lost_error(f"{transfer.what} was not delivered"))

    def close(self) -> None:
        """This worker has left."""
        with self._lock:
            self._ended = NotInitializedError
            for stream in self._streams.values():
                stream.take_back_targets()
        self._end_all("RPC has been shut down")

    def abandon(self) -> None:
        """In a forked child: all transfers are the parent's. Takes no lock of the parent's."""
        self._ended = ForkedProcessError
        self._lock = threading.RLock()
        self._end_all("this process was forked")

    def _end_all(self, reason: str) -> None:
        with self._lock:
            transfers = [each for stream in self._streams.values() for each in stream.take_all()]
            self._streams.clear()
        for transfer in transfers:
            assert self._ended is not None
            transfer.end(self._ended(f"{reason}: {transfer.what} was not delivered before"))


def _fill(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        transfer.fill()
