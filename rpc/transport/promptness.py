"""Whether what a thread waits for mostly comes so soon that it had better look for it than sleep. Pure."""

from __future__ import annotations

from typing import Final

__all__ = ["Promptness"]

_MOST: Final = 3
_EXPECTED_FROM: Final = 2


class Promptness:
    """Foretells from the last waits whether the next one is short.

    A two-bit saturating counter, as processors have to foretell branches (J. E. Smith, *A study of branch
    prediction strategies*, 1981): one wait that is unlike the others does not change what is expected.

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
        elif self._score > 0:
            self._score -= 1
        self.expected = self._score >= _EXPECTED_FROM
