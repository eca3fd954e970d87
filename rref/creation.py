"""The call by which ``remote`` creates an object on another worker, seen from the creator's side.

Its answer comes in a message of its own, or with the answer to the first fetch of the object.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from rpc.agent.calls import CallTable, PendingCall
from rpc.agent.futures import Future
from rpc.errors import RpcTimeoutError, RRefError
from rpc.group.peer import Peer
from rpc.runtime.tasks import Task
from rpc.wire.frames import Frame, Kind
from rref.requests import fetched_with_creation

__all__ = ["Creation", "created_and_fetched"]


class Creation(PendingCall):
    """A creation under way. Its answer is reported to the protocol on whichever thread reads it.

    When the timeout expires, the creation fails but keeps its place in the table of calls, because a late
    answer from the owner must still reach the protocol.

    Attributes:
        error: why it failed, or None.
    """

    keeps_place = True

    __slots__ = ("_ended", "_making", "error")

    def begin(self, ended: Callable[[str | None], object], making: AbstractContextManager[Any]) -> None:
        """Set what is called at its end; before the call is sent.

        Args:
            ended: called with None when the owner has answered, or with the reason why that has failed.
            making: lock that is held while the future of a creation is made.
        """
        self._ended = ended
        self._making = making
        self.error: BaseException | None = None
        self.what = self.asked  # the user's function must not be destroyed on the loop's thread

    def settle(self, outcome: Frame | BaseException) -> bool:
        if isinstance(outcome, BaseException):
            self.error = outcome
            self._ended(f"its creation failed: {outcome}")
        elif "refused" in outcome.header:
            self._ended(str(outcome.header["refused"]))
        else:
            self._ended(None)
        if self.awaited.outcome is not None:
            return False  # it had timed out, and the waiting threads know
        unattended = super().settle(outcome)
        self.holds = None
        return unattended

    def hold(self, reference: object) -> None:
        """Keep a reference until the creation has ended."""
        self.holds = reference
        if self.outcome is not None:  # set by another thread, which may have checked before
            self.holds = None

    def abandon(self, error: BaseException) -> None:
        self.error = error
        super().abandon(error)

    def expired(self) -> bool:
        self.deadline = float("inf")
        return super().expired()

    def future_of_end(self) -> Future[None]:
        """Return the future of the creation's end; the same one each time."""
        with self._making:  # one thread makes it, the others find it
            found: Future[None] | None = self.future
            future = found or Future.to_complete(self)
        if found is None and self.outcome is not None:
            self.table.complete_soon(future)
        return future

    def check(self) -> None:
        """Raise an error if the creation failed, since the reference cannot be used then.

        Raises:
            RpcTimeoutError: it was not done in time.
            RRefError: it could not be sent, or the worker is gone; its ``__cause__`` has the details.
        """
        error = self.error
        if error is not None:
            kind = RpcTimeoutError if isinstance(error, RpcTimeoutError) else RRefError
            worker = self.peer.name
            raise kind(
                f"RRef creation via rpc.remote on worker '{worker}' failed, so it cannot be used: {error}"
            ) from error


def created_and_fetched(table: CallTable, peer: Peer, frame: Frame) -> Task | None:
    """Handle a frame of kind ``FETCHED``, which answers a creation and a fetch."""
    creation_id, answer = fetched_with_creation(frame)
    codec = peer.codec
    done = table.received(peer, Frame(Kind.REPLY, creation_id, {}, list(codec.nothing), codec.id))
    if done is not None:
        table.run_soon((done,))
    return table.received(peer, answer)
