"""Collectives of ranks that share memory, over a ``Board``.

Data goes through the slots in parts, so that it stays in caches: each byte is read from the caller's tensor
once and written to those of the others once. While a rank reads one part, the next one is already there for
the others.

*Exchange.* In round s each rank fills its slot with part s, and reads its data from the slots of the others::

    fill 0, publish, wait;  then for each part: fill s + 1, publish; read s; wait

*Reduction to all* of large tensors of more than two ranks. Each rank reduces one chunk of each part, from the
slots of the others and its own tensor, into its slot of another round, where the others read the result::

    fill 0;  then for each part: fill s + 1;  reduce s into a slot;  read the results of s - 1

The first round of every operation carries the rank's signature and the number of bytes that it has for each
other rank, so a mismatch is found before any tensor is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import Final

import torch

from spmd.collectives.errors import CollectiveError, CollectiveMismatchError
from spmd.collectives.memory import copy_bytes, move, pieces
from spmd.collectives.one_host.board import SLOT_BYTES, Board
from spmd.collectives.reductions import Reduction
from spmd.collectives.signature import FIELD_BYTES, what_differs

__all__ = ["LocalCollectives", "header_bytes"]

_SMALL_BYTES: Final = 32 << 10
"""Maximum size in bytes of tensors of which every rank reduces everything."""

_ALIGNMENT: Final = 64


def header_bytes(size: int) -> int:
    """Return the size in bytes of a slot's header in a group of ``size`` ranks."""
    return FIELD_BYTES + 8 * size


class LocalCollectives:
    """The ``Algorithms`` of ranks of one host.

    Args:
        board: the shared memory.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._names = board.ranks
        self._me, self._size = board.rank, board.size
        self._everybody = range(board.size)
        self._others = [rank for rank in self._everybody if rank != self._me]
        self._sizes = Struct(f"<{board.size}Q")

    # ---- the first round

    def _open(self, signature: bytes, deadline: float) -> int:
        """Publish the first round, which has been filled, and wait for it.

        Raises:
            CollectiveMismatchError: not all ranks have called the same operation.
        """
        board = self._board
        board.header(self._me, board.round + 1)[:FIELD_BYTES] = signature
        number = board.publish()
        board.wait_for(number, deadline)
        for rank in self._others:
            if bytes(board.header(rank, number)[:FIELD_BYTES]) != signature:
                fields = {
                    self._names[each]: board.header(each, number)[:FIELD_BYTES] for each in self._everybody
                }
                raise CollectiveMismatchError(what_differs(fields) or "ranks called different operations")
        return number

    def _exchange(
        self,
        signature: bytes,
        deadline: float,
        fill: Callable[[int], object] | None,
        read: Callable[[int, int, int], object],
        part: int,
        sends: Sequence[int],
        takes: Sequence[int],
    ) -> None:
        """Exchange parts of up to ``part`` bytes between all ranks.

        Args:
            fill: fills this rank's next slot with a part; None if it has nothing to send.
            read: takes a rank, its slot's address and the part's number; called for each other rank.
            sends, takes: number of bytes that this rank has for each other, and expects from each.
        """
        board = self._board
        others = [0 if rank == self._me else size for rank, size in enumerate(sends)]
        self._sizes.pack_into(board.header(self._me, board.round + 1), FIELD_BYTES, *others)
        if fill is not None:
            fill(0)
        number = self._open(signature, deadline)
        parts = 1
        for rank in self._everybody:
            given = self._sizes.unpack_from(board.header(rank, number), FIELD_BYTES)
            parts = max(parts, -(-max(given) // part))
            if rank != self._me and given[self._me] != takes[rank]:
                raise CollectiveError(
                    f"rank {self._names[rank]} has {given[self._me]} bytes for rank {self._names[self._me]}, "
                    f"which expects {takes[rank]}"
                )

        def take(number: int, step: int) -> None:
            for rank in self._others:
                if takes[rank]:
                    read(rank, board.address(rank, number), step)

        self._in_parts(number, parts, fill, take, deadline)

    def _in_parts(
        self,
        number: int,
        parts: int,
        fill: Callable[[int], object] | None,
        read: Callable[[int, int], object],
        deadline: float,
    ) -> None:
        """Read the parts of an operation, and fill each a step ahead; the first has been published.

        Args:
            number: round of the first part.
            fill: fills this rank's next slot with a part; None if it has nothing to send.
            read: takes the round and the number of a part.
        """
        for step in range(parts):
            following = 0
            if step + 1 < parts:
                if fill is not None:
                    fill(step + 1)
                following = self._board.publish()
            read(number, step)
            if following:
                self._board.wait_for(following, deadline)
                number = following

    # ---- operations

    def barrier(self, signature: bytes, deadline: float) -> None:
        self._open(signature, deadline)

    def reduce(
        self, signature: bytes, deadline: float, tensor: torch.Tensor, reduction: Reduction, root: int
    ) -> None:
        self.all_reduce(signature, deadline, tensor, reduction, root)

    def all_gather(
        self, signature: bytes, deadline: float, outputs: Sequence[torch.Tensor], mine: torch.Tensor
    ) -> None:
        source, size = mine.data_ptr(), mine.nbytes
        targets = [each.data_ptr() for each in outputs]
        limits = [each.nbytes for each in outputs]

        def fill(step: int) -> None:
            begin = step * SLOT_BYTES
            move(self._next_slot(), source, begin, min(begin + SLOT_BYTES, size))

        def read(rank: int, slot: int, step: int) -> None:
            begin = step * SLOT_BYTES
            move(targets[rank] + begin, slot, 0, min(SLOT_BYTES, limits[rank] - begin))

        copy_bytes(mine, outputs[self._me])
        self._exchange(signature, deadline, fill, read, SLOT_BYTES, [size] * self._size, limits)

    def gather(
        self,
        signature: bytes,
        deadline: float,
        outputs: Sequence[torch.Tensor] | None,
        mine: torch.Tensor,
        root: int,
    ) -> None:
        source = mine.data_ptr()
        sends = [mine.nbytes if rank == root else 0 for rank in self._everybody]
        targets = [each.data_ptr() for each in outputs or ()]
        takes = [each.nbytes for each in outputs] if outputs is not None else [0] * self._size

        def fill(step: int) -> None:
            begin = step * SLOT_BYTES
            move(self._next_slot(), source, begin, min(begin + SLOT_BYTES, mine.nbytes))

        def read(rank: int, slot: int, step: int) -> None:
            begin = step * SLOT_BYTES
            move(targets[rank] + begin, slot, 0, min(SLOT_BYTES, takes[rank] - begin))

        if outputs is not None:
            copy_bytes(mine, outputs[root])
        self._exchange(
            signature, deadline, None if self._me == root else fill, read, SLOT_BYTES, sends, takes
        )

    def broadcast(self, signature: bytes, deadline: float, tensor: torch.Tensor, root: int) -> None:
        address, size = tensor.data_ptr(), tensor.nbytes
        is_root = self._me == root

        def fill(step: int) -> None:
            begin = step * SLOT_BYTES
            move(self._next_slot(), address, begin, min(begin + SLOT_BYTES, size))

        def read(rank: int, slot: int, step: int) -> None:
            begin = step * SLOT_BYTES
            move(address + begin, slot, 0, min(SLOT_BYTES, size - begin))

        sends = [size if is_root else 0] * self._size
        takes = [size if rank == root and not is_root else 0 for rank in self._everybody]
        self._exchange(signature, deadline, fill if is_root else None, read, SLOT_BYTES, sends, takes)

    def all_to_all(
        self,
        signature: bytes,
        deadline: float,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
    ) -> None:
        part = self._chunk_bytes(SLOT_BYTES * self._size)
        sources = [each.data_ptr() for each in inputs]
        sizes = [each.nbytes for each in inputs]
        targets = [each.data_ptr() for each in outputs]
        limits = [each.nbytes for each in outputs]
        me = self._me

        def fill(step: int) -> None:
            slot, begin = self._next_slot(), step * part
            for rank in self._others:
                move(slot + rank * part, sources[rank], begin, min(begin + part, sizes[rank]))

        def read(rank: int, slot: int, step: int) -> None:
            begin = step * part
            move(targets[rank] + begin, slot + me * part, 0, min(part, limits[rank] - begin))

        copy_bytes(inputs[me], outputs[me])
        self._exchange(signature, deadline, fill, read, part, sizes, limits)

    def scatter(
        self,
        signature: bytes,
        deadline: float,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None,
        root: int,
    ) -> None:
        empty = output.new_empty(0)
        given = [empty] * self._size if inputs is None else list(inputs)
        outputs = [output if rank == root else empty for rank in self._everybody]
        self.all_to_all(signature, deadline, outputs, given)

    def reduce_scatter(
        self,
        signature: bytes,
        deadline: float,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        reduction: Reduction,
    ) -> None:
        me, dtype = self._me, output.dtype
        part = self._chunk_bytes(output.nbytes * self._size)
        count = part // dtype.itemsize
        sources = [each.data_ptr() for each in inputs]
        total, target = output.nbytes, output.data_ptr()
        if any(source < target + total and target < source + total for source in sources):
            apart = torch.empty_like(output)
            self.reduce_scatter(signature, deadline, apart, inputs, reduction)
            copy_bytes(apart, output)
            return
        own, result = pieces(inputs[me].view(-1), count), pieces(output.view(-1), count)

        def fill(step: int) -> None:
            slot, begin = self._next_slot(), step * part
            for rank in self._others:
                move(slot + rank * part, sources[rank], begin, min(begin + part, total))

        def read(number: int, step: int) -> None:
            mine = own[step]
            length = mine.shape[0]
            terms = [
                mine if rank == me else self._chunk(rank, dtype, count, length, number)
                for rank in self._everybody
            ]
            reduction.reduce(terms, result[step])
            reduction.finish(result[step], self._size)

        parts = max(1, -(-total // part))
        fill(0)
        number = self._open(signature, deadline)
        if not total:
            return
        self._in_parts(number, parts, fill, read, deadline)

    def all_reduce(
        self,
        signature: bytes,
        deadline: float,
        tensor: torch.Tensor,
        reduction: Reduction,
        root: int | None = None,
        *,
        last: bool = True,
    ) -> None:
        """See ``Algorithms``.

        Args:
            root: rank that gets the result; None for all.
            last: whether no tensors of other ranks are reduced into the result later.
        """
        if self._size == 2 or tensor.nbytes <= _SMALL_BYTES:
            self._reduce_everything(signature, deadline, tensor, reduction, root, last)
        else:
            self._reduce_in_chunks(signature, deadline, tensor, reduction, root, last)

    def _reduce_everything(
        self,
        signature: bytes,
        deadline: float,
        tensor: torch.Tensor,
        reduction: Reduction,
        root: int | None,
        last: bool,
    ) -> None:
        """Reduce everything on every rank: between two ranks this moves as many bytes as reducing halves, and
        waits less.
        """
        board, dtype, everybody = self._board, tensor.dtype, self._everybody
        address, total = tensor.data_ptr(), tensor.nbytes
        results = pieces(tensor.view(-1), SLOT_BYTES // dtype.itemsize)
        keeps = root is None or root == self._me

        def fill(step: int) -> None:
            begin = step * SLOT_BYTES
            move(self._next_slot(), address, begin, min(begin + SLOT_BYTES, total))

        def read(number: int, step: int) -> None:
            result = results[step]
            if keeps and len(result):
                terms = [board.tensor(rank, number, dtype)[: len(result)] for rank in everybody]
                reduction.reduce(terms, result)
                if last:
                    reduction.finish(result, self._size)

        fill(0)
        number = self._open(signature, deadline)
        self._in_parts(number, len(results), fill, read, deadline)

    def _reduce_in_chunks(
        self,
        signature: bytes,
        deadline: float,
        tensor: torch.Tensor,
        reduction: Reduction,
        root: int | None,
        last: bool,
    ) -> None:
        board, me, dtype, size = self._board, self._me, tensor.dtype, self._size
        address, total = tensor.data_ptr(), tensor.nbytes
        chunk = self._chunk_bytes(total)
        count = chunk // dtype.itemsize
        own = pieces(tensor.view(-1), count)
        keeps = root is None or root == me
        readers = self._others if keeps else []
        steps = -(-total // (chunk * size))
        inputs: list[int] = []  # the rounds of parts
        results: list[int] = []

        def fill(step: int) -> None:
            slot, begin = self._next_slot(), step * chunk * size
            for rank in self._others:
                start = begin + rank * chunk
                move(slot + rank * chunk, address, start, min(start + chunk, total))

        def reduce(step: int) -> None:
            index = step * size + me
            if index < len(own):
                mine, number = own[index], inputs[step]
                length = mine.shape[0]
                out = board.tensor(me, board.round + 1, dtype).narrow(0, 0, length)
                terms = [
                    mine if rank == me else self._chunk(rank, dtype, count, length, number)
                    for rank in self._everybody
                ]
                reduction.reduce(terms, out)
                if last:
                    reduction.finish(out, size)
                if keeps:
                    move(mine.data_ptr(), out.data_ptr(), 0, mine.nbytes)
            results.append(board.publish())

        def read(step: int) -> None:
            board.wait_for(results[step], deadline)
            begin = step * chunk * size
            for rank in readers:
                start = begin + rank * chunk
                move(address + start, board.address(rank, results[step]), 0, min(chunk, total - start))

        fill(0)
        inputs.append(self._open(signature, deadline))
        for step in range(steps):
            if step + 1 < steps:
                fill(step + 1)
                inputs.append(board.publish())
            board.wait_for(inputs[step], deadline)
            reduce(step)
            if step:
                read(step - 1)
        read(steps - 1)

    # ---- memory

    def _next_slot(self) -> int:
        """The address of the data of this rank's next round."""
        return self._board.address(self._me, self._board.round + 1)

    def _chunk_bytes(self, total: int) -> int:
        """Return the size in bytes of each rank's share of a part: as even as possible, and at most that of a
        slot.
        """
        most = SLOT_BYTES // self._size // _ALIGNMENT * _ALIGNMENT
        fair = -(-total // (self._size * _ALIGNMENT)) * _ALIGNMENT
        return max(_ALIGNMENT, min(most, fair))

    def _chunk(self, rank: int, dtype: torch.dtype, count: int, length: int, number: int) -> torch.Tensor:
        """Return this rank's share in a rank's slot of a round: ``length`` elements, of chunks of
        ``count``.
        """
        return self._board.tensor(rank, number, dtype).narrow(0, self._me * count, length)
