"""Random calls of collectives, and what they must give: every rank makes the same list from a seed.

A call is made of data that every rank can compute for every other, so each computes its own results with
plain tensors, and compares.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

INTEGERS: Final = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX: Final = (torch.complex64, torch.complex128)
EIGHT_BITS: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
NUMBERS: Final = (*INTEGERS, *FLOATS, *COMPLEX)
ANY: Final = (*NUMBERS, *EIGHT_BITS, torch.bool)

# What can be reduced by what: small whole numbers, so that every dtype gives the same in any order.
REDUCTIONS: Final[dict[Any, tuple[torch.dtype, ...]]] = {
    ReduceOp.SUM: (*NUMBERS, torch.bool),
    ReduceOp.AVG: (torch.float32, torch.float64),
    ReduceOp.PRODUCT: (*INTEGERS, *FLOATS, torch.bool),
    ReduceOp.MIN: (*INTEGERS, *FLOATS, torch.bool),
    ReduceOp.MAX: (*INTEGERS, *FLOATS, torch.bool),
    ReduceOp.BAND: (*INTEGERS, torch.bool),
    ReduceOp.BOR: (*INTEGERS, torch.bool),
    ReduceOp.BXOR: (*INTEGERS, torch.bool),
}
COUNTS: Final = (0, 1, 2, 7, 64, 1000, 9000, 70_000, 400_000)


@dataclass(frozen=True)
class Call:
    """One call of all ranks.

    Attributes:
        start: begins it on this rank: returns what to wait for, or None if it is done.
        check: compares its results, once it is done.
    """

    what: str
    start: Callable[[], Any]
    check: Callable[[], object]


class Calls:
    """Random calls for one rank of a group.

    Args:
        seed: the same for all ranks, and other than that of other groups.
        rank, size: in the group.
        group: of c10d; None for the default one.
    """

    def __init__(self, seed: int, rank: int, size: int, group: Any = None) -> None:
        self._chance = random.Random(seed)
        self._numbers = torch.Generator().manual_seed(seed)
        self._rank, self._size, self._group = rank, size, group

    def run(self, count: int, only: Sequence[str] = ()) -> None:
        """Make so many calls, some at the same time.

        Args:
            only: names of methods that make calls, to choose from.
        """
        names = only or [name for name in dir(type(self)) if name.startswith("make_")]
        under_way: list[tuple[Call, Any]] = []
        for _ in range(count):
            name = self._chance.choice(names)
            call: Call = getattr(self, name)(self._chance.random() < 0.4)
            under_way.append((call, self._start(call)))
            while len(under_way) > self._chance.randrange(4):
                self._end(*under_way.pop(self._chance.randrange(len(under_way))))
        for call, work in under_way:
            self._end(call, work)

    def _start(self, call: Call) -> Any:
        try:
            return call.start()
        except BaseException as error:
            error.add_note(f"call: {call.what}")
            raise

    def _end(self, call: Call, work: Any) -> None:
        try:
            for each in work if isinstance(work, list) else [work]:
                if each is not None:
                    each.wait()
            call.check()
        except BaseException as error:
            error.add_note(f"rank {self._rank} of {self._size}, call: {call.what}")
            raise

    # ---- tensors

    def _shape(self, largest: int = COUNTS[-1]) -> list[int]:
        """A shape of up to three dimensions, of as many elements as one of COUNTS, more or less."""
        count = self._chance.choice([each for each in COUNTS if each <= largest])
        if not count or self._chance.random() < 0.4:
            return [count]
        rows = self._chance.choice([1, 2, 3, 5])
        return [rows, -(-count // rows)] if self._chance.random() < 0.5 else [rows, 1, -(-count // rows)]

    def _tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """One rank's data: small whole numbers."""
        numbers = torch.randint(0, 4, tuple(shape), generator=self._numbers)
        return numbers.to(dtype)

    def _every(self, shape: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
        """All ranks' data."""
        return [self._tensor(shape, dtype) for _ in range(self._size)]

    def _laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that may lie in memory in any way."""
        way = self._chance.randrange(5)
        if way == 0 and tensor.dim() > 1:
            return tensor.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1)
        if way == 1:
            wide = tensor.new_zeros((*tensor.shape, 2))
            wide[..., 0] = tensor
            return wide[..., 0]
        if way == 2:
            longer = tensor.new_zeros((tensor.shape[0] + 3, *tensor.shape[1:]))
            longer[2 : 2 + tensor.shape[0]] = tensor
            return longer[2 : 2 + tensor.shape[0]]
        return tensor.clone()

    def _room(self, like: torch.Tensor) -> torch.Tensor:
        return self._laid_out(torch.ones(like.shape).to(like.dtype))

    def _reduction(self) -> tuple[Any, torch.dtype]:
        operation = self._chance.choice(list(REDUCTIONS))
        return operation, self._chance.choice(REDUCTIONS[operation])

    def _root(self) -> tuple[int, int]:
        """A rank of the group, and what c10d calls it."""
        root = self._chance.randrange(self._size)
        return root, dist.get_global_rank(self._group, root) if self._group is not None else root

    # ---- calls

    def make_all_reduce(self, is_async: bool) -> Call:
        operation, dtype = self._reduction()
        every = self._every(self._shape(), dtype)
        mine = self._laid_out(every[self._rank])
        return Call(
            f"all_reduce {operation} {_of(mine)}",
            lambda: dist.all_reduce(mine, operation, self._group, is_async),
            lambda: same(mine, reduced(operation, every)),
        )

    def make_reduce(self, is_async: bool) -> Call:
        operation, dtype = self._reduction()
        every = self._every(self._shape(), dtype)
        mine = self._laid_out(every[self._rank])
        root, name = self._root()
        expected = reduced(operation, every) if root == self._rank else every[self._rank]
        return Call(
            f"reduce {operation} to {root} {_of(mine)}",
            lambda: dist.reduce(mine, name, operation, self._group, is_async),
            lambda: same(mine, expected),
        )

    def make_broadcast(self, is_async: bool) -> Call:
        every = self._every(self._shape(), self._chance.choice(ANY))
        mine = self._laid_out(every[self._rank])
        root, name = self._root()
        return Call(
            f"broadcast from {root} {_of(mine)}",
            lambda: dist.broadcast(mine, name, self._group, is_async),
            lambda: same(mine, every[root]),
        )

    def make_all_gather(self, is_async: bool) -> Call:
        dtype, alike = self._chance.choice(ANY), self._shape(70_000)
        uneven = self._chance.random() < 0.4
        every = [self._tensor(self._shape(9000) if uneven else alike, dtype) for _ in range(self._size)]
        outputs = [self._room(each) for each in every]
        mine = self._laid_out(every[self._rank])
        return Call(
            f"all_gather {_of(mine)}",
            lambda: dist.all_gather(outputs, mine, self._group, is_async),
            lambda: all_same(outputs, every),
        )

    def make_all_gather_into_tensor(self, is_async: bool) -> Call:
        every = self._every(self._shape(70_000), self._chance.choice(ANY))
        if self._chance.random() < 0.5:
            expected = torch.cat(
                [each.view(torch.uint8) if each.dtype in EIGHT_BITS else each for each in every]
            )
            expected = expected.view(every[0].dtype) if every[0].dtype in EIGHT_BITS else expected
        else:
            expected = torch.stack(every)
        output, mine = self._room(expected), self._laid_out(every[self._rank])
        return Call(
            f"all_gather_into_tensor {_of(mine)}",
            lambda: dist.all_gather_into_tensor(output, mine, self._group, is_async),
            lambda: same(output, expected),
        )

    def make_all_gather_coalesced(self, is_async: bool) -> Call:
        count = self._chance.randrange(1, 4)
        dtype = self._chance.choice(ANY)
        parts = [self._every(self._shape(1000), dtype) for _ in range(count)]
        outputs = [[self._room(part[rank]) for part in parts] for rank in range(self._size)]
        mine = [self._laid_out(part[self._rank]) for part in parts]
        return Call(
            f"all_gather_coalesced {[_of(each) for each in mine]}",
            lambda: _quietly(dist.all_gather_coalesced, outputs, mine, self._group, is_async),
            lambda: all_same(
                [each for of_rank in outputs for each in of_rank],
                [part[rank] for rank in range(self._size) for part in parts],
            ),
        )

    def make_all_reduce_coalesced(self, is_async: bool) -> Call:
        operation = self._chance.choice([ReduceOp.SUM, ReduceOp.MAX])
        dtype = self._chance.choice(REDUCTIONS[operation])
        parts = [self._every(self._shape(9000), dtype) for _ in range(self._chance.randrange(1, 4))]
        mine = [self._laid_out(part[self._rank]) for part in parts]
        return Call(
            f"all_reduce_coalesced {operation} {[_of(each) for each in mine]}",
            lambda: _quietly(dist.all_reduce_coalesced, mine, operation, self._group, is_async),
            lambda: all_same(mine, [reduced(operation, part) for part in parts]),
        )

    def make_reduce_scatter(self, is_async: bool) -> Call:
        operation, dtype = self._reduction()
        shape = self._shape(70_000)
        every = [self._every(shape, dtype) for _ in range(self._size)]  # of each rank, for each
        mine = [self._laid_out(each) for each in every[self._rank]]
        expected = reduced(operation, [each[self._rank] for each in every])
        output = self._room(expected)
        return Call(
            f"reduce_scatter {operation} {_of(output)}",
            lambda: dist.reduce_scatter(output, mine, operation, self._group, is_async),
            lambda: same(output, expected),
        )

    def make_reduce_scatter_tensor(self, is_async: bool) -> Call:
        operation, dtype = self._reduction()
        shape = self._shape(9000)
        every = [self._every(shape, dtype) for _ in range(self._size)]
        join = torch.cat if self._chance.random() < 0.5 else torch.stack
        mine = self._laid_out(join(every[self._rank]))
        expected = reduced(operation, [each[self._rank] for each in every])
        output = self._room(expected)
        return Call(
            f"reduce_scatter_tensor {operation} {_of(output)}",
            lambda: dist.reduce_scatter_tensor(output, mine, operation, self._group, is_async),
            lambda: same(output, expected),
        )

    def make_all_to_all(self, is_async: bool) -> Call:
        dtype, alike = self._chance.choice(ANY), self._shape(9000)
        uneven = self._chance.random() < 0.5
        every = [
            [self._tensor(self._shape(1000) if uneven else alike, dtype) for _ in range(self._size)]
            for _ in range(self._size)
        ]
        mine = [self._laid_out(each) for each in every[self._rank]]
        expected = [each[self._rank] for each in every]
        outputs = [self._room(each) for each in expected]
        return Call(
            f"all_to_all {[_of(each) for each in mine]}",
            lambda: dist.all_to_all(outputs, mine, self._group, is_async),
            lambda: all_same(outputs, expected),
        )

    def make_all_to_all_single(self, is_async: bool) -> Call:
        dtype, width = self._chance.choice((*NUMBERS, torch.bool)), self._chance.choice([1, 3, 500])
        even = self._chance.randrange(5) if self._chance.random() < 0.5 else None
        rows = [
            [self._chance.randrange(6) if even is None else even for _ in range(self._size)]
            for _ in range(self._size)
        ]
        every = [[self._tensor([count, width], dtype) for count in its] for its in rows]
        mine = self._laid_out(torch.cat(every[self._rank]))
        expected = torch.cat([each[self._rank] for each in every])
        output = self._room(expected)
        takes, gives = (
            ([each[self._rank] for each in rows], rows[self._rank]) if even is None else (None, None)
        )
        return Call(
            f"all_to_all_single {rows[self._rank]} {_of(mine)}",
            lambda: dist.all_to_all_single(output, mine, takes, gives, self._group, is_async),
            lambda: same(output, expected),
        )

    def make_gather(self, is_async: bool) -> Call:
        every = self._every(self._shape(70_000), self._chance.choice(ANY))
        mine = self._laid_out(every[self._rank])
        outputs = [self._room(each) for each in every]
        root, name = self._root()
        is_root = root == self._rank
        return Call(
            f"gather to {root} {_of(mine)}",
            lambda: dist.gather(mine, outputs if is_root else None, name, self._group, is_async),
            lambda: all_same(outputs, every) if is_root else None,
        )

    def make_scatter(self, is_async: bool) -> Call:
        every = self._every(self._shape(70_000), self._chance.choice(ANY))
        given = [self._laid_out(each) for each in every]
        output = self._room(every[0])
        root, name = self._root()
        is_root = root == self._rank
        return Call(
            f"scatter from {root} {_of(output)}",
            lambda: dist.scatter(output, given if is_root else None, name, self._group, is_async),
            lambda: same(output, every[self._rank]),
        )

    def make_sparse_all_reduce(self, is_async: bool) -> Call:
        shape = [self._chance.choice([3, 500]), 2]
        every = [
            each * (self._tensor([shape[0], 1], torch.float32) > 2)
            for each in self._every(shape, torch.float32)
        ]
        mine = every[self._rank].to_sparse(self._chance.choice([1, 2]))
        return Call(
            f"all_reduce of sparse {shape}",
            lambda: dist.all_reduce(mine, ReduceOp.SUM, self._group, is_async),
            lambda: same(mine.to_dense(), reduced(ReduceOp.SUM, every)),
        )

    def make_barrier(self, is_async: bool) -> Call:
        return Call("barrier", lambda: dist.barrier(self._group, is_async), lambda: None)

    def make_objects(self, is_async: bool) -> Call:
        values = [{"rank": rank, "x": self._chance.random()} for rank in range(self._size)]
        found: list[Any] = [None] * self._size
        root, name = self._root()
        told: list[Any] = [values[self._rank], None]

        def start() -> None:
            dist.all_gather_object(found, values[self._rank], self._group)
            dist.broadcast_object_list(told, name, self._group)

        def check() -> None:
            assert found == values
            assert told == [values[root], None]

        return Call("objects", start, check)

    def make_sends(self, is_async: bool) -> Call:
        """Each rank sends to each, and receives, all in any order of its own; order within a pair by tag."""
        shapes = [[self._shape(70_000) for _ in range(self._size)] for _ in range(self._size)]
        dtype = self._chance.choice(NUMBERS)
        every = [[self._tensor(shape, dtype) for shape in each] for each in shapes]
        twice = [[self._tensor(shape, dtype) for shape in each] for each in shapes]
        mine, size = self._rank, self._size
        outputs = [[self._room(each[mine]) for each in which] for which in (every, twice)]
        order = [
            (kind, other, tag) for kind in "sr" for other in range(size) for tag in (0, 1) if other != mine
        ]
        random.Random(self._chance.random() + mine).shuffle(order)
        names = [
            dist.get_global_rank(self._group, other) if self._group is not None else other
            for other in range(size)
        ]

        def start() -> list[Any]:
            works = []
            for kind, other, tag in order:
                if kind == "s":
                    data = (every, twice)[tag][mine][other]
                    works.append(dist.isend(data, names[other], self._group, tag))
                else:
                    works.append(dist.irecv(outputs[tag][other], names[other], self._group, tag))
            return works

        def check() -> None:
            for tag, which in enumerate((every, twice)):
                for other in range(size):
                    if other != mine:
                        same(outputs[tag][other], which[other][mine])

        return Call(f"sends of {dtype}", start, check)

    def make_batch(self, is_async: bool) -> Call:
        """Each rank sends to the next, all at once, and receives from the one before."""
        dtype = self._chance.choice(ANY)
        every = [[self._tensor(self._shape(70_000), dtype) for _ in range(3)] for _ in range(self._size)]
        before = (self._rank - 1) % self._size
        outputs = [self._room(each) for each in every[before]]
        if self._size == 1:
            return self.make_barrier(is_async)
        to, source = (self._rank + 1) % self._size, before
        if self._group is not None:
            to, source = (dist.get_global_rank(self._group, each) for each in (to, source))

        def start() -> list[Any]:
            operations = [dist.P2POp(dist.isend, each, to, self._group) for each in every[self._rank]]
            operations += [dist.P2POp(dist.irecv, each, source, self._group) for each in outputs]
            return list(dist.batch_isend_irecv(operations))

        return Call(f"batch of {dtype}", start, lambda: all_same(outputs, every[before]))


def _quietly(function: Callable[..., Any], *args: Any) -> Any:
    """Deprecated functions warn."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args)


def _of(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)} strides {tensor.stride()}"


def reduced(operation: Any, every: Sequence[torch.Tensor]) -> torch.Tensor:
    """What plain PyTorch makes of all ranks' tensors."""
    kernels: dict[Any, Callable[..., torch.Tensor]] = {
        ReduceOp.SUM: torch.add,
        ReduceOp.AVG: torch.add,
        ReduceOp.PRODUCT: torch.mul,
        ReduceOp.MIN: torch.minimum,
        ReduceOp.MAX: torch.maximum,
        ReduceOp.BAND: torch.bitwise_and,
        ReduceOp.BOR: torch.bitwise_or,
        ReduceOp.BXOR: torch.bitwise_xor,
    }
    total = every[0].clone()
    for each in every[1:]:
        total = kernels[operation](total, each)
    return total / len(every) if operation == ReduceOp.AVG else total


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal, of the same dtype and shape; averages up to rounding."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    if found.dtype in EIGHT_BITS:
        found, expected = found.float(), expected.float()
    if found.is_floating_point():
        torch.testing.assert_close(found, expected)
    else:
        differ = (found != expected).nonzero()
        assert not len(differ), f"{len(differ)} of {found.numel()} differ, the first at {differ[0].tolist()}"


def all_same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """As ``same``, of several."""
    for each, one in zip(found, expected, strict=True):
        same(each, one)
