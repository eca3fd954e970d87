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
COUNTS = (0, 1, 7, SMALL_BYTES // 8, SMALL_BYTES // 8 + 3, 40_000)


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


def test_rank_that_is_alone_has_its_own_parts() -> None:
    mine = NetworkCollectives(Network(1).channel(0), [0], 0, no_check)
    given, scattered, exchanged = numbers(0, 5), torch.zeros(5).long(), torch.zeros(5).long()
    mine.reduce_scatter(CALL, INFINITE, scattered, [given], SUM)
    mine.all_to_all(CALL, INFINITE, [exchanged], [given])
    assert torch.equal(scattered, given)
    assert torch.equal(exchanged, given)


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


@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_goes_in_pieces_arrives_as_a_whole(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    send_in_short_pieces(monkeypatch)
    network_of_ranks, count = Network(size), 40_003
    ranks = range(size)

    def body(rank: int) -> list[torch.Tensor]:
        mine = NetworkCollectives(network_of_ranks.channel(rank), ranks, rank, no_check)
        total, copied = numbers(rank, count), numbers(rank, count)
        mine.all_reduce(CALL, INFINITE, total, SUM, size)
        mine.broadcast(CALL, INFINITE, copied, 1)
        gathered = [torch.empty(5000 + 700 * each, dtype=torch.int64) for each in ranks]
        mine.all_gather(CALL, INFINITE, gathered, numbers(rank, 5000 + 700 * rank))
        exchanged = [torch.empty(1000 * (rank + 1), dtype=torch.int64) for _ in ranks]
        given = [numbers(rank, 1000 * (each + 1)) for each in ranks]
        mine.all_to_all(CALL, INFINITE, exchanged, given)
        scattered = torch.empty(9001, dtype=torch.int64)
        mine.reduce_scatter(CALL, INFINITE, scattered, parts(rank), SUM)
        return [total, copied, scattered, *gathered, *exchanged]

    def parts(rank: int) -> list[torch.Tensor]:
        return list(numbers(rank, 9001 * size).chunk(size))

    total = torch.stack([numbers(rank, count) for rank in ranks]).sum(0)
    for rank, found in enumerate(in_threads(size, body)):
        gathered = [numbers(each, 5000 + 700 * each) for each in ranks]
        exchanged = [numbers(each, 1000 * (rank + 1)) for each in ranks]
        scattered = torch.stack([parts(each)[rank] for each in ranks]).sum(0)
        wanted = [total, numbers(1, count), scattered, *gathered, *exchanged]
        for mine, expected in zip(found, wanted, strict=True):
            assert torch.equal(mine, expected)
    assert network_of_ranks.is_empty()


@pytest.mark.parametrize("count", [4, 30_000], ids=["short", "long"])
@pytest.mark.parametrize("operation", [ReduceOp.AVG, ReduceOp.PREMUL_SUM], ids=["average", "factor"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_reduce_scatter_leaves_its_inputs_as_they_are(
    size: int, in_place: bool, operation: Any, count: int
) -> None:
    """But for the one that is the output as well."""
    network_of_ranks, ranks = Network(size), range(size)
    chosen = _make_nccl_premul_sum(2.0) if operation == ReduceOp.PREMUL_SUM else operation
    factor = 2.0 if operation == ReduceOp.PREMUL_SUM else 1 / size

    def parts(rank: int) -> list[torch.Tensor]:
        return list(numbers(rank, count * size).double().chunk(size))

    def body(rank: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        mine = NetworkCollectives(network_of_ranks.channel(rank), ranks, rank, no_check)
        inputs = parts(rank)
        output = inputs[rank] if in_place else torch.empty(count, dtype=torch.float64)
        mine.reduce_scatter(CALL, INFINITE, output, inputs, reduction_of(chosen))
        return output, inputs

    for rank, (output, inputs) in enumerate(in_threads(size, body)):
        torch.testing.assert_close(output, torch.stack([parts(each)[rank] for each in ranks]).sum(0) * factor)
        for place, (found, given) in enumerate(zip(inputs, parts(rank), strict=True)):
            assert torch.equal(found, output if in_place and place == rank else given)


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

    def run(self, body: Callable[[Any, int], torch.Tensor]) -> list[torch.Tensor]:
        found = in_threads(self.size, lambda rank: body(self.collectives(rank), rank))
        assert self.network.is_empty()
        return found


DOMAINS = pytest.mark.parametrize(
    "domains",
    [
        [[0], [1]],
        [[0, 1], [2, 3]],
        [[0, 2], [1, 3]],
        [[0, 3, 4], [1], [2, 5]],
        [[0], [1], [2], [3], [4]],
        [[0, 1, 2, 3], [4, 5], [6]],
    ],
    ids=str,
)


@DOMAINS
def test_all_reduce(domains: list[list[int]]) -> None:
    for count in COUNTS:
        hosts = Hosts(domains)
        total = torch.stack([numbers(rank, count) for rank in range(hosts.size)]).sum(0)

        def body(mine: Any, rank: int, count: int = count) -> torch.Tensor:
            tensor = numbers(rank, count)
            mine.all_reduce(CALL, INFINITE, tensor, SUM)
            return tensor

        assert all(torch.equal(each, total) for each in hosts.run(body))


@DOMAINS
def test_all_ranks_have_the_same_bits(domains: list[list[int]]) -> None:
    for count in (100, 50_000):
        hosts = Hosts(domains)

        def body(mine: Any, rank: int, count: int = count) -> torch.Tensor:
            tensor = torch.randn(count, generator=torch.Generator().manual_seed(rank)) * 10.0**rank
            mine.all_reduce(CALL, INFINITE, tensor, SUM)
            return tensor

        first, *others = hosts.run(body)
        assert all(torch.equal(first, each) for each in others)


@DOMAINS
@pytest.mark.parametrize("operation", [ReduceOp.AVG, ReduceOp.MAX])
def test_reduce_to_each_root(domains: list[list[int]], operation: Any) -> None:
    size = sum(map(len, domains))
    for count in (1, 20_000):
        every = torch.stack([numbers(rank, count) for rank in range(size)])
        expected = every.amax(0) if operation == ReduceOp.MAX else every.sum(0).div(size).trunc().long()
        for root in range(size):
            hosts = Hosts(domains)

            def body(mine: Any, rank: int, count: int = count, root: int = root) -> torch.Tensor:
                tensor = numbers(rank, count)
                mine.reduce(CALL, INFINITE, tensor, reduction_of(operation), root)
                return tensor

            found = hosts.run(body)
            for rank, each in enumerate(found):
                assert torch.equal(each, expected if rank == root else numbers(rank, count))


@DOMAINS
@pytest.mark.parametrize("chained_bytes", [schedules.CHAINED_BYTES, 20_000], ids=["", "chain"])
def test_broadcast_from_each_root(
    domains: list[list[int]], chained_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedules, "CHAINED_BYTES", chained_bytes)
    for count in COUNTS:
        for root in range(sum(map(len, domains))):
            hosts = Hosts(domains)

            def body(mine: Any, rank: int, count: int = count, root: int = root) -> torch.Tensor:
                tensor = numbers(rank, count)
                mine.broadcast(CALL, INFINITE, tensor, root)
                return tensor

            assert all(torch.equal(each, numbers(root, count)) for each in hosts.run(body))


def weighted(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([part * (place + 1) for place, part in enumerate(parts)]).sum(0)


@DOMAINS
def test_one_after_the_other_in_any_order(domains: list[list[int]]) -> None:
    hosts = Hosts(domains)
    chance = random.Random(len(domains))
    names = chance.choices(["all_reduce", "broadcast", "all_gather", "all_to_all", "barrier"], k=12)

    def body(mine: Any, rank: int) -> torch.Tensor:
        tensor = numbers(rank, 9000)
        for step, name in enumerate(names):
            if name == "all_reduce":
                mine.all_reduce(CALL, INFINITE, tensor, SUM)
            elif name == "broadcast":
                mine.broadcast(CALL, INFINITE, tensor, step % hosts.size)
            elif name == "all_gather":
                parts = [torch.empty_like(tensor) for _ in range(hosts.size)]
                mine.all_gather(CALL, INFINITE, parts, tensor)
                tensor = weighted(parts)
            elif name == "all_to_all":
                parts = [torch.empty(9000, dtype=torch.int64) for _ in range(hosts.size)]
                given = [tensor + 10 * rank + other for other in range(hosts.size)]
                mine.all_to_all(CALL, INFINITE, parts, given)
                tensor = torch.stack(parts).sum(0)
            else:
                mine.barrier(CALL, INFINITE)
            tensor = tensor % 1013
        return tensor

    found = hosts.run(body)
    state = [numbers(rank, 9000) for rank in range(hosts.size)]
    for step, name in enumerate(names):
        if name == "all_reduce":
            state = [torch.stack(state).sum(0)] * hosts.size
        elif name == "broadcast":
            state = [state[step % hosts.size]] * hosts.size
        elif name == "all_gather":
            state = [weighted(state)] * hosts.size
        elif name == "all_to_all":
            state = [
                torch.stack([each + 10 * source + rank for source, each in enumerate(state)]).sum(0)
                for rank in range(hosts.size)
            ]
        state = [each % 1013 for each in state]
    for each, expected in zip(found, state, strict=True):
        assert torch.equal(each, expected)
