"""Answers to creations. No thread waits for them: the answer to the creator's first fetch of the object
answers its creation as well; without a fetch, they are sent shortly after.
"""

from __future__ import annotations

import logging
from collections import deque

from rpc.agent.hooks import Hooks
from rpc.errors import WorkerLostError
from rpc.group.peer import Peer
from rpc.runtime.mailbox import Mailbox
from rpc.serialization.payload import Payload
from rpc.wire.frames import Kind, encode_small
from rref.requests import FETCHED, name_answered

__all__ = ["DelayedAnswers"]

logger = logging.getLogger(__name__)


class DelayedAnswers:
    """The creations that an owner has run and has yet to answer. From any thread.

    Whichever thread removes a creation from the queue answers it.
    """

    def __init__(self, mailbox: Mailbox, hooks: Hooks) -> None:
        self._mailbox = mailbox
        self._delayed: dict[Peer, deque[int]] = {}
        hooks.gone.append(self._peer_gone)

    def add(self, peer: Peer, call_id: int) -> None:
        """Queue the answer to a creation by ``peer``; it is sent soon."""
        delayed = self._delayed.get(peer)
        if delayed is None:
            delayed = self._delayed.setdefault(peer, deque())
        delayed.append(call_id)
        self._mailbox.gathered(self.send, peer)

    def send(self, peer: Peer) -> None:
        """Send ``peer`` the answers that were delayed."""
        delayed = self._delayed.get(peer)
        if not delayed:  # the answers to fetches have answered them
            return
        nothing, codec = peer.codec.nothing, peer.codec.id
        try:
            while delayed:
                frame = encode_small(Kind.REPLY, delayed.popleft(), {}, nothing, codec)
                peer.send_small(frame, 0, coalesce=True)
            peer.flush()
        except IndexError:  # another thread is sending them, too
            peer.flush()
        except WorkerLostError as error:
            logger.debug("dropped answers: %s", error)

    def answer_fetch(
        self, peer: Peer, call_id: int, payload: Payload, creation: tuple[Peer, int] | None, wait: float
    ) -> None:
        """Answer a fetch; if the answer to the object's creation by the same worker is delayed, answer both
        by one message.

        Args:
            payload: one buffer of at most 64 KiB, without a header.
            creation: see ``Value``.
            wait: maximum time in seconds to wait while the send queue for that peer is full.
        """
        kind, number, created = Kind.REPLY, call_id, None
        if creation is not None and creation[0] is peer:
            try:
                self._delayed[peer].remove(creation[1])
                created = creation[1]
            except (KeyError, ValueError):  # its answer was sent before
                pass
        try:
            if created is not None:
                name_answered(payload, created, call_id)
                kind, number = FETCHED, 0
            peer.send_small(encode_small(kind, number, {}, payload.buffers, payload.codec), wait)
        except WorkerLostError as error:
            logger.debug("dropped the answer to a fetch: %s", error)
        except BaseException:
            if created is not None:  # an interruption, or no memory: the creation is answered alone
                self.add(peer, created)
            raise

    def _peer_gone(self, peer: Peer, reason: str) -> None:
        self._delayed.pop(peer, None)
