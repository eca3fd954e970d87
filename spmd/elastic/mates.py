"""The other workers of a member's replica: which of them are lost, and which attempt each begins."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from rpc.runtime.waits import waiting
from spmd.elastic.agreement import NEW, Ballot, Member, View
from spmd.elastic.losses import Losses

__all__ = ["Mates"]

_LOOK_SECONDS: Final = 0.05
_NEVER: Final[tuple[Ballot, int]] = (0, 0), NEW


def _tell_of_begin(views: Any, member: int, ballot: Ballot, step: int) -> bool:
    return bool(views.mates.begins(member, ballot, step))


class Mates:
    """The other workers of one member's replica. From any thread.

    Args:
        core: the member's part of the protocol.
        losses: knows who is lost.
        changed: the lock of ``core``.
        ask: calls a function at members, as ``Views.ask`` does.
        is_over: whether the member takes part in no attempt any more; called with ``changed`` held.
    """

    def __init__(
        self,
        core: Member,
        losses: Losses,
        changed: threading.Condition,
        ask: Callable[..., dict[int, Any]],
        is_over: Callable[[], bool],
    ) -> None:
        self._core, self._losses, self._changed = core, losses, changed
        self._ask, self._is_over = ask, is_over
        self._begun: dict[int, tuple[Ballot, int]] = {}

    def lost(self) -> list[str]:
        """Return the names of those that are lost, as this member has noticed or others have told it."""
        core = self._core
        lost = [each for each in core.replica if each in core.missing or self._losses.is_lost(each)]
        peers = [(each, self._losses.peer(each)) for each in lost]
        return [f"{each:x}" if peer is None else peer.name for each, peer in peers]

    def begin_together(self, view: View, step: int) -> bool:
        """Whether the member tries a step in a view: all workers of its replica do, or none does.

        A worker tells the others which attempt it begins, and waits until each has begun the same one, or a
        later one. Only if it is the same for all, they run the block.
        """
        mates = [each for each in self._core.replica if each != self._core.me]
        told = self._ask(mates, _tell_of_begin, self._core.me, view.ballot, step)
        mine = view.ballot, step
        with self._changed, waiting(f"its replica at step {step} of the elastic job", self.lost):
            if not all(told.values()):
                self._changed.wait(_LOOK_SECONDS)  # one has left, or is lost
                return False
            while any(self._begun.get(each, _NEVER) < mine for each in mates):
                if self._is_over() or self.lost():
                    return False
                self._changed.wait(_LOOK_SECONDS)
            return all(self._begun[each] == mine for each in mates)

    def begins(self, member: int, ballot: Ballot, step: int) -> bool:
        """Handle that another worker of the replica begins an attempt."""
        with self._changed:
            mine = (ballot[0], ballot[1]), step
            self._begun[member] = max(self._begun.get(member, mine), mine)
            self._changed.notify_all()
        return True
