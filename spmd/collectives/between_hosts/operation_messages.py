"""The messages of one collective between ranks that share no memory.

The first message of an operation from one rank to another begins with the signature of the call, so that two
ranks that have called different operations notice before any tensor is touched.
"""

from __future__ import annotations

import contextlib
import itertools
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from struct import Struct
from time import monotonic
from typing import Any, Final, Protocol
from zlib import crc32

import torch

from rpc.bulk.copying import scatter
from rpc.errors import RpcError, RpcTimeoutError, WorkerLostError
from spmd.collectives.errors import CollectiveError, CollectiveMismatchError, RankLostError, RanksMissingError
from spmd.collectives.memory import bytes_of
from spmd.collectives.signature import FIELD_BYTES, what_differs

__all__ = [
    "AHEAD",
    "TOGETHER_BYTES",
    "WHOLE_BYTES",
    "Channel",
    "Merge",
    "Message",
    "OperationMessages",
    "pack_sizes",
]

TOGETHER_BYTES: Final = 32 << 10
"""Maximum size in bytes of a first message that is sent together with the signature."""

WHOLE_BYTES: Final = 3 << 20
"""Maximum size in bytes of a step that is sent in one message. Longer ones are sent in pieces."""

AHEAD: Final = 8
"""Number of pieces that are sent before one is received, and have a place before they arrive."""

_SIZES: Final = Struct("<QQI44x")
"""Fields after the signature: the number of bytes for that rank in the first step and in all, and a checksum
of the size of each message. Padded, so that the elements of the first message are aligned.
"""

_SLICE_SECONDS: Final = 0.25
"""Maximum time in seconds of one wait, after which the thread checks whether the group has failed."""


Merge = Callable[[int, memoryview], object]
"""Merges a part of a message, at its offset: see ``Bulk.post``."""


class Message(Protocol):
    """A message in transit: ``rpc.bulk.transfer.Transfer``."""

    def wait(self, timeout: float | None = None) -> list[memoryview]: ...

    def cancel(self, reason: str = ...) -> bool: ...

    def done(self) -> bool: ...


class Channel(Protocol):
    """Sends and receives messages to and from a rank, in order."""

    def send(self, rank: int, buffers: list[Any]) -> Message: ...

    def post(self, rank: int, into: Any, size: int, merge: Merge | None) -> Message: ...


class _Expected:
    """An expected message: its size, and its place; None for memory of its own. If ``merge`` is given, it is
    merged into the place.
    """

    def __init__(self, size: int, into: list[memoryview] | None, merge: Merge | None = None) -> None:
        self.size, self.into, self.merge = size, into, merge
        self.message: Message | None = None
        """The message, once it is posted."""


class OperationMessages:
    """The messages of one operation of one rank.

    Args:
        sizes_sent, sizes_expected: results of ``pack_sizes``, by rank.
    """

    def __init__(
        self,
        channel: Channel,
        me: int,
        signature: bytes,
        deadline: float,
        check: Callable[[int], object],
        sizes_sent: Mapping[int, bytes],
        sizes_expected: Mapping[int, bytes],
    ) -> None:
        self._channel = channel
        self._sizes_sent, self._sizes_expected = sizes_sent, sizes_expected
        self._me = me
        self._signature = signature
        self._deadline = deadline
        self._check = check
        self._greeted: set[int] = set()
        self._heard: set[int] = set()
        self._sent: list[tuple[int, Message]] = []
        self._expected: dict[int, deque[_Expected]] = {}

    def send(self, rank: int, data: Sequence[memoryview]) -> None:
        """Send one message; ``data`` must not change until it has arrived."""
        size = sum(map(len, data))
        buffers = list(data)
        if rank not in self._greeted:
            self._greeted.add(rank)
            greeting = self._signature + self._sizes_sent[rank]
            if size <= TOGETHER_BYTES:
                buffers, size = [memoryview(greeting), *buffers], size + len(greeting)
            else:
                self._hand_over(rank, [greeting])
        if size:
            self._hand_over(rank, buffers)

    def _hand_over(self, rank: int, buffers: list[Any]) -> None:
        try:
            self._sent.append((rank, self._channel.send(rank, buffers)))
        except RpcError as error:
            raise self._failed(rank, error) from error

    def expect(self, rank: int, size: int, into: list[memoryview] | None, merge: Merge | None) -> None:
        """Expect one more message from a rank. Its place may be written to as soon as the rank's first
        message has arrived, since a rank does not send before the old content of the place is no longer
        needed.
        """
        self._expected.setdefault(rank, deque()).append(_Expected(size, into, merge))

    def receive(self, rank: int) -> list[memoryview]:
        """Wait for the next message that is expected from a rank, and return it."""
        expected = self._expected[rank]
        if rank not in self._heard:
            self._heard.add(rank)
            first = expected[0]
            together = self._hear(rank)
            if first.size <= TOGETHER_BYTES:
                expected.popleft()
                if first.into is None:
                    return [together]
                scatter([together], first.into)
                return first.into
        for following in itertools.islice(expected, AHEAD):
            if following.size and following.message is None:
                if following.into is None and following.size > WHOLE_BYTES:
                    # It has a place when it arrives. The allocator keeps this thread's memory for the next
                    # one.
                    into = torch.empty(following.size, dtype=torch.uint8, device="cpu")
                    following.into = [bytes_of(into)]
                following.message = self._post(rank, following)
        first = expected[0]
        found = [] if first.message is None else self._wait(rank, first.message)
        expected.popleft()
        if sum(map(len, found)) != first.size:
            raise self._misfit(rank, sum(map(len, found)), first.size)
        return found

    def _hear(self, rank: int) -> memoryview:
        """Receive the first message of a rank: compare the signatures, and return the rest of it."""
        greeting = _Expected(0, None)
        self._expected[rank].appendleft(greeting)
        greeting.message = self._post(rank, greeting)
        message = memoryview(bytearray().join(self._wait(rank, greeting.message)))
        self._expected[rank].popleft()
        field = message[:FIELD_BYTES]
        if field != self._signature:
            fields = {self._me: self._signature, rank: bytes(field)}
            raise CollectiveMismatchError(what_differs(fields) or "")
        given = bytes(message[FIELD_BYTES : FIELD_BYTES + _SIZES.size])
        expected = self._sizes_expected[rank]
        if given != expected:
            first, in_all, _ = zip(_SIZES.unpack(given), _SIZES.unpack(expected), strict=True)
            raise self._misfit(rank, *(first if first[0] != first[1] else in_all))
        return message[FIELD_BYTES + _SIZES.size :]

    def _misfit(self, rank: int, given: int, size: int) -> CollectiveError:
        if given == size:
            return CollectiveError(
                f"rank {rank} divides {size} bytes for rank {self._me} otherwise than that rank expects: the "
                "sizes of their tensors differ"
            )
        return CollectiveError(f"rank {rank} has {given} bytes for rank {self._me}, which expects {size}")

    def _post(self, rank: int, expected: _Expected) -> Message:
        try:
            return self._channel.post(rank, expected.into, expected.size, expected.merge)
        except RpcError as error:
            raise self._failed(rank, error) from error

    def _wait(self, rank: int, message: Message) -> list[memoryview]:
        while True:
            left = self._deadline - monotonic()
            try:
                return message.wait(max(0.0, min(left, _SLICE_SECONDS)))
            except RpcTimeoutError:
                try:
                    self._check(rank)
                except RpcError:
                    if message.done():  # it has come, and its sender left, meanwhile
                        continue
                    raise
                if left <= 0:
                    raise RanksMissingError([rank]) from None
            except RpcError as error:
                raise self._failed(rank, error) from error

    def _failed(self, rank: int, error: RpcError) -> CollectiveError:
        """Return the error of a message to or from a rank."""
        self._check(rank)
        if isinstance(error, WorkerLostError):
            return RankLostError(f"rank {rank} (worker '{error.worker}') is gone: {error.reason}")
        return CollectiveError(f"rank {rank}: {error}")

    def finish(self) -> None:
        """Wait until what was sent has arrived or was copied."""
        for rank, message in self._sent:
            self._wait(rank, message)
        self._sent.clear()

    def _posted(self) -> list[tuple[int, Message]]:
        return [
            (rank, each.message)
            for rank, expected in list(self._expected.items())
            for each in list(expected)
            if each.message is not None
        ]

    def wake(self) -> None:
        """End the waits for messages that will not come. From any thread."""
        for rank, message in self._posted():
            try:
                self._check(rank)
            except RpcError as error:
                message.cancel(str(error))

    def cancel(self) -> None:
        """Receive nothing more; when this returns, nothing is written to the places of messages any more."""
        for _, message in self._posted():
            if not message.cancel("the operation has ended"):
                with contextlib.suppress(RpcError):
                    message.wait()  # it is here, and only to be copied


def pack_sizes(steps: Iterable[tuple[int, Sequence[int]]]) -> dict[int, bytes]:
    """Return the ``_SIZES`` of the messages of some steps, for each rank."""
    of_ranks: dict[int, list[Sequence[int]]] = {}
    for rank, sizes in steps:
        of_ranks.setdefault(rank, []).append(sizes)
    packed = {}
    for rank, of_steps in of_ranks.items():
        every = array("Q", itertools.chain.from_iterable(of_steps))
        packed[rank] = _SIZES.pack(sum(of_steps[0]), sum(every), crc32(every))
    return packed
