"""The part of one worker in a backward, as a call of the root: asked for with the first gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rpc.agent.pending_call import PendingCall
from rpc.errors import WorkerLostError
from rpc.wire.frames import Frame, Kind

__all__ = ["Part"]


class Part(PendingCall):
    """A part under way; see ``rpc.agent.pending_call.PendingCall`` for who calls what.

    Attributes:
        when_settled: called when it has ended, except on the thread that waits for it.
        failure_in: what an answer says that is a failure.
        whole: all gradients for it came with the question, so it waits for nobody.
    """

    whole = False

    when_settled: Callable[[Part], None] | None = None
    failure_in: Callable[[Any, Frame], BaseException]

    def settle(self, outcome: Frame | BaseException) -> bool:
        nobody_waits = super().settle(outcome)
        when_settled = self.when_settled
        if when_settled is not None:
            when_settled(self)
        return nobody_waits

    def lost_error(self) -> WorkerLostError:
        return self.peer.lost_error("The backward cannot be finished")

    def read(self, is_over: Callable[[], bool], ask: Callable[[], object] | None = None) -> bool:
        """Wait for the answer by reading the connection on this thread, where that may be done.

        Args:
            is_over: whether there is no point in it any more. What makes it true calls ``interrupt`` then.
            ask: sends the question, which is done in any case; once it is out, the answer may come at once.

        Returns:
            Whether it has come.
        """
        connection = self.peer.connection
        direct = None if connection is None else connection.direct
        if direct is None:
            if ask is not None:
                ask()
            return False
        try:
            self.turn = direct.claim()
            if ask is not None:
                ask()
            if self.turn is None or is_over():
                direct.leave()
                return False
            return self._read_reply()
        except BaseException:
            direct.leave()
            raise
        finally:
            self.turn = None

    def interrupt(self) -> None:
        """End the reading of the thread that waits."""
        connection = self.peer.connection
        if connection is not None and connection.direct is not None:
            connection.direct.release()

    def failure(self) -> Callable[[], BaseException] | None:
        """Makes the error that it has ended with; None if it is done."""
        outcome = self.outcome
        if isinstance(outcome, BaseException):
            return lambda error=outcome: error  # type: ignore[misc]
        assert outcome is not None
        if outcome.kind == Kind.REPLY:
            return None
        frame = outcome
        return lambda: self.failure_in(self.peer, frame)

    def brought(self) -> int | None:
        """The number of the message whose gradients its answer brings, if it brings any."""
        outcome = self.outcome
        if not isinstance(outcome, Frame) or outcome.kind != Kind.REPLY:
            return None
        number = outcome.header.get("gradients")
        return number if type(number) is int else None
