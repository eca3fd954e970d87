"""A connection over a stream socket that we read and write ourselves.

``sending.py`` says who writes to it, ``write_queue.py`` how.

The socket is closed under the send lock and after its reader is removed, so that no thread can write to a
descriptor number that already belongs to somebody else's file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from typing import Final

from rpc.errors import ProtocolError
from rpc.transport import syscalls
from rpc.transport.base import CLOSED_BY_PEER, ConnectionClosed, ConnectionOwner
from rpc.transport.inline_read.reading import AVAILABLE, DirectReading
from rpc.transport.inline_read.role import LOOP, Turn
from rpc.transport.sending import CAPTURE_ALL, SendingHalf
from rpc.wire.decoder import Decoder
from rpc.wire.frames import PREAMBLE

__all__ = ["StreamConnection"]

_READS_PER_WAKE_UP: Final = 16
_BYTES_PER_WAKE_UP: Final = 256 << 10
"""How much of large messages is received before the loop looks at what else there is to do."""
_HANDSHAKE_FRAME_BYTES: Final = 64 << 10
_RELEASE_SECONDS: Final = 0.001
"""How soon to look again whether a thread that reads has left."""


class StreamConnection(SendingHalf):
    """Frames over a connected, non-blocking stream socket.

    ``send`` may be called from any thread, everything else on the loop's thread only.

    Args:
        loop: the running loop.
        sock: connected; the connection owns it from here on.
        description: names the other end in logs.
        send_queue_bytes: callers of ``send`` wait while more than this is queued.
        captured_bytes: memory of the caller's, where it is no longer than this, may change as soon as
            ``send`` returns.
    """

    owner: ConnectionOwner

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        description: str,
        send_queue_bytes: int,
        captured_bytes: int = CAPTURE_ALL,
    ) -> None:
        super().__init__(loop, sock, description, send_queue_bytes, captured_bytes)
        sock.setblocking(False)
        self._decoder = Decoder(_HANDSHAKE_FRAME_BYTES)
        self._scratch = syscalls.ReceiveBuffer(self._decoder.scratch) if syscalls.AVAILABLE else None
        self.over_network = sock.family in (socket.AF_INET, socket.AF_INET6)
        self.received_anything = False
        self.direct = DirectReading(self, self._descriptor, self._decoder) if AVAILABLE else None

    def start(self, owner: ConnectionOwner) -> None:
        """Begin to receive, and send the preamble."""
        self.owner = owner
        self._loop.add_reader(self._descriptor, self._readable)
        self.send([PREAMBLE], len(PREAMBLE), wait=False)

    def set_frame_limits(self, received: int, sent: int) -> None:
        self._decoder.max_frame_bytes = received
        self._outgoing.max_bytes = sent

    def _readable(self) -> bool:
        """Receive what there is; returns whether there may be more, which is left for the next time."""
        if self.direct is None:
            return self._read()
        if not self.direct.role.take(LOOP):
            return False  # a thread reads
        try:
            return self._read()
        finally:
            self.direct.role.leave(LOOP)

    def _read(self) -> bool:
        received = 0
        for _ in range(_READS_PER_WAKE_UP):
            if not self._open:
                return False
            decoder = self._decoder
            offset = decoder.scratch_offset
            if offset >= 0 and self._scratch is not None:
                capacity = decoder.scratch_end - offset
                count = self._scratch.receive(self._descriptor, offset, capacity)
                if count <= 0:
                    count = self._receive(decoder.buffer())
            else:
                buffer = decoder.buffer()
                capacity = len(buffer)
                count = self._receive(buffer)
            if count <= 0:
                return False
            self.received_anything = True
            if not self._decode(count) or count < capacity:
                return False
            received += count
            if received >= _BYTES_PER_WAKE_UP:
                break
        return self._open

    def _decode(self, count: int) -> bool:
        """Take in what was received; returns whether it makes sense."""
        while True:
            try:
                frames = self._decoder.received(count)
            except ProtocolError as error:
                self.close(str(error))
                return False
            if frames:
                self.owner.frames_received(self, frames)
            if not self._decoder.postponed or not self._open:
                return True
            count = 0

    def _receive(self, buffer: memoryview) -> int:
        """Receive through the socket; at the end of the stream closes and returns 0."""
        try:
            count = self._socket.recv_into(buffer)
        except (BlockingIOError, InterruptedError):
            return -1
        except OSError as error:
            self.close(f"the connection broke: {error.strerror or error}")
            return 0
        if not count:
            self.close(CLOSED_BY_PEER)
        return count

    def _wait_for_room(self, there_is_room: Callable[[], bool], patience: float) -> None:
        if self.direct is not None:
            self.direct.leave()
        super()._wait_for_room(there_is_room, patience)

    # ---- what those need who read directly: any thread

    def prepare_soon(self) -> None:
        self._tell_loop(self._prepare)

    def _prepare(self) -> None:
        if self._open and self.direct is not None and self.direct.prepare():
            self._loop.remove_reader(self._descriptor)
            self._loop.add_reader(self.direct.watched(), self._readable)

    def read_by_loop(self, turn: Turn) -> None:
        assert self.direct is not None
        self._tell_loop(self.direct.take_over, turn, self._decode)

    def dispose(self) -> None:
        with self._send_lock:
            self._close_descriptors()

    def _close_descriptors(self) -> None:
        """With the send lock, when the connection is closed and nobody reads."""
        self._socket.close()
        if self.direct is not None:
            self.direct.close()

    # ---- the end: the loop's thread

    def _write_failed(self) -> None:
        if self.direct is not None and self._open and self.direct.is_read_by_thread():
            self.direct.release()
            self._loop.call_later(_RELEASE_SECONDS, self._write_failed)
            return
        if self._readable() and not self._in_doubt:
            self._loop.call_soon(self._write_failed)  # once what came meanwhile is dealt with
        elif self._open:
            error = self._write_error
            self.close(f"the connection broke: {error.strerror if error else 'unknown'}")

    def close(self, reason: str, *, flush: bool = False) -> None:
        if not self._open:
            return
        if flush and (self._queue or self._outgoing) and self._write_error is None:
            self._closing = reason
            # Whoever empties the queue, the loop looks again when the socket is writable.
            self._loop.add_writer(self._descriptor, self._writable)
            return
        self._loop.remove_reader(self._descriptor if self.direct is None else self.direct.watched())
        self._loop.remove_writer(self._descriptor)
        with self._send_lock:
            self._open = False
            if self.direct is not None:
                self.direct.closed = True
            if self.direct is None or self.direct.role.take(LOOP):
                self._close_descriptors()
            else:  # the thread that reads notices, and closes them when it has left
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
        self._forget_queue()
        self._decoder.clear()  # the rest of the connection may live until garbage is collected
        self.owner.connection_lost(self, reason)

    def detach(self) -> socket.socket:
        if not self._open:
            raise ConnectionClosed(f"the connection to {self.description} is closed")
        if self._queue or not self._decoder.is_between_frames():
            raise ProtocolError("more has come than a frame, after which something else was to follow")
        self._loop.remove_reader(self._descriptor if self.direct is None else self.direct.watched())
        self._loop.remove_writer(self._descriptor)
        with self._send_lock:
            self._open = False
            if self.direct is not None:
                self.direct.closed = True
                self.direct.close()
            detached = socket.socket(fileno=self._socket.detach())
        detached.setblocking(False)
        return detached

    def abandon(self) -> None:
        self._open = False
        if self.direct is not None:
            self.direct.closed = True
            self.direct.close()
        descriptor = self._socket.detach()
        if descriptor >= 0:
            os.close(descriptor)
