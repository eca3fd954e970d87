"""Connections over a byte stream.

A connection composes a ``ByteStream``, a ``Decoder`` for what arrives, a ``WriteQueue`` for what is sent, and
an ``InlineReader`` if threads may read. The stream is closed under the send lock and after its reader is
removed, so that no thread can write to a descriptor number that has been reused.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
from collections.abc import Sequence
from typing import Final

from rpc.errors import ProtocolError, is_violation
from rpc.transport.base import CLOSED_BY_PEER, ConnectionOwner, TransportContext
from rpc.transport.bulk_socket import BulkSocket, bulk_socket
from rpc.transport.byte_stream import ByteStream, DescriptorStream, ReceiveBuffer
from rpc.transport.inline_read import InlineReader, Turn
from rpc.transport.tls import why_no_tls
from rpc.transport.write_queue import CAPTURE_ALL, Streams, WriteQueue
from rpc.wire.decoder import Decoder
from rpc.wire.frames import PREAMBLE, Frame
from rpc.wire.reassembly import Reassembly
from rpc.wire.targets import Target

__all__ = ["StreamConnection"]

_READS_PER_WAKE_UP: Final = 16
_BYTES_PER_WAKE_UP: Final = 256 << 10
"""Number of bytes of large messages received before the loop handles other events."""
_HANDSHAKE_FRAME_BYTES: Final = 64 << 10
_HANDSHAKE_RECEIVE_BYTES: Final = 4 << 10
"""Size in bytes of the receive buffer until the other side is known, since there may be many strangers."""
_RELEASE_SECONDS: Final = 0.001
"""Seconds after which the loop checks again whether the reading thread has left."""


class StreamConnection:
    """Frames over a stream of bytes, which it owns.

    Methods that send and flush, and those for the inline reader, may be called from any thread, all others on
    the loop's thread only. Arguments are as for ``WriteQueue``.

    Args:
        over_network: whether it may lead over a network, where several connections may have a higher
            throughput than one.
        kept_by_kernel: maximum number of received bytes that the kernel keeps once both sides know each
            other; 0 leaves it to the kernel, as bulk streams do.
    """

    owner: ConnectionOwner
    scheme = ""

    def __init__(
        self,
        context: TransportContext,
        stream: ByteStream,
        description: str,
        captured_bytes: int = CAPTURE_ALL,
        *,
        over_network: bool = False,
        kept_by_kernel: int = 0,
    ) -> None:
        self._kept_by_kernel = kept_by_kernel
        self._loop = loop = context.loop
        self._stream = stream
        self._decoder = decoder = Decoder(_HANDSHAKE_FRAME_BYTES, _HANDSHAKE_RECEIVE_BYTES)
        decoder.arriving.find_target = self._find_target
        self._descriptor = stream.descriptor
        self._scratch: ReceiveBuffer | None = None
        self.reader: InlineReader | None = None
        if self._descriptor is not None:
            self._scratch = ReceiveBuffer(decoder.scratch)
            self.reader = InlineReader(self, self._descriptor, decoder, self._scratch, context.spinners)
        self._queue = WriteQueue(
            loop,
            self._stream,
            description,
            context.send_queue_bytes,
            captured_bytes,
            before_waiting=self.reader.leave if self.reader else int,
            failed=self._write_failed,
            emptied=self._finished,
        )
        self._tell_loop = self._queue.tell_loop
        self.send, self.send_small, self.flush = self._queue.send, self._queue.send_small, self._queue.drain
        self.send_unnumbered, self.carry = self._queue.send_unnumbered, self._queue.carry
        self.remains = self._queue.remains
        self.malformed = False
        self.over_network = over_network
        self.received_anything = False
        self.process: int | None = None
        self._open = True
        self._closing: str | None = None
        self._watched_by_epoll = False

    @property
    def queued_bytes(self) -> int:
        """Number of bytes that have not been written yet."""
        return self._queue.queued_bytes

    @property
    def description(self) -> str:
        return self._queue.description

    @description.setter
    def description(self, description: str) -> None:
        self._queue.description = description

    def start(self, owner: ConnectionOwner) -> None:
        """Start to receive, and send the preamble."""
        self.owner = owner
        self._stream.on_readable(self._readable)
        self.send_unnumbered(PREAMBLE)

    def set_frame_limits(self, received: int, sent: int) -> None:
        if self._kept_by_kernel and isinstance(self._stream, DescriptorStream):
            with contextlib.suppress(OSError):  # it has just broken
                self._stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._kept_by_kernel)
        self._decoder.max_frame_bytes = received
        self._decoder.grow()
        if self._scratch is not None:
            self._scratch = ReceiveBuffer(self._decoder.scratch)
        if self.reader is not None and self._scratch is not None:
            self.reader.buffer = self._scratch
        self._queue.outgoing.max_bytes = sent

    @property
    def arriving(self) -> Reassembly:
        """Reassembles large messages, also those that arrive on bulk streams."""
        return self._decoder.arriving

    @property
    def has_streams(self) -> bool:
        return self._queue.streams is not None

    def send_large_by(self, streams: Streams) -> None:
        """Send the largest messages over bulk streams from now on."""
        self._queue.streams = streams

    def detach(self) -> BulkSocket:
        """Stop, between two frames, and return the socket. Raises ``ProtocolError`` if there is no socket, or
        the other side has sent more than expected.
        """
        stream = self._stream
        if not self._open or not isinstance(stream, DescriptorStream):
            raise ProtocolError("a bulk stream over a connection that cannot be one")
        if self._queue or not self._decoder.is_between_frames():
            raise ProtocolError("a bulk stream that begins before it is let in")
        stream.on_readable(None)
        with self._queue.lock:
            self._open = False
            self._queue.close()
            if self.reader is not None:
                self.reader.closed = True
                self.reader.close()
        return bulk_socket(stream.socket)

    def _find_target(self, kind: int, call_id: int, sizes: Sequence[int]) -> Target | None:
        return self.owner.find_target(kind, call_id, sizes)

    @property
    def is_quiet(self) -> bool:
        return self.reader is None or not self.reader.is_read_by_thread()

    # ---- receiving, on the loop's thread

    def _readable(self) -> bool:
        """Receive what has arrived; returns whether there may be more, which is left for the next call."""
        return self._read() if self.reader is None else self.reader.read_on_loop(self._read)

    def _read(self) -> bool:
        """Receive for a while; returns whether there may be more."""
        received = 0
        for _ in range(_READS_PER_WAKE_UP):
            count, capacity = self._receive()
            if not count:
                return False
            self.received_anything = True
            if not self._decode(count):
                return False
            if count < capacity and self._watched_by_epoll:
                return False
            received += count
            if received >= _BYTES_PER_WAKE_UP:
                break
        if not self._watched_by_epoll:
            self._loop.call_soon(self._read_on)
        return self._open

    def _read_on(self) -> None:
        """Go on reading, if the stream is open. If the loop watches the socket itself, it reads until the
        kernel reports that there is no more: the kernel reports a reset that arrives with data only once, and
        uvloop stops watching then.
        """
        if self._open:
            self._readable()

    def _receive(self) -> tuple[int, int]:
        """Receive once. Returns the number of bytes and the capacity; the number is 0 if there are none now,
        or the stream has ended and is closed.
        """
        decoder = self._decoder
        offset = decoder.scratch_offset
        if not self._open:
            return 0, 0
        try:
            if offset >= 0 and self._scratch is not None and self._descriptor is not None:
                capacity = decoder.scratch_end - offset
                received = self._scratch.receive(self._descriptor, offset, capacity)
            else:
                message = decoder.message
                with contextlib.nullcontext() if message is None else message.writing():
                    buffers = decoder.buffers()
                    received, capacity = self._stream.read_into(buffers), len(buffers[0])
        except OSError as error:
            self.malformed = isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError)
            self.close(self._why_ended(error))
            return 0, 0
        if received == 0:
            # The kernel may have reported the reason to the writing thread.
            self.close(self._why_ended(self._queue.error))
        return received or 0, capacity

    def _why_ended(self, error: OSError | None) -> str:
        """Return why the stream has ended. Within a host only the other side resets the connection of a
        socket, which happens if it closes without having read everything.
        """
        within_host = self._stream.descriptor is not None and not self.over_network
        end = (errno.EPIPE, errno.ECONNRESET) if within_host else (errno.EPIPE,)
        if isinstance(error, ssl.SSLError):
            return f"the connection broke: {why_no_tls(error)}"
        if error is None or error.errno in end:
            return CLOSED_BY_PEER
        return f"the connection broke: {error.strerror or error}"

    def _decode(self, count: int) -> bool:
        """Decode and dispatch what was received; returns whether it is well-formed."""
        while True:
            try:
                frames = self._decoder.received(count)
            except (ProtocolError, MemoryError) as error:  # without memory, the message is sent again later
                self.malformed = is_violation(error)
                self.close(str(error) or "there is no memory for what arrives")
                return False
            if frames:
                self.owner.frames_received(self, frames)
            if not self._decoder.postponed or not self._open:
                return True
            count = 0

    def _deliver(self, frames: list[Frame]) -> None:
        if self._open and frames:
            self.owner.frames_received(self, frames)

    # ---- what the inline reader needs: any thread

    def prepare_soon(self) -> None:
        self._tell_loop(self._prepare)

    def _prepare(self) -> None:
        if self._open and self.reader is not None and self.reader.prepare():
            self._stream.on_readable(None)
            self._loop.add_reader(self.reader.watched(), self._readable)
            self._watched_by_epoll = True

    def read_by_loop(self, turn: Turn) -> None:
        assert self.reader is not None
        self._tell_loop(self.reader.take_over, turn, self._decode, self._deliver)

    def deliver_soon(self, frames: list[Frame]) -> None:
        self._tell_loop(self._deliver, frames)

    def dispose(self) -> None:
        with self._queue.lock:
            self._close_descriptors()

    # ---- the end: the loop's thread

    def _close_descriptors(self) -> None:
        """Close the descriptors. With the send lock, when the connection is closed and no thread reads."""
        self._stream.close()
        if self.reader is not None:
            self.reader.close()

    def _write_failed(self) -> None:
        if self.reader is not None and self._open and self.reader.is_read_by_thread():
            self.reader.wake()
            self._loop.call_later(_RELEASE_SECONDS, self._write_failed)
            return
        if self._readable():
            self._loop.call_soon(self._write_failed)  # once what has arrived meanwhile is handled
        elif self._open:
            error = self._queue.error
            self.close(f"the connection broke: {error.strerror if error else 'unknown'}")

    def _finished(self) -> None:
        if self._closing is not None:
            self.close(self._closing)

    def close(self, reason: str, *, flush: bool = False) -> None:
        if not self._open:
            return
        if flush and self._queue.finish():
            self._closing = reason
            return
        self._stream.on_readable(None)
        if self._watched_by_epoll and self.reader is not None:
            self._loop.remove_reader(self.reader.watched())
        with self._queue.lock:
            self._open = False
            dropped = self._queue.close()
            if self.reader is not None:
                self.reader.closed = True
            if self.reader is None or self.reader.take_lease():
                self._close_descriptors()
            else:  # the reading thread notices, and closes them when it has left
                self._stream.shut_down()
        del dropped  # without the lock, as this may run code of the user's
        self._decoder.clear()  # the rest of the connection may live until garbage is collected
        self.owner.connection_lost(self, reason)

    def abandon(self) -> None:
        self._open = False
        self._queue.abandon()
        if self.reader is not None:
            self.reader.closed = True
            self.reader.close()
        self._stream.abandon()
