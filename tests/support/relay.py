"""A proxy of TCP between workers, which a test can have reset all connections."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import Self

from tests.support.ports import reserving_port

__all__ = ["Relay"]


class Relay:
    """Listens on loopback, and passes what comes on to ``target``, a port, once that is known.

    A context manager, which ends its threads.
    """

    def __init__(self) -> None:
        self._reserved = contextlib.ExitStack()
        self.port = self._reserved.enter_context(reserving_port())
        self.target = 0
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads: list[threading.Thread] = []
        self.listen()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.refuse()
        for thread in self._threads:
            thread.join()
        self._reserved.close()

    def listen(self) -> None:
        """Accept connections, again at the same port."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._accepts = self._start(self._accept)

    def refuse(self) -> None:
        """Break all connections, and refuse further ones."""
        with contextlib.suppress(OSError):  # it does so already
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepts.join()
        self.reset()

    def reset(self) -> int:
        """Break all connections, so that both sides are told by their kernels; returns how many."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for each in pair:
                with contextlib.suppress(OSError):
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    each.shutdown(socket.SHUT_RD)  # wakes the thread that receives
                each.close()
        return len(pairs)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self.target))
                except OSError:
                    near.close()
                    continue
                self._pairs.append((near, far))
                self._start(self._pass_on, near, far)
                self._start(self._pass_on, far, near)

    def _start(self, target: object, *args: socket.socket) -> threading.Thread:
        thread = threading.Thread(target=target, args=args)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()
        return thread

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
