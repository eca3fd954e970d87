"""What goes out: messages, and the answers to requests.

A message goes out as one small frame, through memory that both workers share, or as its buffers lie,
whichever suits its size and its receiver. A request whose value cannot be sent is answered by the error that
says why, and an error that is too large is described: who waits for an answer gets one.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from torch import Tensor

from rpc.agent.ports import Sending
from rpc.agent.tape import Recording, note
from rpc.errors import ProtocolError, SerializationError, WorkerLostError
from rpc.group.connections import SMALL_FRAME_BYTES
from rpc.group.peer import Peer
from rpc.runtime.events import MessageSent, RequestEnded
from rpc.runtime.interrupts import protected
from rpc.serialization.codecs import PICKLE
from rpc.serialization.exceptions import text_of
from rpc.serialization.payload import Payload
from rpc.transport.base import INFINITE, SMALL_BYTES
from rpc.wire.frames import Kind, encode, encode_small

__all__ = ["Outbox"]

logger = logging.getLogger(__name__)

_FEW: Final = 4
"""A header of more entries is not taken to be small."""


class Outbox:
    """Sends the messages of one agent, from any thread. The agent lends its methods."""

    def __init__(self, agent: Sending) -> None:
        self._agent = agent

    @protected
    def send(
        self,
        peer: Peer,
        kind: int,
        call_id: int,
        payload: Payload,
        *,
        wait: float = INFINITE,
        coalesce: bool = False,
    ) -> None:
        """Send one message; if that fails, what travels beside its buffers is taken back.

        An exception that is larger than what the peer accepts goes out as its description alone.

        Args:
            wait: seconds to wait at most while too much is queued for that peer.
            coalesce: see ``Connection.send_small``.
        """
        header, buffers = payload.header, payload.buffers
        count = len(buffers)
        events = self._agent.events
        if events.message_sent:
            events.tell(events.message_sent, MessageSent(peer.name, kind, sum(map(len, buffers))))
        try:
            if not count or (count == 1 and len(buffers[0]) <= SMALL_BYTES and len(header) <= _FEW):
                frame = encode_small(kind, call_id, header, buffers, payload.codec)
                if len(frame) > SMALL_FRAME_BYTES:
                    _check_size(len(frame), peer)
                peer.send_small(frame, wait, coalesce=coalesce)
            elif count == 1 or not self._agent.share(peer, kind, call_id, payload, wait):
                pieces, size = encode(kind, call_id, header, buffers, payload.codec)
                _check_size(size, peer)
                aliased = count > 1  # others may be the caller's own memory
                peer.send(pieces, size, aliased=aliased, wait=wait)
                self._agent.striping.consider(peer, size)
        except BaseException as error:
            self._agent.serializer.take_back(header, peer)
            if "!" not in header or not isinstance(error, SerializationError | ProtocolError):
                raise
            described = self._agent.serializer.without_exception(header, error)
            self.send(peer, kind, call_id, described, wait=wait, coalesce=coalesce)

    def reply(
        self,
        peer: Peer,
        call_id: int,
        value: Any,
        of: object = None,
        recording: Recording | None = None,
        codec: int = PICKLE,
    ) -> None:
        """Answer a request with a value; if it cannot be sent, with that error.

        Args:
            of: the function whose value it is, or a text, for error messages.
            recording: what the request is noted in.
            codec: that of the request.
        """
        try:
            payload = self.dump_reply(peer, value, of, recording, codec)
        except BaseException as error:
            self.fail(peer, call_id, error)
        else:
            self.answer(peer, Kind.REPLY, call_id, payload)

    def dump_reply(
        self, peer: Peer, value: Any, of: object, recording: Recording | None, codec: int = PICKLE
    ) -> Payload:
        """Serialize the value with which a request is answered; arguments are as for ``reply``.

        Args:
            codec: that of the request.
        """
        serializer = self._agent.serializer.codecs[codec]
        tape = self._agent.tape
        if tape is None or recording is None:
            return serializer.dumps(value, peer, what=of)
        tensors: list[Tensor] = []
        payload = serializer.dumps(value, peer, what=of, tracked=tensors)
        if tensors:
            note(tape, recording, tensors, payload.header, peer)
        return payload

    def fail(self, peer: Peer, call_id: int, error: BaseException) -> None:
        """Answer a request with an exception."""
        text = text_of(error)
        logger.warning("a call from worker '%s' raised %s: %s", peer.name, type(error).__name__, text)
        payload = self._agent.serializer.dump_exception(error, self._agent.info.name, peer)
        self.answer(peer, Kind.FAILURE, call_id, payload)

    def answer(self, peer: Peer, kind: int, call_id: int, payload: Payload) -> None:
        """Answer a request by a message made already."""
        events = self._agent.events
        try:
            self.send(peer, kind, call_id, payload)
            if events.request_ended:
                ended = RequestEnded(peer.name, call_id, failed=kind == Kind.FAILURE)
                events.tell(events.request_ended, ended)
        except WorkerLostError as error:
            # Nobody is left to be answered, which is no failure of this worker.
            logger.debug("dropped an answer: %s", error)
        except Exception as error:
            if kind == Kind.FAILURE:
                logger.exception("could not even send a failure to worker '%s'", peer.name)
                raise
            self.fail(peer, call_id, error)


def _check_size(size: int, peer: Peer) -> None:
    if size > peer.member.max_message_bytes:
        raise SerializationError(
            f"a message of {size} bytes to worker '{peer.name}' is over the limit of "
            f"{peer.member.max_message_bytes} that it accepts: raise max_message_bytes in its options"
        )
