"""Collectives by messages, between ranks that share no memory: runs what ``schedules.py`` says.

The first message of an operation from one rank to another begins with the signature of the call, so that two
ranks that have called different things find out before any tensor is touched.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from struct import Struct
from time import monotonic
from typing import Any, Final, Protocol

import torch

from rpc.bulk.copying import scatter
from rpc.bulk.matching import REPORT
from rpc.errors import RpcError, RpcTimeoutError, WorkerLostError
from rpc.runtime.blocking import INFINITE
from spmd.collectives import schedules
from spmd.collectives.errors import CollectiveError, CollectiveMismatchError, RankLostError, RanksMissingError
from spmd.collectives.memory import bytes_of, check_same_size, copy_bytes, of_even_size, overlap, pieces
from spmd.collectives.reductions import Reduction
from spmd.collectives.schedules import Step
from spmd.collectives.signature import FIELD_BYTES, what_differs

__all__ = ["Channel", "NetworkCollectives"]

_TOGETHER_BYTES: Final = 32 << 10
"""A first message of up to so many bytes comes in one with the signature."""

_WHOLE_BYTES: Final = 3 << 20
"""Maximum number of bytes of a step that go in one message. Longer ones go in pieces."""

_FIRST_BYTES: Final = REPORT
"""Number of bytes in the first piece, which may come before it has a place, and is copied then. A sender's
credit does not allow for more than that before the receiver has answered: longer pieces always have a place.
"""

_REDUCED_BYTES: Final = 6 << 20
"""Number of bytes in a further piece that is reduced, while the next one is on its way."""

_UNCHANGED_BYTES: Final = 64 << 20
"""Number of bytes in a further piece that is not reduced."""

_AHEAD: Final = 4
"""How many pieces are sent before one is received, and have a place before they come."""

_SIZE: Final = Struct("<Q56x")
"""Number of bytes of the first message, after the signature; padded, so that its elements are aligned."""

_SLICE_SECONDS: Final = 0.25


class Message(Protocol):
    """A message on its way: ``rpc.bulk.transfer.Transfer``."""

    def wait(self, timeout: float | None = None) -> list[memoryview]: ...

    def cancel(self, reason: str = ...) -> bool: ...

    def done(self) -> bool: ...


class Channel(Protocol):
    """Sends and receives messages to and from a rank, in order."""

    def send(self, rank: int, buffers: list[Any]) -> Message: ...

    def post(self, rank: int, into: Any, size: int) -> Message: ...


class _Expected:
    """A message that is to come: its size, and where it goes; None for memory of its own."""

    def __init__(self, size: int, into: list[memoryview] | None) -> None:
        self.size, self.into = size, into
        self.message: Message | None = None
        """Once it is posted."""


class _Operation:
    """The messages of one operation of one rank."""

    def __init__(
        self, channel: Channel, me: int, signature: bytes, deadline: float, check: Callable[[int], object]
    ) -> None:
        self._channel = channel
        self._me = me
        self._signature = signature
        self._deadline = deadline
        self._check = check
        self._greeted: set[int] = set()
        self._heard: set[int] = set()
        self._sent: list[tuple[int, Message]] = []
        self._expected: dict[int, deque[_Expected]] = {}

    def send(self, rank: int, data: Sequence[memoryview]) -> None:
        """Send one message; ``data`` must stay as it is until it has arrived."""
        size = sum(map(len, data))
        buffers = list(data)
        if rank not in self._greeted:
            self._greeted.add(rank)
            greeting = self._signature + _SIZE.pack(size)
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

    def expect(self, rank: int, size: int, into: list[memoryview] | None) -> None:
        """One more message is to come from a rank. Where it goes may be written to as soon as the rank before
        it is heard of, since it is not sent before what lies there is needed no more.
        """
        self._expected.setdefault(rank, deque()).append(_Expected(size, into))

    def receive(self, rank: int) -> list[memoryview]:
        """Wait for the next message that is expected from a rank, and return it."""
        expected = self._expected[rank]
        if rank not in self._heard:
            self._heard.add(rank)
            first = expected[0]
            together = self._hear(rank, first.size)
            if first.size <= _TOGETHER_BYTES:
                expected.popleft()
                if first.into is None:
                    return [together]
                scatter([together], first.into)
                return first.into
        for following in itertools.islice(expected, _AHEAD):
            if following.size and following.message is None:
                if following.into is None and following.size > _WHOLE_BYTES:
                    # It has a place when it comes. The allocator keeps this thread's memory for the next one.
                    following.into = [bytes_of(torch.empty(following.size, dtype=torch.uint8))]
                following.message = self._post(rank, following.into, following.size)
        first = expected[0]
        found = [] if first.message is None else self._wait(rank, first.message)
        expected.popleft()
        if sum(map(len, found)) != first.size:
            raise self._misfit(rank, sum(map(len, found)), first.size)
        return found

    def _hear(self, rank: int, size: int) -> memoryview:
        """The first message of a rank: compare what is called there, and return the rest of it."""
        greeting = _Expected(len(self._signature), None)
        self._expected[rank].appendleft(greeting)
        greeting.message = self._post(rank, None)
        message = memoryview(bytearray().join(self._wait(rank, greeting.message)))
        self._expected[rank].popleft()
        field = message[:FIELD_BYTES]
        if field != self._signature:
            fields = {self._me: self._signature, rank: bytes(field)}
            raise CollectiveMismatchError(what_differs(fields) or "")
        (given,) = _SIZE.unpack_from(message, FIELD_BYTES)
        if given != size:
            raise self._misfit(rank, given, size)
        return message[FIELD_BYTES + _SIZE.size :]

    def _misfit(self, rank: int, given: int, size: int) -> CollectiveError:
        return CollectiveError(f"rank {rank} has {given} bytes for rank {self._me}, which expects {size}")

    def _post(self, rank: int, into: list[memoryview] | None, size: int = 0) -> Message:
        try:
            return self._channel.post(rank, into, size)
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
        """What a message to or from a rank has ended in."""
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
        """End what is waited for in vain. From any thread."""
        for rank, message in self._posted():
            try:
                self._check(rank)
            except RpcError as error:
                message.cancel(str(error))

    def cancel(self) -> None:
        """Receive nothing more; when this returns, nothing is written any more to where messages go."""
        for _, message in self._posted():
            if not message.cancel("the operation has ended"):
                with contextlib.suppress(RpcError):
                    message.wait()  # it is here, and only to be copied


def _messages(
    blocks: Sequence[torch.Tensor], numbers: Iterable[int], longest: int
) -> list[Sequence[torch.Tensor]]:
    """Some blocks as messages: large ones in pieces. Both ranks of a step divide them alike."""
    chosen = [blocks[each] for each in numbers]
    if sum(block.nbytes for block in chosen) <= _WHOLE_BYTES:
        return [chosen]
    return [
        [piece]
        for block in chosen
        for piece in pieces(block.view(-1), _sizes(block.numel(), block.dtype.itemsize, longest))
        if piece.nbytes
    ]


def _sizes(count: int, itemsize: int, longest: int) -> list[int]:
    """How many elements each piece of a block has."""
    first = min(count, _FIRST_BYTES // itemsize)
    others = longest // itemsize
    full, rest = divmod(count - first, others)
    return [first, *[others] * full, *[rest] * bool(rest)]


def _as_tensors(message: list[memoryview], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A message as tensors of given shapes and dtypes: over its memory, if that is divided as they are."""
    if all(message) and list(map(len, message)) == [each.nbytes for each in like]:
        found = [torch.frombuffer(data, dtype=torch.uint8) for data in message]
        if all(data.data_ptr() % each.itemsize == 0 for data, each in zip(found, like, strict=True)):
            return [data.view(each.dtype).view(each.shape) for data, each in zip(found, like, strict=True)]
    tensors = [torch.empty_like(each) for each in like]
    scatter(message, [bytes_of(each) for each in tensors])
    return tensors


class NetworkCollectives:
    """The ``Algorithms`` of some ranks over messages, as part of those of more ranks: all-reduce and reduce
    take tensors that have been ``prepare``d, and how many the result is made of.

    Args:
        channel: the messages.
        ranks: those that take part, in order; schedules know them by their places.
        rank: this one.
        check: called with the rank that is waited for; raises if that is in vain.
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
        """Have the thread that waits call ``check``. From any thread."""
        operation = self._operation
        if operation is not None:
            operation.wake()

    def _begin(self, signature: bytes, deadline: float) -> _Operation:
        self._operation = _Operation(self._channel, self._rank, signature, deadline, self._check)
        return self._operation

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
            blocks: lie one after the other in memory, or are sent singly.
            reduced: where the reductions of the blocks go; default the blocks themselves.
            meanwhile: called once, when the first messages are on their way.
        """
        operation = self._begin(signature, deadline)
        blocks = list(blocks)
        reduced = blocks if reduced is None else reduced

        def longest(step: Step) -> int:
            # In a reduction, what a rank only sends is reduced by the one that receives it.
            reduces = step.reduces or (reduction is not None and step.source < 0)
            return min(_REDUCED_BYTES, self._longest) if reduces else self._longest

        try:
            for step in steps:
                for message in _messages(blocks, step.takes, longest(step)) if step.source >= 0 else ():
                    into = None if step.reduces else [bytes_of(each) for each in message]
                    operation.expect(self._ranks[step.source], sum(each.nbytes for each in message), into)
            for step in steps:
                sends = iter(_messages(blocks, step.sends, longest(step)) if step.to >= 0 else ())
                takes = _messages(blocks, step.takes, longest(step)) if step.source >= 0 else ()
                results = _messages(reduced, step.takes, longest(step)) if step.reduces else takes
                self._send(operation, step, itertools.islice(sends, _AHEAD))
                if meanwhile is not None:
                    meanwhile()
                    meanwhile = None
                for message, result in zip(takes, results, strict=True):
                    self._take(operation, step, message, result, reduction)
                    self._send(operation, step, itertools.islice(sends, 1))
                self._send(operation, step, sends)
                if step.reduces:
                    for number in step.takes:
                        blocks[number] = reduced[number]
            if meanwhile is not None:  # there are no steps: this rank is alone
                meanwhile()
            operation.finish()
        finally:
            operation.cancel()
            self._operation = None

    def _send(self, operation: _Operation, step: Step, messages: Iterable[Sequence[torch.Tensor]]) -> None:
        for message in messages:
            operation.send(self._ranks[step.to], [bytes_of(each) for each in message])

    def _take(
        self,
        operation: _Operation,
        step: Step,
        targets: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        reduction: Reduction | None,
    ) -> None:
        found = operation.receive(self._ranks[step.source])
        if step.reduces:
            assert reduction is not None
            if step.to >= 0 and step.sends == step.takes:
                operation.finish()  # it is about to change
            for mine, other, result in zip(targets, _as_tensors(found, targets), results, strict=True):
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
        """At other ranks than ``root`` ``tensor`` becomes what has been reduced so far."""
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
            of_even_size(tensor, schedules.count_blocks(self._size, tensor.nbytes)),
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
