"""Answers to creations, which nobody waits for: they go out with the answer to a fetch, or moments later."""

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
    """What an owner has still to tell those who had it make objects. From any thread."""

    def __init__(self, mailbox: Mailbox, hooks: Hooks) -> None:
        self._mailbox = mailbox
        self._delayed: dict[Peer, deque[bytes]] = {}
        hooks.gone.append(self._peer_gone)

    def add(self, peer: Peer, call_id: int) -> None:
        """Answer a creation of ``peer`` soon."""
        delayed = self._delayed.get(peer)
        if delayed is None:
            delayed = self._delayed.setdefault(peer, deque())
        delayed.append(encode_small(Kind.REPLY, call_id, {}, peer.codec.nothing, peer.codec.id))
        self._mailbox.gathered(self.send, peer)

    def send(self, peer: Peer, frame: bytes = b"", wait: float = 0) -> None:
        """Send the answers to ``peer`` that were delayed, and behind it ``frame``, at once.

        Args:
            frame: at most 64 KiB.
            wait: seconds to wait at most while too much is queued for that peer.
        """
        delayed = self._delayed.get(peer)
        try:
            with contextlib.suppress(IndexError):  # another thread may be sending them
                while delayed:
                    peer.send_small(delayed.popleft(), 0, coalesce=True)
            if frame:
                peer.send_small(frame, wait)  # and with it what was coalesced
            else:
                peer.flush()
        except WorkerLostError as error:
            logger.debug("dropped answers: %s", error)

    def _peer_gone(self, peer: Peer, reason: str) -> None:
        self._delayed.pop(peer, None)
