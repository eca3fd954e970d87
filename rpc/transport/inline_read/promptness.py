"""Whether what a thread waits for mostly comes so soon that it had better look for it than sleep. Pure."""

from __future__ import annotations

from typing import Final

__all__ = ["Promptness"]

_MOST: Final = 6
_EXPECTED_FROM: Final = 3
_LONG_COSTS: Final = 3


class Promptness:
    """Foretells from the last waits whether the next one is short.

    A saturating counter, as processors have to foretell branches (J. E. Smith, *A study of branch prediction
    strategies*, 1981). To look in vain costs more than to look with success saves, so a long wait counts as
    much as three short ones: where waits are short and long in turn, none is expected to be short.

    Attributes:
        expected: whether the next wait is expected to be short.

    An update that is lost, since another thread made one at the same time, does no harm.

    Example::

        if promptness.expected:
            look()
        promptness.note(waited <= seconds)
    """

    __slots__ = ("_score", "expected")

    def __init__(self) -> None:
        self._score = _EXPECTED_FROM
        self.expected = True

    def note(self, was_short: bool) -> None:
        """A wait is over, whether the thread has looked or slept."""
        if was_short:
            if self._score < _MOST:
                self._score += 1
        else:
            self._score = max(0, self._score - _LONG_COSTS)
        self.expected = self._score >= _EXPECTED_FROM
