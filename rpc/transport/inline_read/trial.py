"""Whether something that may or may not pay is worth another try. Pure."""

from __future__ import annotations

from typing import Final

__all__ = ["Trial"]

_FIRST_PENALTY: Final = 4
_LONGEST_PENALTY: Final = 256


class Trial:
    """Something that is tried as long as it pays: after each failure it is left alone for longer.

    Attributes:
        rests: how often it is still to be left alone; while 0, ``invites`` need not be asked.
        penalty: how often the last failure made it rest; while 0, ``was_of_use`` changes nothing.

    An update that is lost, since another thread made one at the same time, does no harm.

    Example::

        if trial.invites():
            trial.was_of_use() if attempt() else trial.was_in_vain()
    """

    __slots__ = ("penalty", "rests")

    def __init__(self) -> None:
        self.penalty = 0
        self.rests = 0

    def invites(self) -> bool:
        """Whether to try; each refusal counts down."""
        if self.rests <= 0:
            return True
        self.rests -= 1
        return False

    def was_of_use(self) -> None:
        """It has paid: the next failure costs less."""
        self.penalty //= 2

    def was_in_vain(self) -> None:
        """It has not paid: leave it alone for a while."""
        self.penalty = min(_LONGEST_PENALTY, max(_FIRST_PENALTY, 2 * self.penalty))
        self.rests = self.penalty
