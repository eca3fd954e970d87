"""Ranks as threads of one process, and messages between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar

from rpc.bulk.copying import scatter

T = TypeVar("T")

_PATIENCE = 20.0
_PART_BYTES = 24_000


def in_threads(size: int, body: Callable[[int], T]) -> list[T]:
    """What ``body(rank)`` returns for each rank, run at the same time. What one raises is raised."""
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "ranks wait for each other"
    return results


class _Sent:
    """A message that is read where it lies, when its receiver comes for it."""

    def __init__(self, buffers: Sequence[Any], *, late: bool) -> None:
        self._buffers = buffers
        self._may_be_read, self._was_read = threading.Event(), threading.Event()
        if not late:
            self._may_be_read.set()

    def read(self) -> bytes:
        assert self._may_be_read.wait(_PATIENCE), "the sender never waits until its message has arrived"
        data = b"".join(self._buffers)
        self._was_read.set()
        return data

    def wait(self, timeout: float | None = None) -> list[memoryview]:
        self._may_be_read.set()
        assert self._was_read.wait(_PATIENCE), "nobody receives it"
        return []

    def cancel(self, reason: str = "") -> bool:
        return False

    def done(self) -> bool:
        return self._was_read.is_set()


class _Posted:
    def __init__(
        self, queue: SimpleQueue[_Sent], into: Sequence[memoryview] | None, merge: Any = None
    ) -> None:
        self._queue, self._into, self._merge = queue, into, merge

    def wait(self, timeout: float | None = None) -> list[memoryview]:
        data = memoryview(bytearray(self._queue.get(timeout=_PATIENCE).read()))
        if self._into is None:
            return [data]
        assert sum(map(len, self._into)) == len(data)
        if self._merge is None:
            scatter([data], self._into)
        else:  # in parts, as they arrive on several streams
            for begin in reversed(range(0, len(data), _PART_BYTES)):
                self._merge(begin, data[begin : begin + _PART_BYTES])
        return list(self._into)

    def cancel(self, reason: str = "") -> bool:
        return True

    def done(self) -> bool:
        return not self._queue.empty()


class Network:
    """Channels between ranks.

    Args:
        size: how many ranks.
        late: ranks whose messages are not read before they wait for them to arrive.
    """

    def __init__(self, size: int, late: Sequence[int] = ()) -> None:
        self._queues: dict[tuple[int, int], SimpleQueue[_Sent]] = {
            (source, to): SimpleQueue() for source in range(size) for to in range(size)
        }
        self._late = late

    def channel(self, rank: int) -> _Channel:
        """That of one rank."""
        return _Channel(self, rank)

    def is_empty(self) -> bool:
        """Whether all that was sent was received."""
        return all(queue.empty() for queue in self._queues.values())

    def send(self, source: int, to: int, buffers: Sequence[Any]) -> _Sent:
        message = _Sent(buffers, late=source in self._late)
        self._queues[source, to].put(message)
        return message

    def post(self, source: int, to: int, into: Sequence[memoryview] | None, merge: Any) -> _Posted:
        return _Posted(self._queues[source, to], into, merge)


class _Channel:
    def __init__(self, network: Network, rank: int) -> None:
        self._network, self._rank = network, rank

    def send(self, rank: int, buffers: list[Any]) -> _Sent:
        return self._network.send(self._rank, rank, buffers)

    def post(self, rank: int, into: Any, size: int, merge: Any) -> _Posted:
        return self._network.post(rank, self._rank, into, merge)
