"""The memory of a store: the segments that its versions use, and those that later ones will use again."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from torch import Tensor

from farcall.weights.memory import Segment
from farcall.weights.versions import Freed

__all__ = ["Segments"]


_numbers: Final = itertools.count(1)


class Segments:
    """The segments of one store. From any thread.

    Args:
        run_soon: runs functions on another thread.
    """

    def __init__(self, run_soon: Callable[[list[tuple[Any, Any]]], object]) -> None:
        self._run_soon = run_soon
        self._lock = threading.RLock()
        self._used: dict[int, Segment] = {}
        self._spare: list[Segment] = []

    @property
    def bytes(self) -> int:
        """Size of all segments in bytes."""
        with self._lock:
            return sum(each.size for each in (*self._used.values(), *self._spare))

    @property
    def live(self) -> list[int]:
        """The segments that versions use or will use again, so that others need not map them anew."""
        with self._lock:
            return [*self._used, *(each.number for each in self._spare)]

    def described(self, memory: Iterable[int]) -> list[list[Any]]:
        """Return number, size and place of segments, as other processes map them."""
        return [[number, self._used[number].size, self._used[number].place] for number in memory]

    def tensors(self, memory: Iterable[int]) -> list[Tensor]:
        """Return the bytes of segments."""
        return [self._used[number].tensor for number in memory]

    def add(self, sizes: Sequence[int]) -> list[int]:
        """Return segments of these sizes, spare ones where they fit. After an error, none is taken.

        Raises:
            NoMemoryError: there is not enough memory.
        """
        taken: list[Segment] = []
        try:
            for size in sizes:
                taken.append(self._take(size))  # noqa: PERF401  # those before an error are kept
        except BaseException:
            with self._lock:
                self._spare += taken
            raise
        with self._lock:
            self._used |= {each.number: each for each in taken}
        return [each.number for each in taken]

    def _take(self, size: int) -> Segment:
        with self._lock:
            fitting = [each for each in self._spare if size <= each.size <= size + (size >> 3)]
            if fitting:
                self._spare.remove(fitting[0])
                return fitting[0]
            closed, self._spare = self._spare, []
        _close(closed)
        return Segment(next(_numbers), size)

    def free(self, freed: Iterable[Freed], most: int) -> None:
        """Close memory that no version uses, or keep it: at most ``most`` segments, with those in use."""
        closed: list[Segment] = []
        with self._lock:
            for number, reusable in freed:
                segment = self._used.pop(number)
                (self._spare if reusable else closed).append(segment)
            while self._spare and len(self._used) + len(self._spare) > most:
                closed.append(self._spare.pop(0))
        if closed:
            self._run_soon([(_close, closed)])  # the system may take long to free it

    def close(self) -> None:
        """Release all memory."""
        with self._lock:
            closed = [*self._used.values(), *self._spare]
            self._used, self._spare = {}, []
        _close(closed)

    def abandon(self) -> None:
        """Close the descriptors in a forked child."""
        _close([*self._used.values(), *self._spare])


def _close(segments: Iterable[Segment]) -> None:
    for segment in segments:
        segment.close()
