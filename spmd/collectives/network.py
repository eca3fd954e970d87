"""Collectives by messages, between ranks that share no memory, by the schedules of ``schedules.py``.

The first message of an operation from one rank to another begins with the signature of the call, so that two
ranks that have called different operations notice before any tensor is touched.
"""

from __future__ import annotations

import contextlib
import itertools
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from struct import Struct
from time import monotonic
from typing import Any, Final, Protocol
from zlib import crc32

import torch

from rpc.bulk.copying import scatter
from rpc.bulk.matching import REPORT
from rpc.errors import RpcError, RpcTimeoutError, WorkerLostError
from rpc.runtime.blocking import INFINITE
from rpc.runtime.torch_internals import InferenceMode
from rpc.wire.targets import MERGE_ALIGNMENT
from spmd.collectives import schedules
from spmd.collectives.errors import CollectiveError, CollectiveMismatchError, RankLostError, RanksMissingError
from spmd.collectives.memory import bytes_of, check_same_size, copy_bytes, of_even_size, overlap, pieces
from spmd.collectives.reductions import Reduction
from spmd.collectives.schedules import Step
from spmd.collectives.signature import FIELD_BYTES, what_differs

__all__ = ["Channel", "Merge", "NetworkCollectives"]

_TOGETHER_BYTES: Final = 32 << 10
"""Maximum size in bytes of a first message that is sent together with the signature."""

_WHOLE_BYTES: Final = 3 << 20
"""Maximum size in bytes of a step that is sent in one message. Longer ones are sent in pieces."""

_FIRST_BYTES: Final = REPORT
"""Size in bytes of the first piece for a rank, which may arrive before it has a place, and is copied then. A
sender's credit does not allow more than ``WINDOW`` before the receiver has answered.
"""

_REDUCED_BYTES: Final = 32 << 20
"""Size in bytes of a later piece that is reduced. On bulk streams it is reduced while it arrives, and needs
no memory; otherwise when all of it has arrived.
"""

_APART_BYTES: Final = 4 << 20
"""The same where elements are too large to be reduced while they arrive: these pieces have memory of their
own.
"""

_UNCHANGED_BYTES: Final = 64 << 20
"""Size in bytes of a later piece that is not reduced."""

_AHEAD: Final = 8
"""Number of pieces that are sent before one is received, and have a place before they arrive."""

_SIZES: Final = Struct("<QQI44x")
"""Fields after the signature: the number of bytes for that rank in the first step and in all, and a checksum
of the size of each message. Padded, so that the elements of the first message are aligned.
"""

_SLICE_SECONDS: Final = 0.25


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


class _Operation:
    """The messages of one operation of one rank.

    Args:
        sizes_sent, sizes_expected: results of ``_pack_sizes``, by rank.
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
            if size <= _TOGETHER_BYTES:
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
            if first.size <= _TOGETHER_BYTES:
                expected.popleft()
                if first.into is None:
                    return [together]
                scatter([together], first.into)
                return first.into
        for following in itertools.islice(expected, _AHEAD):
            if following.size and following.message is None:
                if following.into is None and following.size > _WHOLE_BYTES:
                    # It has a place when it arrives. The allocator keeps this thread's memory for the next
                    # one.
                    following.into = [bytes_of(torch.empty(following.size, dtype=torch.uint8))]
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


def _pack_sizes(steps: Iterable[tuple[int, Sequence[int]]]) -> dict[int, bytes]:
    """Return the ``_SIZES`` of the messages of some steps, for each rank."""
    of_ranks: dict[int, list[Sequence[int]]] = {}
    for rank, sizes in steps:
        of_ranks.setdefault(rank, []).append(sizes)
    packed = {}
    for rank, of_steps in of_ranks.items():
        every = array("Q", itertools.chain.from_iterable(of_steps))
        packed[rank] = _SIZES.pack(sum(of_steps[0]), sum(every), crc32(every))
    return packed


def _messages(
    blocks: Sequence[torch.Tensor], numbers: Iterable[int], longest: int, *, is_first: bool
) -> list[Sequence[torch.Tensor]]:
    """Divide some blocks into messages: large ones in pieces. Both ranks of a step divide them alike.

    Args:
        longest: maximum size in bytes of a piece.
        is_first: whether the receiver may not have called the operation yet when the first of them arrives.
    """
    chosen = [blocks[each] for each in numbers]
    if sum(block.nbytes for block in chosen) <= _WHOLE_BYTES:
        return [chosen]
    messages: list[Sequence[torch.Tensor]] = []
    for block in chosen:
        count, others = block.numel(), longest // block.dtype.itemsize
        first = min(count, _FIRST_BYTES // block.dtype.itemsize) if is_first and not messages else 0
        full, rest = divmod(count - first, others)
        sizes = [first, *[others] * full, rest]
        messages += [[piece] for piece in pieces(block.view(-1), sizes) if piece.nbytes]
    return messages


def _merging(mine: torch.Tensor, result: torch.Tensor, reduction: Reduction) -> Merge:
    """Return a function that merges the bytes of another rank's tensor with ``mine``, part by part, into
    ``result``.
    """
    mine, result = mine.view(-1), result.view(-1)

    def merge(begin: int, data: memoryview) -> None:
        first, behind = begin // mine.itemsize, (begin + len(data)) // mine.itemsize
        with InferenceMode(True):  # it may be a leaf that requires gradients, and this may be any thread
            other = torch.frombuffer(data, dtype=torch.uint8).view(mine.dtype)
            reduction.merge(mine[first:behind], other, result[first:behind])

    return merge


def _as_tensors(message: list[memoryview], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a message as tensors of given shapes and dtypes: over its memory, if that is divided like they
    are.
    """
    if all(message) and list(map(len, message)) == [each.nbytes for each in like]:
        found = [torch.frombuffer(data, dtype=torch.uint8) for data in message]
        if all(data.data_ptr() % each.itemsize == 0 for data, each in zip(found, like, strict=True)):
            return [data.view(each.dtype).view(each.shape) for data, each in zip(found, like, strict=True)]
    tensors = [torch.empty_like(each) for each in like]
    scatter(message, [bytes_of(each) for each in tensors])
    return tensors


@dataclass(slots=True)
class _Part:
    """A message of a step.

    Attributes:
        mine: tensors of this rank that it replaces, or that it is reduced with.
        results: places of the reductions.
        into: memory that it fills or is merged into, or None if this thread reduces it once it is here.
        merge: merges it while it arrives.
    """

    mine: Sequence[torch.Tensor]
    results: Sequence[torch.Tensor]
    into: list[memoryview] | None
    merge: Merge | None = None


@dataclass(slots=True)
class _Planned:
    """One step: its messages to a rank and from one, numbered as in the channel; -1 for none."""

    changes_what_it_sends: bool
    to: int = -1
    sends: Sequence[Sequence[torch.Tensor]] = ()
    source: int = -1
    takes: list[_Part] = field(default_factory=list)


def _size(message: Sequence[torch.Tensor]) -> int:
    return sum(each.nbytes for each in message)


def _can_merge(message: Sequence[torch.Tensor]) -> bool:
    """Whether a message can be reduced while it arrives: it has one tensor, no element of which is divided
    between two parts, and comes by itself.
    """
    return len(message) == 1 and _is_aligned(message[0]) and message[0].nbytes > _TOGETHER_BYTES


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Whether no element is divided between two parts of a message that is merged."""
    return MERGE_ALIGNMENT % tensor.itemsize == 0


class NetworkCollectives:
    """The ``Algorithms`` of some ranks over messages, as part of those of more ranks: all-reduce and reduce
    take tensors that have been ``prepare``d, and the number of tensors that the result is made of.

    Args:
        channel: the messages.
        ranks: the ranks that take part, in order; schedules number them by position.
        rank: this rank.
        check: called with the rank that is awaited; raises if that will not come.
    """

    def __init__(
        self,
        channel: Channel,
        ranks: Sequence[int],
        rank: int,
        check: Callable[[int], object],
        longest: int = _UNCHANGED_BYTES,
    ) -> None:
        self._channel = channel
        self._longest = min(_UNCHANGED_BYTES, longest)
        self._ranks = list(ranks)
        self._rank = rank
        self._me, self._size = self._ranks.index(rank), len(ranks)
        self._check = check
        self._operation: _Operation | None = None

    def wake(self) -> None:
        """Make the waiting thread call ``check``. From any thread."""
        operation = self._operation
        if operation is not None:
            operation.wake()

    def _run(
        self,
        signature: bytes,
        deadline: float,
        steps: Sequence[Step],
        blocks: Sequence[torch.Tensor],
        reduction: Reduction | None = None,
        *,
        reduced: Sequence[torch.Tensor] | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        """Do the steps of a schedule.

        Args:
            blocks: blocks that follow each other in memory, or are sent one by one.
            reduced: places of the reductions of the blocks; default: the blocks themselves.
            meanwhile: called once, when the first messages are in transit.
        """
        plan = self._plan(steps, list(blocks), reduction, reduced)
        operation = _Operation(
            self._channel,
            self._rank,
            signature,
            deadline,
            self._check,
            _pack_sizes((step.to, [_size(each) for each in step.sends]) for step in plan),
            _pack_sizes((step.source, [_size(each.mine) for each in step.takes]) for step in plan),
        )
        self._operation = operation
        try:
            for step in plan:
                for part in step.takes:
                    operation.expect(step.source, _size(part.mine), part.into, part.merge)
            for step in plan:
                sends = iter(step.sends)
                self._send(operation, step.to, itertools.islice(sends, _AHEAD))
                if meanwhile is not None:
                    meanwhile()
                    meanwhile = None
                for part in step.takes:
                    self._take(operation, step, part, reduction)
                    self._send(operation, step.to, itertools.islice(sends, 1))
                self._send(operation, step.to, sends)
            if meanwhile is not None:  # there are no steps: this rank is alone
                meanwhile()
            operation.finish()
        finally:
            operation.cancel()
            self._operation = None

    def _plan(
        self,
        steps: Sequence[Step],
        blocks: list[torch.Tensor],
        reduction: Reduction | None,
        reduced: Sequence[torch.Tensor] | None,
    ) -> list[_Planned]:
        """The messages of all steps."""
        reduced = blocks if reduced is None else reduced
        plan: list[_Planned] = []
        for step in steps:
            met = {each.to for each in plan}, {each.source for each in plan}
            # In a reduction, what a rank only sends is reduced by the rank that receives it.
            reduces = step.reduces or (reduction is not None and step.source < 0)
            longest = self._longest
            if reduces:
                longest = min(longest, _REDUCED_BYTES if _is_aligned(blocks[0]) else _APART_BYTES)
            planned = _Planned(
                changes_what_it_sends=step.reduces and step.to >= 0 and step.sends == step.takes
            )
            if step.to >= 0:
                planned.to = self._ranks[step.to]
                is_first = planned.to not in met[0]
                planned.sends = _messages(blocks, step.sends, longest, is_first=is_first)
            if step.source >= 0:
                planned.source = self._ranks[step.source]
                is_first = planned.source not in met[1]
                mine = _messages(blocks, step.takes, longest, is_first=is_first)
                if not step.reduces:
                    planned.takes = [_Part(each, each, [bytes_of(one) for one in each]) for each in mine]
                else:
                    assert reduction is not None
                    results = _messages(reduced, step.takes, longest, is_first=is_first)
                    for each, result in zip(mine, results, strict=True):
                        part = _Part(each, result, None)
                        if not planned.changes_what_it_sends and _can_merge(each):
                            part.into = [bytes_of(result[0])]
                            part.merge = _merging(each[0], result[0], reduction)
                        planned.takes.append(part)
                    for number in step.takes:
                        blocks[number] = reduced[number]
            plan.append(planned)
        return plan

    def _send(self, operation: _Operation, rank: int, messages: Iterable[Sequence[torch.Tensor]]) -> None:
        for message in messages:
            operation.send(rank, [bytes_of(each) for each in message])

    def _take(self, operation: _Operation, step: _Planned, part: _Part, reduction: Reduction | None) -> None:
        found = operation.receive(step.source)
        if part.into is None:
            assert reduction is not None
            if step.changes_what_it_sends:
                operation.finish()
            for mine, other, result in zip(
                part.mine, _as_tensors(found, part.mine), part.results, strict=True
            ):
                reduction.merge(mine, other, result)

    # ---- operations

    def barrier(self, signature: bytes, deadline: float = INFINITE) -> None:
        self._run(signature, deadline, schedules.barrier(self._me, self._size), [])

    def all_reduce(
        self, signature: bytes, deadline: float, tensor: torch.Tensor, reduction: Reduction, count: int
    ) -> None:
        steps = schedules.all_reduce(self._me, self._size, tensor.nbytes)
        blocks = of_even_size(tensor, schedules.count_blocks(self._size, tensor.nbytes))
        self._run(signature, deadline, steps, blocks, reduction)
        reduction.finish(tensor, count)

    def reduce(
        self,
        signature: bytes,
        deadline: float,
        tensor: torch.Tensor,
        reduction: Reduction,
        root: int,
        count: int,
    ) -> None:
        """Reduce to ``root``. At other ranks ``tensor`` becomes what has been reduced so far."""
        place = self._ranks.index(root)
        self._run(
            signature, deadline, schedules.reduce(self._me, self._size, place), [tensor.view(-1)], reduction
        )
        if self._rank == root:
            reduction.finish(tensor, count)

    def broadcast(self, signature: bytes, deadline: float, tensor: torch.Tensor, root: int) -> None:
        place = self._ranks.index(root)
        steps = schedules.broadcast(self._me, self._size, tensor.nbytes, place)
        self._run(
            signature,
            deadline,
            steps,
            of_even_size(tensor, schedules.count_broadcast_blocks(self._size, tensor.nbytes)),
        )

    def all_gather(
        self, signature: bytes, deadline: float, outputs: Sequence[torch.Tensor], mine: torch.Tensor
    ) -> None:
        copy_bytes(mine, outputs[self._me])
        largest = max(each.nbytes for each in outputs)
        steps = schedules.all_gather(self._me, self._size, largest * self._size)
        self._run(signature, deadline, steps, outputs)

    def reduce_scatter(
        self,
        signature: bytes,
        deadline: float,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        reduction: Reduction,
    ) -> None:
        steps = schedules.reduce_scatter(self._me, self._size, output.nbytes * self._size)
        taken = {number for step in steps for number in step.takes}
        blocks = [reduction.prepared(each) for each in inputs]
        reduced = [torch.empty_like(each) if i in taken else each for i, each in enumerate(blocks)]
        if self._me not in taken:  # this rank is alone
            reduced[self._me] = blocks[self._me].clone()
        elif not any(overlap(output, each) for each in inputs):
            reduced[self._me] = output.view(inputs[self._me].shape)
        self._run(signature, deadline, steps, blocks, reduction, reduced=reduced)
        reduction.finish(reduced[self._me], self._size)
        copy_bytes(reduced[self._me], output)

    def all_to_all(
        self,
        signature: bytes,
        deadline: float,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
    ) -> None:
        own = inputs[self._me], outputs[self._me]
        check_same_size(*own)
        steps = schedules.all_to_all(self._me, self._size)
        self._run(signature, deadline, steps, [*inputs, *outputs], meanwhile=partial(copy_bytes, *own))

    def gather(
        self,
        signature: bytes,
        deadline: float,
        outputs: Sequence[torch.Tensor] | None,
        mine: torch.Tensor,
        root: int,
    ) -> None:
        place = self._ranks.index(root)
        if outputs is not None:
            copy_bytes(mine, outputs[place])
        blocks = [mine] * self._size if outputs is None else outputs
        self._run(signature, deadline, schedules.gather(self._me, self._size, place), blocks)

    def scatter(
        self,
        signature: bytes,
        deadline: float,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None,
        root: int,
    ) -> None:
        place = self._ranks.index(root)
        if inputs is not None:
            copy_bytes(inputs[place], output)
        blocks = [output] * self._size if inputs is None else inputs
        self._run(signature, deadline, schedules.scatter(self._me, self._size, place), blocks)
