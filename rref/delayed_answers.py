"""Answers to creations. No thread waits for them: they are sent with the answer to a fetch, or
shortly after.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque

from rpc.agent.hooks import Hooks
from rpc.errors import WorkerLostError
from rpc.group.peer import Peer
from rpc.runtime.mailbox import Mailbox
from rpc.wire.frames import Kind, encode_small

__all__ = ["DelayedAnswers"]

logger = logging.getLogger(__name__)


class DelayedAnswers:
    """The answers that an owner has yet to send to the creators of its objects. From any thread."""

    def __init__(self, mailbox: Mailbox, hooks: Hooks) -> None:
        self._mailbox = mailbox
        self._delayed: dict[Peer, deque[bytes]] = {}
        hooks.gone.append(self._peer_gone)

    def add(self, peer: Peer, call_id: int) -> None:
        """Queue the answer to a creation by ``peer``; it is sent soon."""
        delayed = self._delayed.get(peer)
        if delayed is None:
            delayed = self._delayed.setdefault(peer, deque())
        delayed.append(encode_small(Kind.REPLY, call_id, {}, peer.codec.nothing, peer.codec.id))
        self._mailbox.gathered(self.send, peer)

    def send(self, peer: Peer, frame: bytes = b"", wait: float = 0) -> None:
        """Send ``peer`` the answers that were delayed, followed by ``frame``, at once.

        Args:
            frame: at most 64 KiB.
            wait: maximum time in seconds to wait while the send queue for that peer is full.
        """
        delayed = self._delayed.get(peer)
        try:
            with contextlib.suppress(IndexError):  # another thread may be sending them
                while delayed:
                    peer.send_small(delayed.popleft(), 0, coalesce=True)
            if frame:
                peer.send_small(frame, wait)  # together with the answers collected above
            else:
                peer.flush()
        except WorkerLostError as error:
            logger.debug("dropped answers: %s", error)

    def _peer_gone(self, peer: Peer, reason: str) -> None:
        self._delayed.pop(peer, None)
