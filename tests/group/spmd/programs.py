"""Random programs of collectives, and processes that run them on farcall and on gloo and compare.

A program is a list of ``Call`` s, drawn by hypothesis. Each worker goes through all of them and makes those
of groups that it is in; as all have the same order, none waits for another in a circle. What a call is to
give is computed first, on gloo: moved as bytes, and reduced as 64-bit numbers, since gloo does not have all
dtypes, and from these brought to the dtype. Data are small whole numbers, so that every dtype gives the
same in any order.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ReduceOp

from tests.support import default_device

__all__ = ["SIZE", "Call", "Runner", "programs"]

SIZE: Final = 8
"""How many processes run programs."""

GROUPS: Final[Sequence[Sequence[int]]] = (
    *[range(size) for size in range(1, SIZE + 1)],
    *([1, 2], [3, 4], [0, 5, 7], [2, 4, 6], [1, 3, 5, 7], [0, 1, 6, 7], [2, 3, 4, 5, 6]),
)
"""Their ranks; some overlap, and some can run at the same time."""

INTEGERS: Final = (torch.int32, torch.int64, torch.uint8, torch.int8, torch.int16)
FLOATS: Final = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
COMPLEX: Final = (torch.complex64, torch.complex128)
EIGHT_BITS: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
NUMBERS: Final = (*FLOATS, *INTEGERS, *COMPLEX)
ALL: Final = (*NUMBERS, *EIGHT_BITS, torch.bool)
ORDERED: Final = (*FLOATS, *INTEGERS, torch.bool)
WHOLE: Final = (*INTEGERS, torch.bool)

REDUCED: Final[dict[str, Sequence[torch.dtype]]] = {
    "SUM": (*NUMBERS, torch.bool),
    "AVG": NUMBERS,
    "PRODUCT": ORDERED,
    "MIN": ORDERED,
    "MAX": ORDERED,
    "BAND": WHOLE,
    "BOR": WHOLE,
    "BXOR": WHOLE,
    "PREMUL_SUM": (*FLOATS, *COMPLEX),
}
"""What can be reduced by what."""

FACTOR: Final = 0.5
MOST_LAG: Final = 3
LAYOUTS: Final = ("contiguous", "transposed", "every other", "in the middle")
COUNTS: Final = (1, 0, 2, 7, 64, 1000, 9000, 20_000, 70_000)


# ---- programs


@dataclass(frozen=True)
class Call:
    """One call, of all ranks of a group.

    Attributes:
        members: the ranks of the world.
        shape: of each tensor, or each part of one.
        uneven: not 0: the first dimension differs from part to part, as this seed says.
        reduction: one of ``REDUCED``.
        root: a rank of the group.
        layout: how tensors lie in memory.
        lag: how many calls later it is waited for; 0 for a blocking call.
    """

    operation: str
    members: Sequence[int]
    dtype: torch.dtype
    shape: Sequence[int]
    uneven: int
    reduction: str
    root: int
    layout: str
    lag: int


@st.composite
def calls(draw: st.DrawFn) -> Call:
    operation = draw(st.sampled_from(sorted(OPERATIONS)))
    members = draw(st.sampled_from(GROUPS))
    reduces = "reduce" in operation
    reduction = draw(st.sampled_from(sorted(REDUCED))) if reduces else ""
    count = draw(st.sampled_from(COUNTS))
    rows = draw(st.sampled_from([1, 2, 3, 5]))
    shape = draw(st.sampled_from([(count,), (rows, -(-count // rows)), (rows, 1, -(-count // rows))]))
    return Call(
        operation,
        tuple(members),
        draw(st.sampled_from(REDUCED[reduction] if reduces else ALL)),
        shape,
        draw(st.integers(0, 3)) if operation in UNEVEN else 0,
        reduction,
        draw(st.integers(0, len(members) - 1)) if operation in ROOTED else 0,
        draw(st.sampled_from(LAYOUTS)),
        draw(st.integers(0, MOST_LAG)),
    )


def programs() -> st.SearchStrategy[list[Call]]:
    """Lists of calls."""
    return st.lists(calls(), min_size=1, max_size=12)


# ---- one call on one rank


@dataclass
class Plan:
    """What one rank does for a call.

    Attributes:
        start: begins it, asynchronously if it is given True; returns what is to be waited for.
        outputs: the tensors that it writes.
        expected: what they are to be then.
        check: what else is to hold then.
    """

    start: Callable[[bool], Any]
    outputs: Sequence[Tensor]
    expected: Sequence[Tensor]
    check: Callable[[], object] = lambda: None


class Seat:
    """One rank's place in a call."""

    def __init__(self, call: Call, number: int, rank: int, ours: Any, gloo: Any) -> None:
        self.call, self.number = call, number
        self.rank, self.size = call.members.index(rank), len(call.members)
        self.root, self.is_root = call.members[call.root], self.rank == call.root
        self.ours, self.gloo = ours, gloo

    def name(self, rank: int) -> int:
        """What the world calls a rank of the group."""
        return self.call.members[rank]

    def shape(self, source: int = 0, to: int = 0) -> Sequence[int]:
        """Of what one rank has for another."""
        rows, *others = self.call.shape
        if self.call.uneven:
            rows = random.Random(f"{self.call.uneven} {source} {to}").randrange(6)
        return rows, *others

    def data(self, to: int = 0, shape: Sequence[int] | None = None) -> Tensor:
        """What this rank has for another; it does not lie in memory as the call says."""
        chance = torch.Generator().manual_seed((self.number * SIZE + self.rank) * SIZE + to)
        whole = tuple(shape or self.shape(self.rank, to))
        return torch.randint(0, 4, whole, generator=chance, device="cpu").to(self.call.dtype)

    def for_each(self) -> list[Tensor]:
        return [self.data(to) for to in range(self.size)]

    def put(self, tensor: Tensor) -> Tensor:
        """A copy on the default device that lies in memory as the call says."""
        tensor = default_device.put(tensor)
        if self.call.layout == "transposed":
            return tensor.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1)
        if self.call.layout == "every other":
            wide = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)
            wide[..., 0] = tensor
            return wide[..., 0]
        if self.call.layout == "in the middle":
            longer = torch.zeros((tensor.shape[0] + 3, *tensor.shape[1:]), dtype=tensor.dtype)
            longer[2:-1] = tensor
            return longer[2:-1]
        return tensor.clone()

    def room(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Tensors to receive into."""
        return [self.put(torch.ones(each.shape).to(each.dtype)) for each in like]

    @property
    def op(self) -> Any:
        if self.call.reduction == "PREMUL_SUM":
            return dist._make_nccl_premul_sum(FACTOR)  # type: ignore[attr-defined]
        return getattr(ReduceOp, self.call.reduction)

    # ---- what gloo makes of it

    def reduced(self, tensor: Tensor, root: int | None = None) -> Tensor:
        """The reduction of all ranks' tensors."""
        call, name = self.call, self.call.reduction
        wide = tensor.to(torch.int64) if call.dtype in WHOLE else tensor
        if call.dtype in FLOATS:
            wide = tensor.to(torch.float64)
        elif call.dtype in COMPLEX:
            wide = torch.view_as_real(tensor.to(torch.complex128)).contiguous()
        wide = wide.clone() * (FACTOR if name == "PREMUL_SUM" else 1)
        op = ReduceOp.SUM if name in ("AVG", "PREMUL_SUM") else self.op
        if root is None:
            dist.all_reduce(wide, op, self.gloo)
        else:
            dist.reduce(wide, root, op, self.gloo)
        if name == "AVG":
            wide = wide.div(self.size, rounding_mode="trunc" if call.dtype in WHOLE else None)
        if call.dtype in COMPLEX:
            wide = torch.view_as_complex(wide)
        return wide.to(call.dtype)

    def bytes_of(self, tensor: Tensor) -> Tensor:
        return tensor.contiguous().view(-1).view(torch.uint8)

    def from_bytes(self, data: Tensor, shape: Sequence[int]) -> Tensor:
        return data.clone().view(self.call.dtype).view(tuple(shape))

    def exchanged(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """What all ranks have for this one, of these shapes, if this one has ``parts`` for them."""
        mine = [self.bytes_of(each) for each in parts]
        wanted = [torch.Size(each).numel() * self.call.dtype.itemsize for each in shapes]
        received = torch.empty(sum(wanted), dtype=torch.uint8, device="cpu")
        gives = [len(each) for each in mine]
        dist.all_to_all_single(received, torch.cat(mine), wanted, gives, self.gloo)
        found = torch.split(received, wanted)
        return [self.from_bytes(each, shape) for each, shape in zip(found, shapes, strict=True)]

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        """All ranks' tensors, of one shape."""
        mine = self.bytes_of(tensor)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine, self.gloo)
        return [self.from_bytes(each, tensor.shape) for each in found]


# ---- operations


def all_reduce(seat: Seat) -> Plan:
    mine = seat.put(seat.data())
    start = lambda later: dist.all_reduce(mine, seat.op, seat.ours, later)  # noqa: E731
    return Plan(start, [mine], [seat.reduced(seat.data())])


def all_reduce_coalesced(seat: Seat) -> Plan:
    every = [seat.data(0), seat.data(1, (3, 2)), seat.data(2)]
    mine = [seat.put(each) for each in every]
    start = lambda later: quietly(dist.all_reduce_coalesced, mine, seat.op, seat.ours, later)  # noqa: E731
    return Plan(start, mine, [seat.reduced(each) for each in every])


def reduce(seat: Seat) -> Plan:
    mine = seat.put(seat.data())
    found = seat.reduced(seat.data(), seat.root)
    return Plan(
        lambda later: dist.reduce(mine, seat.root, seat.op, seat.ours, later),
        [mine],
        [found if seat.is_root else seat.data()],
    )


def reduce_scatter(seat: Seat) -> Plan:
    mine = [seat.put(each) for each in seat.for_each()]
    expected = seat.reduced(torch.stack(seat.for_each()))[seat.rank]
    [output] = seat.room([expected])
    start = lambda later: dist.reduce_scatter(output, mine, seat.op, seat.ours, later)  # noqa: E731
    return Plan(start, [output], [expected])


def reduce_scatter_single(seat: Seat) -> Plan:
    mine = seat.put(torch.cat(seat.for_each()))
    expected = seat.reduced(torch.stack(seat.for_each()))[seat.rank]
    [output] = seat.room([expected])
    start = lambda later: dist.reduce_scatter_tensor(output, mine, seat.op, seat.ours, later)  # noqa: E731
    return Plan(start, [output], [expected])


def broadcast(seat: Seat) -> Plan:
    mine, moved = seat.put(seat.data()), seat.bytes_of(seat.data())
    dist.broadcast(moved, seat.root, seat.gloo)
    expected = seat.from_bytes(moved, seat.shape())
    return Plan(lambda later: dist.broadcast(mine, seat.root, seat.ours, later), [mine], [expected])


def all_gather(seat: Seat) -> Plan:
    data, everybody = seat.data(), range(seat.size)
    shapes = [seat.shape(source, 0) for source in everybody]
    expected = seat.exchanged([data] * seat.size, shapes) if seat.call.uneven else seat.gathered(data)
    outputs, mine = seat.room(expected), seat.put(data)
    return Plan(lambda later: dist.all_gather(outputs, mine, seat.ours, later), outputs, expected)


def all_gather_single(seat: Seat) -> Plan:
    mine, parts = seat.put(seat.data()), seat.gathered(seat.data())
    expected = seat.from_bytes(torch.cat([seat.bytes_of(each) for each in parts]), (seat.size, *mine.shape))
    [output] = seat.room([expected])
    start = lambda later: dist.all_gather_into_tensor(output, mine, seat.ours, later)  # noqa: E731
    return Plan(start, [output], [expected])


def all_gather_coalesced(seat: Seat) -> Plan:
    every = [seat.data(0), seat.data(1, (3, 2))]
    gathered = [seat.gathered(each) for each in every]
    outputs = [seat.room([each[source] for each in gathered]) for source in range(seat.size)]
    mine = [seat.put(each) for each in every]
    return Plan(
        lambda later: quietly(dist.all_gather_coalesced, outputs, mine, seat.ours, later),
        [each for of_rank in outputs for each in of_rank],
        [each[source] for source in range(seat.size) for each in gathered],
    )


def gather(seat: Seat) -> Plan:
    data = seat.data()
    sent = seat.bytes_of(data)
    found = [torch.empty_like(sent) for _ in range(seat.size)] if seat.is_root else None
    dist.gather(sent, found, seat.root, seat.gloo)
    expected = [seat.from_bytes(each, data.shape) for each in found or []]
    outputs, mine = seat.room(expected), seat.put(data)
    start = lambda later: dist.gather(mine, outputs or None, seat.root, seat.ours, later)  # noqa: E731
    return Plan(start, outputs, expected)


def scatter(seat: Seat) -> Plan:
    every = seat.for_each()
    moved = torch.empty_like(seat.bytes_of(every[0]))
    given = [seat.bytes_of(each) for each in every] if seat.is_root else None
    dist.scatter(moved, given, seat.root, seat.gloo)
    expected = seat.from_bytes(moved, every[0].shape)
    [output] = seat.room([expected])
    mine = [seat.put(each) for each in every] if seat.is_root else None
    start = lambda later: dist.scatter(output, mine, seat.root, seat.ours, later)  # noqa: E731
    return Plan(start, [output], [expected])


def all_to_all(seat: Seat) -> Plan:
    mine = [seat.put(each) for each in seat.for_each()]
    expected = seat.exchanged(seat.for_each(), [seat.shape(each, seat.rank) for each in range(seat.size)])
    outputs = seat.room(expected)
    return Plan(lambda later: dist.all_to_all(outputs, mine, seat.ours, later), outputs, expected)


def all_to_all_single(seat: Seat) -> Plan:
    parts = seat.for_each()
    found = seat.exchanged(parts, [seat.shape(each, seat.rank) for each in range(seat.size)])
    gives, takes = [len(each) for each in parts], [len(each) for each in found]
    if not seat.call.uneven:
        gives = takes = []
    expected = join(found)
    [output], mine = seat.room([expected]), seat.put(join(parts))
    return Plan(
        lambda later: dist.all_to_all_single(output, mine, takes, gives, seat.ours, later),
        [output],
        [expected],
    )


def join(parts: Sequence[Tensor]) -> Tensor:
    """``torch.cat``, which does not know all dtypes."""
    if parts[0].dtype not in EIGHT_BITS:
        return torch.cat(list(parts))
    return torch.cat([each.view(torch.uint8) for each in parts]).view(parts[0].dtype)


def barrier(seat: Seat) -> Plan:
    return Plan(lambda later: dist.barrier(seat.ours, later), [], [])


def objects(seat: Seat) -> Plan:
    value = {"rank": seat.rank, "of": seat.call.shape}
    found: list[Any] = [None] * seat.size
    expected: list[Any] = [None] * seat.size
    dist.all_gather_object(expected, value, seat.gloo)

    def check() -> None:
        assert found == expected

    return Plan(lambda later: dist.all_gather_object(found, value, seat.ours), [], [], check)


def sends(seat: Seat) -> Plan:
    """Each sends two messages to each, and receives, all in an order of its own."""
    others = [other for other in range(seat.size) if other != seat.rank]
    expected = seat.exchanged(seat.for_each(), [seat.shape(each, seat.rank) for each in range(seat.size)])
    expected = [expected[each] for each in others]
    outputs = [seat.room(expected), seat.room(expected)]
    order = [(sends, place, tag) for sends in (True, False) for place in range(len(others)) for tag in (0, 1)]
    random.Random(seat.number * SIZE + seat.rank).shuffle(order)

    def start(_: bool) -> list[Any]:
        works = []
        for is_send, place, tag in order:
            other = others[place]
            name, tag_of_call = seat.name(other), 2 * seat.number + tag
            if is_send:
                works.append(dist.isend(seat.put(seat.data(other)), name, seat.ours, tag_of_call))
            else:
                works.append(dist.irecv(outputs[tag][place], name, seat.ours, tag_of_call))
        return works

    return Plan(start, [*outputs[0], *outputs[1]], [*expected, *expected])


def receives_from_any(seat: Seat) -> Plan:
    """All send to the root, which receives from whoever comes."""
    sent = seat.gathered(seat.data())
    outputs = seat.room(sent[1:]) if seat.is_root else []
    works: list[Any] = []

    def start(_: bool) -> list[Any]:
        if not seat.is_root:
            works.append(dist.isend(seat.put(seat.data()), seat.root, seat.ours, seat.number))
        works.extend(dist.irecv(each, None, seat.ours, seat.number) for each in outputs)
        return works

    def check() -> None:
        if seat.is_root:
            sources = [work._source_rank() for work in works]
            assert sorted(sources) == [each for each in range(seat.size) if each != seat.rank]
            for output, source in zip(outputs, sources, strict=True):
                assert_same(output, sent[source])

    return Plan(start, [], [], check)


def batch(seat: Seat) -> Plan:
    """Each sends some to the next, and receives from the one before, in one batch."""
    before, following = (seat.rank - 1) % seat.size, (seat.rank + 1) % seat.size
    expected = seat.gathered(seat.data())[before]
    outputs = seat.room([expected] * 3)
    if seat.size == 1:
        return barrier(seat)

    def start(_: bool) -> list[Any]:
        mine = [seat.put(seat.data()) for _ in range(3)]
        listed = [dist.P2POp(dist.isend, each, seat.name(following), seat.ours, seat.number) for each in mine]
        listed += [
            dist.P2POp(dist.irecv, each, seat.name(before), seat.ours, seat.number) for each in outputs
        ]
        return list(dist.batch_isend_irecv(listed))

    return Plan(start, outputs, [expected] * 3)


OPERATIONS: Final = {
    each.__name__: each
    for each in (
        *(all_reduce, all_reduce_coalesced, reduce, reduce_scatter, reduce_scatter_single, broadcast),
        *(all_gather, all_gather_single, all_gather_coalesced, gather, scatter, all_to_all),
        *(all_to_all_single, barrier, objects, sends, receives_from_any, batch),
    )
}
UNEVEN: Final = ("all_gather", "all_to_all", "all_to_all_single", "sends")
ROOTED: Final = ("reduce", "broadcast", "gather", "scatter", "receives_from_any")


def quietly(function: Callable[..., Any], *args: Any) -> Any:
    """Deprecated functions warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args)


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Equal, of the same dtype and shape; what was rounded, up to rounding."""
    found = default_device.to_cpu(found)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    if found.dtype in EIGHT_BITS:
        found, expected = found.float(), expected.float()
    torch.testing.assert_close(found, expected)


# ---- one worker


class Runner:
    """Runs programs in one of ``SIZE`` processes, all of which run the same.

    Args:
        rank: of the default group, which is farcall's.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._groups: dict[Sequence[int], tuple[Any, Any]] = {}
        self._number = 0

    def run(self, program: Sequence[Call]) -> list[str]:
        """Run a program to its end; returns where farcall gives other than gloo."""
        plans: list[tuple[Call, Plan]] = []
        for call in program:
            ours, gloo = self._groups_of(call.members)
            self._number += 1
            if self._rank in call.members:
                seat = Seat(call, self._number, self._rank, ours, gloo)
                plans.append((call, OPERATIONS[call.operation](seat)))
        wrong: list[str] = []
        ends: list[list[tuple[Call, Plan, Any]]] = [[] for _ in range(len(plans) + MOST_LAG)]
        for place in range(len(ends)):
            if place < len(plans):
                call, plan = plans[place]
                ends[place + call.lag].append((call, plan, plan.start(call.lag > 0)))
            wrong += [text for each in ends[place] if (text := self._end(*each))]
        return wrong

    def _groups_of(self, members: Sequence[int]) -> tuple[Any, Any]:
        """Farcall's group and gloo's of these ranks. All workers ask for all groups, in the same order."""
        if members not in self._groups:
            self._groups[members] = dist.new_group(members), dist.new_group(members, backend="gloo")
        return self._groups[members]

    def _end(self, call: Call, plan: Plan, works: Any) -> str:
        try:
            for work in works if isinstance(works, list) else [works]:
                if work is not None:
                    work.wait()
            for found, expected in zip(plan.outputs, plan.expected, strict=True):
                assert_same(found, expected)
            plan.check()
        except AssertionError as error:
            return f"rank {self._rank}, {call}: {error}"
        except Exception as error:
            error.add_note(f"at rank {self._rank}, in {call}")
            raise
        return ""
