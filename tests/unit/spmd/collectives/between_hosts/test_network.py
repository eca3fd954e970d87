"""Collectives by messages, and of several hosts: ranks are threads, and messages lie where they were sent."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp, _make_nccl_premul_sum  # type: ignore[attr-defined]

from rpc.bulk.shared_memory import memory as shared_memory
from rpc.runtime.blocking import INFINITE
from spmd.collectives.between_hosts import network, operation_messages, schedules
from spmd.collectives.between_hosts.hierarchy import HierarchicalCollectives
from spmd.collectives.between_hosts.network import NetworkCollectives
from spmd.collectives.between_hosts.schedules import SMALL_BYTES
from spmd.collectives.errors import CollectiveError, CollectiveMismatchError
from spmd.collectives.one_host.board import Board, board_bytes
from spmd.collectives.one_host.local import LocalCollectives, header_bytes
from spmd.collectives.reductions import reduction_of
from spmd.collectives.signature import signature
from tests.unit.spmd.collectives.ranks import Network, in_threads

CALL = signature("a test")
SUM = reduction_of(ReduceOp.SUM)


def numbers(rank: int, count: int) -> torch.Tensor:
    return torch.arange(count) * 31 + 1000 * rank + 7


def no_check(rank: int) -> None:
    pass


@pytest.mark.parametrize("count", [5, 6000])
def test_what_is_still_being_sent_does_not_change(count: int) -> None:
    network = Network(2, late=[0])  # both send the tensor that they reduce into

    def body(rank: int) -> torch.Tensor:
        tensor = numbers(rank, count)
        mine = NetworkCollectives(network.channel(rank), [0, 1], rank, no_check)
        mine.all_reduce(CALL, INFINITE, tensor, SUM, 2)
        return tensor

    expected = numbers(0, count) + numbers(1, count)
    assert all(torch.equal(each, expected) for each in in_threads(2, body))


@pytest.mark.parametrize("count", [1, 2, 100, 3000, 400_000])
def test_complex_numbers_of_16_bytes_are_reduced(count: int) -> None:
    network = Network(2)

    def body(rank: int) -> torch.Tensor:
        blocks = [torch.full((count,), complex(rank, 1)).to(torch.complex128) for _ in range(2)]
        output = torch.empty_like(blocks[0])
        NetworkCollectives(network.channel(rank), [0, 1], rank, no_check).reduce_scatter(
            CALL, INFINITE, output, blocks, SUM
        )
        return output

    for each in in_threads(2, body):
        assert torch.equal(each, torch.full((count,), 1 + 2j).to(torch.complex128))


def test_ranks_that_call_different_things_all_find_out() -> None:
    network = Network(2)

    def body(rank: int) -> str:
        mine = NetworkCollectives(network.channel(rank), [0, 1], rank, no_check)
        with pytest.raises(CollectiveMismatchError) as caught:
            mine.all_reduce(signature(f"call{rank}"), INFINITE, numbers(rank, 4), SUM, 2)
        return str(caught.value)

    # each has received the other's before it waits for its own to arrive
    assert in_threads(2, body) == ["rank 0 called call0(), but rank 1 call1()"] * 2


def send_in_short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FIRST", 2000), ("REDUCED", 4000), ("UNCHANGED", 9000)):
        monkeypatch.setattr(network, f"_{name}_BYTES", value)
    for module in (network, operation_messages):
        monkeypatch.setattr(module, "WHOLE_BYTES", 4000)


@pytest.mark.parametrize("late", [100, 5000], ids=["in the first piece", "behind it"])
def test_sizes_that_differ_are_an_error_before_any_tensor_is_touched(
    late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_in_short_pieces(monkeypatch)
    network_of_ranks = Network(2)

    def body(rank: int) -> str:
        mine = NetworkCollectives(network_of_ranks.channel(rank), [0, 1], rank, no_check)
        outputs = [torch.full((late,), -1) for _ in range(2)]
        outputs[rank] = numbers(rank, late + 1 + rank)  # more than the other one expects
        with pytest.raises(CollectiveError) as caught:
            mine.all_gather(CALL, INFINITE, outputs, outputs[rank])
        assert (outputs[1 - rank] == -1).all()
        return str(caught.value)

    assert in_threads(2, body) == [
        f"rank 1 has {8 * late + 16} bytes for rank 0, which expects {8 * late}",
        f"rank 0 has {8 * late + 8} bytes for rank 1, which expects {8 * late}",
    ]


def test_an_output_of_reduce_scatter_is_not_touched_where_ranks_have_called_something_else() -> None:
    network_of_ranks = Network(2)

    def body(rank: int) -> torch.Tensor:
        mine = NetworkCollectives(network_of_ranks.channel(rank), [0, 1], rank, no_check)
        output = torch.full((4,), -1)
        with pytest.raises(CollectiveMismatchError):
            mine.reduce_scatter(signature(f"call{rank}"), INFINITE, output, [numbers(rank, 4)] * 2, SUM)
        return output

    for output in in_threads(2, body):
        assert torch.equal(output, torch.full((4,), -1))


# ---- several hosts


class Hosts:
    """Ranks on some hosts: memory within one, messages between them. For one run: its boards begin at 0.

    Args:
        domains: the ranks of each host.
    """

    def __init__(self, domains: Sequence[Sequence[int]]) -> None:
        self.domains = domains
        self.size = sum(map(len, domains))
        self.network = Network(self.size)
        self._mappings = {}
        for domain in domains:
            size = board_bytes(len(domain), header_bytes(len(domain)))
            descriptor = shared_memory.create(size)
            self._mappings[tuple(domain)] = [shared_memory.Mapping(descriptor, size) for _ in domain]
            os.close(descriptor)

    def collectives(self, rank: int) -> HierarchicalCollectives:
        domain = next(each for each in self.domains if rank in each)
        local = None
        if len(domain) > 1:
            place = domain.index(rank)
            mapping = self._mappings[tuple(domain)][place]
            local = LocalCollectives(Board(mapping, domain, place, header_bytes(len(domain)), no_check))
        return HierarchicalCollectives(self.network.channel(rank), self.domains, rank, local, no_check)

    def run(self, body: Callable[[Any, int], None]) -> None:
        in_threads(self.size, lambda rank: body(self.collectives(rank), rank))
        assert self.network.is_empty()


Results = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Tensors, and what they must be."""


def all_reduce(mine: Any, rank: int, size: int, count: int) -> Results:
    """With the same bits everywhere, also where the order of sums counts."""
    total = numbers(rank, count)
    mine.all_reduce(CALL, INFINITE, total, SUM)
    inexact = torch.randn(count, generator=torch.Generator().manual_seed(rank)) * 10.0**rank
    mine.all_reduce(CALL, INFINITE, inexact, SUM)
    others = [torch.zeros_like(inexact) for _ in range(size)]
    mine.all_gather(CALL, INFINITE, others, inexact)
    return [(total, sum_of(size, count)), *((each, inexact) for each in others)]


def reduce(mine: Any, rank: int, size: int, count: int) -> Results:
    results = []
    for root in some_roots(size):
        for operation, expected in (
            (ReduceOp.AVG, sum_of(size, count).div(size).trunc().long()),
            (ReduceOp.MAX, numbers(size - 1, count)),
        ):
            tensor = numbers(rank, count)
            mine.reduce(CALL, INFINITE, tensor, reduction_of(operation), root)
            results.append((tensor, expected if rank == root else numbers(rank, count)))
    return results


def broadcast(mine: Any, rank: int, size: int, count: int) -> Results:
    results = []
    for root in some_roots(size):
        tensor = numbers(rank, count)
        mine.broadcast(CALL, INFINITE, tensor, root)
        results.append((tensor, numbers(root, count)))
    return results


def all_gather(mine: Any, rank: int, size: int, count: int) -> Results:
    expected = [numbers(each, count + 700 * each) for each in range(size)]
    outputs = [torch.zeros_like(each) for each in expected]
    mine.all_gather(CALL, INFINITE, outputs, expected[rank])
    return list(zip(outputs, expected, strict=True))


def gather_and_scatter(mine: Any, rank: int, size: int, count: int) -> Results:
    results = []
    for root in some_roots(size):
        expected = [numbers(each, count) for each in range(size)]
        outputs, output = [torch.zeros_like(each) for each in expected], torch.zeros_like(expected[0])
        mine.gather(CALL, INFINITE, outputs if rank == root else None, expected[rank], root)
        mine.scatter(CALL, INFINITE, output, expected if rank == root else None, root)
        results += [*(zip(outputs, expected, strict=True) if rank == root else []), (output, expected[rank])]
    return results


def reduce_scatter(mine: Any, rank: int, size: int, count: int) -> Results:
    """With and without a result in place: only the input that is also the output is changed."""
    results = []
    for operation, factor in ((ReduceOp.AVG, 1 / size), (_make_nccl_premul_sum(2.0), 2.0)):
        for in_place in (False, True):
            inputs = [numbers(rank + each, count).double() for each in range(size)]
            kept = [each.clone() for each in inputs]
            output = inputs[rank] if in_place else torch.zeros(count, dtype=torch.float64)
            mine.reduce_scatter(CALL, INFINITE, output, inputs, reduction_of(operation))
            total = torch.stack([numbers(rank + each, count) for each in range(size)]).sum(0).double()
            results.append((output, total * factor))
            kept[rank] = output if in_place else kept[rank]
            results += zip(inputs, kept, strict=True)
    return results


def all_to_all(mine: Any, rank: int, size: int, count: int) -> Results:
    outputs = [torch.zeros(count * (rank + 1), dtype=torch.int64) for _ in range(size)]
    mine.all_to_all(CALL, INFINITE, outputs, [numbers(rank, count * (each + 1)) for each in range(size)])
    return [(found, numbers(each, count * (rank + 1))) for each, found in enumerate(outputs)]


def sum_of(size: int, count: int) -> torch.Tensor:
    return torch.stack([numbers(each, count) for each in range(size)]).sum(0)


def some_roots(size: int) -> list[int]:
    return sorted({0, size // 2, size - 1})


OPERATIONS = (all_reduce, reduce, broadcast, all_gather, gather_and_scatter, reduce_scatter, all_to_all)
DOMAINS = pytest.mark.parametrize(
    "domains",
    [
        *([[rank] for rank in range(size)] for size in (1, 2, 3, 4, 7)),
        [[0, 1], [2, 3]],
        [[0, 2], [1, 3]],
        [[0, 3, 4], [1], [2, 5]],
        *(pytest.param([[rank] for rank in range(size)], marks=pytest.mark.nightly) for size in (5, 6)),
        pytest.param([[0, 1, 2, 3], [4, 5], [6]], marks=pytest.mark.nightly),
    ],
    ids=str,
)


@DOMAINS
@pytest.mark.parametrize("pieces", ["long", "short"])
def test_operations_in_any_order_are_right(
    domains: list[list[int]], pieces: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = [0, 1, SMALL_BYTES // 8, SMALL_BYTES // 8 + 3]
    if pieces == "short":
        send_in_short_pieces(monkeypatch)
        monkeypatch.setattr(schedules, "CHAINED_BYTES", 20_000)
        counts = [20_003]
    hosts = Hosts(domains)
    calls = [(each, count) for each in OPERATIONS for count in counts]
    random.Random(len(domains)).shuffle(calls)

    def body(mine: Any, rank: int) -> None:
        for operation, count in calls:
            for found, expected in operation(mine, rank, hosts.size, count):
                torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)

    hosts.run(body)


@DOMAINS
def test_nobody_is_through_a_barrier_before_all_have_begun(domains: list[list[int]]) -> None:
    hosts = Hosts(domains)
    begun: list[int] = []

    def body(mine: Any, rank: int) -> None:
        for barriers in range(1, 20):
            begun.append(rank)
            mine.barrier(CALL, INFINITE)
            assert len(begun) >= barriers * hosts.size

    hosts.run(body)
