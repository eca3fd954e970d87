"""Memory that all ranks of a host map, and the protocol of its use.

Each rank has one *word* and a few *slots*. All ranks go through the same *rounds*, numbered from 1. In round
n a rank fills its slot ``n % SLOTS``, then writes n to its word, and reads another rank's slot of round n
once the word of that rank has reached n. Ranks do not report that they have read a slot; it follows from the
order of the rounds. Suppose that every rank, before it fills round n, has waited for all others to publish
round n - a, and that a rank that publishes round n has read all of round n - b and earlier. Then nothing that
is still to be read is overwritten if a + b <= ``SLOTS``. ``local.py`` has the algorithms: a = 1, b = 2 for
exchanges, a = b = 3 for a reduction whose result goes to all.

Each word is written by one process. The processor orders words and data: x86 keeps the order of stores;
elsewhere the system call in ``publish`` orders them.

A waiting rank polls the word for a moment, and then sleeps in the kernel until it changes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from time import monotonic, perf_counter
from typing import Final

import torch

from rpc.bulk.shared_memory.memory import Mapping
from rpc.runtime.blocking import INFINITE
from rpc.runtime.interrupts import interruptible
from spmd.collectives.errors import RanksMissingError
from spmd.collectives.one_host import futex

__all__ = ["SLOTS", "SLOT_BYTES", "Board", "board_bytes"]

SLOTS: Final = 6

SLOT_BYTES: Final = 512 << 10
"""Size in bytes of a slot's data: large enough that the synchronization costs little beside the copies, small
enough to stay in caches.
"""

_LINE: Final = 128  # a word has a pair of cache lines for itself
_WORD: Final = 4
_MODULUS: Final = 1 << 32
_SPIN_SECONDS: Final = 40e-6
_SLEEP_SECONDS: Final = 0.1  # then it checks whether the group has failed


def _align(size: int) -> int:
    return -(-size // _LINE) * _LINE


def board_bytes(size: int, header_bytes: int) -> int:
    """Return the size in bytes of the board of ``size`` ranks. Pages that are never used are never
    allocated.
    """
    return size * _LINE + size * SLOTS * (_align(header_bytes) + SLOT_BYTES)


class Board:
    """One rank's view of the shared memory. One thread at a time.

    Args:
        mapping: memory of at least ``board_bytes`` bytes, all zero at first.
        ranks: the ranks that share it, as ``check`` and errors name them. In this class they are numbered by
            position.
        rank: position of this rank.
        header_bytes: size in bytes of each slot's header, before its data.
        check: called with the one of ``ranks`` that is awaited; raises if that will not come.

    Attributes:
        round: the last round that this rank has published.
    """

    def __init__(
        self,
        mapping: Mapping,
        ranks: Sequence[int],
        rank: int,
        header_bytes: int,
        check: Callable[[int], object],
    ) -> None:
        self.ranks = ranks
        self.rank, self.size = rank, len(ranks)
        self.round = 0
        self._mapping = mapping
        self._check = check
        self._header_bytes = _align(header_bytes)
        self._stride = self._header_bytes + SLOT_BYTES
        size = self.size
        self._slots = size * _LINE
        self._words = mapping.memory[: size * _LINE].cast("I")
        self._own = rank * _LINE // _WORD
        self._others = [(other, other * _LINE // _WORD) for other in range(size) if other != rank]
        self._spin = _SPIN_SECONDS if size <= _usable_cores() else 0.0
        self._tensors: dict[tuple[torch.dtype, int, int], torch.Tensor] = {}

    # ---- where things lie

    def _offset(self, rank: int, number: int) -> int:
        return self._slots + (rank * SLOTS + number % SLOTS) * self._stride

    def header(self, rank: int, number: int) -> memoryview:
        """Return the header of a rank's slot in a round."""
        offset = self._offset(rank, number)
        return self._mapping.memory[offset : offset + self._header_bytes]

    def address(self, rank: int, number: int) -> int:
        """Return the address of the data of a rank's slot in a round."""
        return self._mapping.address + self._offset(rank, number) + self._header_bytes

    def tensor(self, rank: int, number: int, dtype: torch.dtype) -> torch.Tensor:
        """Return all the data of a rank's slot in a round, as a one-dimensional tensor."""
        key = dtype, rank, number % SLOTS
        found = self._tensors.get(key)
        if found is None:
            offset = self._offset(rank, number) + self._header_bytes
            data = self._mapping.memory[offset : offset + SLOT_BYTES]
            found = self._tensors[key] = torch.frombuffer(data, dtype=dtype)
        return found

    # ---- taking turns

    def publish(self) -> int:
        """Publish this rank's slot of the next round, which is filled. Returns the round."""
        self.round += 1
        self._words[self._own] = self.round % _MODULUS
        futex.wake(self._mapping.address + self.rank * _LINE)
        return self.round

    def _has_come(self, word: int, number: int) -> bool:
        return (self._words[word] - number) % _MODULUS < _MODULUS // 2

    def wait_for(self, number: int, deadline: float = INFINITE) -> None:
        """Wait until all ranks have published a round.

        Raises:
            RanksMissingError: the deadline, on the monotonic clock, has passed.
            Exception: raised by ``check``.
        """
        words, low = self._words, number % _MODULUS
        for rank, word in self._others:
            if words[word] != low and not self._has_come(word, number):
                self._wait(rank, number, deadline)

    @interruptible
    def _wait(self, rank: int, number: int, deadline: float) -> None:
        word, address = rank * _LINE // _WORD, self._mapping.address + rank * _LINE
        until = perf_counter() + self._spin
        while perf_counter() < until:
            if self._has_come(word, number):
                return
        while True:
            seen = self._words[word]
            if self._has_come(word, number):
                return
            self._check_missing(number)
            left = deadline - monotonic()
            if left <= 0:
                missing = [other for other, its in self._others if not self._has_come(its, number)]
                raise RanksMissingError([self.ranks[each] for each in missing])
            futex.wait(address, seen, min(left, _SLEEP_SECONDS))

    def _check_missing(self, number: int) -> None:
        """Raise if an awaited rank will not come; checks all of them, since several may be late."""
        for rank, word in self._others:
            if not self._has_come(word, number):
                try:
                    self._check(self.ranks[rank])
                except Exception:
                    if not self._has_come(word, number):  # it may have come, and left, meanwhile
                        raise

    def wake(self) -> None:
        """Make the waiting thread call ``check``. From any thread."""
        for rank, _ in self._others:
            futex.wake(self._mapping.address + rank * _LINE)


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0))
