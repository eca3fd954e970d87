"""Whether something that may or may not pay is worth another try. Pure."""

from __future__ import annotations

from typing import Final

__all__ = ["Trial"]

_FIRST_PENALTY: Final = 4
_LONGEST_PENALTY: Final = 256


class Trial:
    """Something that is tried as long as it pays: after each failure it is left alone for longer.

    An update that is lost, since another thread made one at the same time, does no harm.

    Example::

        if trial.invites():
            trial.was_of_use() if attempt() else trial.was_in_vain()
    """

    __slots__ = ("_penalty", "_refusals")

    def __init__(self) -> None:
        self._penalty = 0
        self._refusals = 0

    def invites(self) -> bool:
        """Whether to try; each refusal counts down."""
        if self._refusals <= 0:
            return True
        self._refusals -= 1
        return False

    def was_of_use(self) -> None:
        """It has paid: the next failure costs less."""
        self._penalty //= 2

    def was_in_vain(self) -> None:
        """It has not paid: leave it alone for a while."""
        self._penalty = min(_LONGEST_PENALTY, max(_FIRST_PENALTY, 2 * self._penalty))
        self._refusals = self._penalty
