"""The call by which ``remote`` creates an object on another worker, as its creator sees it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from rpc.agent.calls import PendingCall
from rpc.agent.futures import Future
from rpc.errors import RpcTimeoutError, RRefError
from rpc.wire.frames import Frame
from rref.protocol.messages import ForkId, RRefId

__all__ = ["Creation", "Creator"]


class Creator(Protocol):
    """Who is told how a creation ends: ``References``."""

    @property
    def futures(self) -> AbstractContextManager[Any]:
        """Held while the future of a creation is made."""

    def created(self, owner: int, rref: RRefId, fork: ForkId) -> None:
        """The owner has answered it."""

    def creation_failed(self, owner: int, rref: RRefId, fork: ForkId, reason: str) -> None:
        """It timed out, or could not be sent."""


class Creation(PendingCall):
    """A creation under way. Its answer tells the protocol that the owner has it, on whatever thread reads it.

    When its time is over it fails, but keeps its place in the table of calls: the owner's answer, if it
    comes after all, must still reach the protocol.

    Attributes:
        error: why it failed; None while it has not.
    """

    keeps_place = True

    __slots__ = ("_creator", "_fork", "_rref", "error")

    def begin(self, creator: Creator, rref: RRefId, fork: ForkId) -> None:
        """Name what is created; before the call is sent."""
        self._creator = creator
        self._rref = rref
        self._fork = fork
        self.error: BaseException | None = None
        self.what = self.asked  # a function of the user's would die on the loop's thread

    def settle(self, outcome: Frame | BaseException) -> bool:
        if isinstance(outcome, BaseException):
            self.error = outcome
            self._failed(_reason(outcome))
        elif "refused" in outcome.header:
            self._failed(str(outcome.header["refused"]))
        else:
            self._creator.created(self.peer.incarnation, self._rref, self._fork)
        if self.outcome is not None:
            return False  # it had timed out: who waited knows
        unattended = super().settle(outcome)
        self.holds = None
        return unattended

    def _failed(self, reason: str) -> None:
        self._creator.creation_failed(self.peer.incarnation, self._rref, self._fork, reason)

    def hold(self, reference: object) -> None:
        """Keep a reference until the creation has ended."""
        self.holds = reference
        if self.outcome is not None:  # on another thread, which may have looked before
            self.holds = None

    def abandon(self, error: BaseException) -> None:
        self.error = error
        super().abandon(error)

    def expired(self) -> bool:
        self.deadline = float("inf")
        return super().expired()

    def future_of_end(self) -> Future[None]:
        """A future of the creation's end; the same one each time."""
        with self._creator.futures:  # one thread makes it, others find it
            return self.future or Future.for_call(self)

    def check(self) -> None:
        """Raise if the creation failed: the reference is of no use then.

        Raises:
            RpcTimeoutError: it was not done in time.
            RRefError: it could not be sent, or the worker is gone; its ``__cause__`` says how.
        """
        error = self.error
        if error is not None:
            kind = RpcTimeoutError if isinstance(error, RpcTimeoutError) else RRefError
            worker = self.peer.name
            raise kind(
                f"RRef creation via rpc.remote on worker '{worker}' failed, so it cannot be used: {error}"
            ) from error


def _reason(error: BaseException) -> str:
    return f"its creation failed: {error}"
