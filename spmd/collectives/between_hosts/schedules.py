"""Schedules of the messages of collectives. Pure: functions of rank, size and bytes.

A schedule is one rank's list of ``Step``s. The buffer is cut into blocks, numbered from 0. A step sends some
adjacent blocks to one rank and receives some from one rank, which replace this rank's own or are reduced into
them. A rank's steps are done in order, and the two halves of a step at once. Between two ranks the messages
of a schedule arrive in the order in which they are sent.

Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH"
(2005), for all of these; P. Patarasuk, X. Yuan, "Bandwidth Optimal All-reduce" (2009), for the ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = [
    "CHAINED_BYTES",
    "SMALL_BYTES",
    "Step",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "count_blocks",
    "count_broadcast_blocks",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]

SMALL_BYTES: Final = 64 << 10
"""Size in bytes up to which the time depends on the number of consecutive messages, and beyond which on the
bytes.
"""

CHAINED_BYTES: Final = 4 << 20
"""Maximum size in bytes of a block that a chain of ranks sends on."""

NONE: Final = range(0)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank.

    Attributes:
        to: rank that gets ``sends``; -1 if nothing is sent.
        sends: the blocks that are sent, one after the other.
        source: rank that ``takes`` come from; -1 if nothing is received.
        takes: the blocks that are received.
        reduces: whether they are reduced into this rank's own blocks, and do not replace them.
    """

    to: int = -1
    sends: range = NONE
    source: int = -1
    takes: range = NONE
    reduces: bool = False


def _largest_power(size: int) -> int:
    """Return the largest power of two that is not greater than ``size``."""
    return 1 << (size.bit_length() - 1)


def count_blocks(size: int, total: int) -> int:
    """Return the number of blocks that a buffer of ``total`` bytes is cut into, for ``all_reduce`` and
    ``broadcast``.
    """
    return 1 if total <= SMALL_BYTES else size


def all_reduce(rank: int, size: int, total: int) -> list[Step]:
    """All-reduce. Small buffers: recursive doubling. Large ones: Rabenseifner's algorithm in groups of a
    power of two, otherwise a ring.
    """
    if total <= SMALL_BYTES:
        return _recursive_doubling(rank, size)
    if _largest_power(size) == size:
        return _halving(rank, size) + _doubling(rank, size)
    return reduce_scatter(rank, size, total) + _ring_all_gather(rank, size)


def _recursive_doubling(rank: int, size: int) -> list[Step]:
    """Recursive doubling of the whole buffer, one block. Ranks beyond a power of two send theirs to another
    rank, and receive the result.
    """
    whole = range(1)
    power = _largest_power(size)
    if rank >= power:
        return [Step(to=rank - power, sends=whole), Step(source=rank - power, takes=whole)]
    extra = rank + power if rank + power < size else -1
    steps = [] if extra < 0 else [Step(source=extra, takes=whole, reduces=True)]
    distance = 1
    while distance < power:
        other = rank ^ distance
        steps.append(Step(other, whole, other, whole, reduces=True))
        distance *= 2
    if extra >= 0:
        steps.append(Step(to=extra, sends=whole))
    return steps


def _halving(rank: int, size: int) -> list[Step]:
    """Recursive halving: in the end each rank has its own block reduced. ``size`` is a power of two."""
    steps = []
    low, high = 0, size
    while high - low > 1:
        middle = (low + high) // 2
        half = middle - low
        if rank < middle:
            steps.append(
                Step(rank + half, range(middle, high), rank + half, range(low, middle), reduces=True)
            )
            high = middle
        else:
            steps.append(
                Step(rank - half, range(low, middle), rank - half, range(middle, high), reduces=True)
            )
            low = middle
    return steps


def _doubling(rank: int, size: int) -> list[Step]:
    """Recursive doubling of the block that each rank has, until each has all. ``size`` is a power of two."""
    steps = []
    distance = 1
    while distance < size:
        other = rank ^ distance
        mine = rank // distance * distance
        theirs = other // distance * distance
        steps.append(Step(other, range(mine, mine + distance), other, range(theirs, theirs + distance)))
        distance *= 2
    return steps


def reduce_scatter(rank: int, size: int, total: int) -> list[Step]:
    """Reduce-scatter: in the end each rank has the block of its own number reduced, by halving, or a ring."""
    if _largest_power(size) == size and total <= SMALL_BYTES * size:
        return _halving(rank, size)
    steps = []
    for step in range(size - 1):
        sends, takes = (rank - step - 1) % size, (rank - step - 2) % size
        steps.append(
            Step(
                (rank + 1) % size,
                range(sends, sends + 1),
                (rank - 1) % size,
                range(takes, takes + 1),
                reduces=True,
            )
        )
    return steps


def all_gather(rank: int, size: int, total: int) -> list[Step]:
    """All-gather: each rank has the block of its own number, and in the end all. Blocks may differ in
    size.
    """
    if _largest_power(size) == size and total <= SMALL_BYTES * size:
        return _doubling(rank, size)
    return _ring_all_gather(rank, size)


def _ring_all_gather(rank: int, size: int) -> list[Step]:
    steps = []
    for step in range(size - 1):
        sends, takes = (rank - step) % size, (rank - step - 1) % size
        steps.append(
            Step((rank + 1) % size, range(sends, sends + 1), (rank - 1) % size, range(takes, takes + 1))
        )
    return steps


def broadcast(rank: int, size: int, total: int, root: int) -> list[Step]:
    """Broadcast. Small buffers: a binomial tree. Large ones: the root sends one block to each rank, then all
    gather. The largest: a chain, whose ranks send each block on while they receive the next.
    """
    if total <= SMALL_BYTES or size <= 2:
        return _tree(rank, size, root, range(count_broadcast_blocks(size, total)))
    if _is_chained(size, total):
        return _chain(rank, size, root, count_broadcast_blocks(size, total))
    return scatter(rank, size, root) + _ring_all_gather(rank, size)


def count_broadcast_blocks(size: int, total: int) -> int:
    """Return the number of blocks that a buffer of ``total`` bytes is cut into for ``broadcast``."""
    return -(-total // CHAINED_BYTES) if _is_chained(size, total) else count_blocks(size, total)


def _is_chained(size: int, total: int) -> bool:
    """Return whether a chain is the fastest: it takes the time of all blocks, and of one more for each rank
    between the first and the last. To scatter and gather takes that of nearly twice all bytes.
    """
    return size > 2 and total >= size * CHAINED_BYTES


def _chain(rank: int, size: int, root: int, count: int) -> list[Step]:
    place = (rank - root) % size
    before, after = (rank - 1) % size, (rank + 1) % size
    steps = []
    for sent in range(-1, count):  # together with the block after it
        to = after if sent >= 0 and place < size - 1 else -1
        source = before if sent + 1 < count and place else -1
        if to >= 0 or source >= 0:
            sends, takes = range(sent, sent + 1), range(sent + 1, sent + 2)
            steps.append(Step(to, sends if to >= 0 else NONE, source, takes if source >= 0 else NONE))
    return steps


def _tree(rank: int, size: int, root: int, whole: range) -> list[Step]:
    place = (rank - root) % size
    steps = []
    distance = _largest_power(2 * size - 1)
    if place:
        distance = place & -place
        steps.append(Step(source=(place - distance + root) % size, takes=whole))
    distance //= 2
    while distance:
        if place + distance < size:
            steps.append(Step(to=(place + distance + root) % size, sends=whole))
        distance //= 2
    return steps


def reduce(rank: int, size: int, root: int) -> list[Step]:
    """Reduce the whole buffer, one block, to ``root``: a binomial tree from its leaves."""
    return [
        Step(step.source, step.takes, step.to, step.sends, reduces=step.to >= 0)
        for step in reversed(_tree(rank, size, root, range(1)))
    ]


def all_to_all(rank: int, size: int) -> list[Step]:
    """All-to-all: blocks 0 to ``size - 1`` are sent to the ranks, those from ``size`` on come from them:
    pairwise.
    """
    steps = []
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        steps.append(Step(to, range(to, to + 1), source, range(size + source, size + source + 1)))
    return steps


def gather(rank: int, size: int, root: int) -> list[Step]:
    """Gather: each rank's block goes to ``root``. A tree would not help, since the root must receive all
    bytes in any case.
    """
    if rank != root:
        return [Step(to=root, sends=range(rank, rank + 1))]
    return [Step(source=each, takes=range(each, each + 1)) for each in range(size) if each != root]


def scatter(rank: int, size: int, root: int) -> list[Step]:
    """Scatter: the reverse of ``gather``."""
    return [Step(each.source, each.takes, each.to, each.sends) for each in gather(rank, size, root)]


def barrier(rank: int, size: int) -> list[Step]:
    """Barrier, without blocks: no rank is through before all have begun (dissemination)."""
    steps = []
    distance = 1
    while distance < size:
        steps.append(Step(to=(rank + distance) % size, source=(rank - distance) % size))
        distance *= 2
    return steps
