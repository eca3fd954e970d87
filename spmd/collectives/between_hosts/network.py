"""Collectives by messages, between ranks that share no memory, by the schedules of ``schedules.py``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch

from rpc.bulk.copying import scatter
from rpc.bulk.matching import REPORT
from rpc.runtime.blocking import INFINITE
from rpc.runtime.torch_internals import InferenceMode
from rpc.wire.targets import MERGE_ALIGNMENT
from spmd.collectives.between_hosts import schedules
from spmd.collectives.between_hosts.operation_messages import (
    AHEAD,
    TOGETHER_BYTES,
    WHOLE_BYTES,
    Channel,
    Merge,
    OperationMessages,
    pack_sizes,
)
from spmd.collectives.between_hosts.schedules import Step
from spmd.collectives.memory import bytes_of, check_same_size, copy_bytes, of_even_size, overlap, pieces
from spmd.collectives.reductions import Reduction

__all__ = ["NetworkCollectives"]

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


def _messages(
    blocks: Sequence[torch.Tensor], numbers: Iterable[int], longest: int, *, is_first: bool
) -> list[Sequence[torch.Tensor]]:
    """Divide some blocks into messages: large ones in pieces. Both ranks of a step divide them alike.

    Args:
        longest: maximum size in bytes of a piece.
        is_first: whether the receiver may not have called the operation yet when the first of them arrives.
    """
    chosen = [blocks[each] for each in numbers]
    if sum(block.nbytes for block in chosen) <= WHOLE_BYTES:
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
    return len(message) == 1 and _is_aligned(message[0]) and message[0].nbytes > TOGETHER_BYTES


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
        self._operation: OperationMessages | None = None

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
        operation = OperationMessages(
            self._channel,
            self._rank,
            signature,
            deadline,
            self._check,
            pack_sizes((step.to, [_size(each) for each in step.sends]) for step in plan),
            pack_sizes((step.source, [_size(each.mine) for each in step.takes]) for step in plan),
        )
        self._operation = operation
        try:
            for step in plan:
                for part in step.takes:
                    operation.expect(step.source, _size(part.mine), part.into, part.merge)
            for step in plan:
                sends = iter(step.sends)
                self._send(operation, step.to, itertools.islice(sends, AHEAD))
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

    def _send(
        self, operation: OperationMessages, rank: int, messages: Iterable[Sequence[torch.Tensor]]
    ) -> None:
        for message in messages:
            operation.send(rank, [bytes_of(each) for each in message])

    def _take(
        self, operation: OperationMessages, step: _Planned, part: _Part, reduction: Reduction | None
    ) -> None:
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
