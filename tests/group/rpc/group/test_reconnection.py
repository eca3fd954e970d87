"""Connections that break between living workers: they are made again, and nothing is lost or done twice."""

from __future__ import annotations

import collections
import gc
import threading
from collections.abc import Callable

import pytest
import torch

import dist_autograd
import rpc
from rpc.errors import MessageLostError
from rpc.runtime.current import current_agent
from tests.support import backend
from tests.support.cutting import cut, cutting, reset, until_cut
from tests.support.serving import in_processes
from tests.support.streams import until
from tests.support.workers import RunWorkers, Worker

CUTS = 25

_counts: collections.Counter[int] = collections.Counter()
_counting = threading.Lock()


def count(number: int) -> int:
    with _counting:
        _counts[number] += 1
    return number


def counted() -> dict[int, int]:
    return dict(_counts)


def call_while_cut(worker: Worker, transport: str, how: Callable[[str], None]) -> None:
    with worker.group(rpc_timeout=0, transports=[transport]):
        if worker.rank:
            worker.wait_for("done")
            return
        made = 0
        with cutting("worker1", 0.02, how) as cuts:
            while until_cut(cuts, CUTS):
                futures = [rpc.rpc_async("worker1", count, args=(made + index,)) for index in range(50)]
                assert rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1)).sum() == 4
                assert [future.wait() for future in futures] == list(range(made, made + 50))
                made += 50
        assert rpc.rpc_sync("worker1", counted) == dict.fromkeys(range(made), 1)
        worker.report("done")


@pytest.mark.parametrize(
    ("transport", "how"),
    [(backend.NAME, cut)] if backend.NAME else [("unix", cut), ("tcp", cut), ("tcp", reset)],
)
def test_calls_in_flight_run_exactly_once_however_often_their_connection_breaks(
    run_workers: RunWorkers, transport: str, how: Callable[[str], None]
) -> None:
    workers = run_workers.start(call_while_cut, 2, args=(transport, how))
    workers[0].wait_for("done")
    workers[1].tell("done")
    workers.results()


class Held:
    """Something that a worker has references to."""

    def __init__(self, number: int) -> None:
        self.number = number

    def say(self) -> int:
        return self.number


def held() -> int:
    gc.collect()
    return sum(type(each) is Held for each in gc.get_objects())


def number_of(reference: rpc.RRef[Held]) -> int:
    number: int = reference.rpc_sync(timeout=0).say()
    return number


def refer_and_differentiate_while_cut(worker: Worker) -> None:
    with worker.group(rpc_timeout=0):
        if worker.rank:
            worker.wait_for("done")
            return
        with cutting("worker1", 0.02) as cuts:
            while until_cut(cuts, CUTS):
                made = [rpc.remote("worker1", Held, args=(index,)) for index in range(5)]
                assert [number_of(each) for each in made] == list(range(5))
                assert [rpc.rpc_sync("worker1", number_of, args=(each,)) for each in made] == list(range(5))
                weight = torch.ones(3, requires_grad=True)
                with dist_autograd.context() as context:
                    product = rpc.rpc_sync("worker1", torch.mul, args=(weight, 3 * torch.ones(3)))
                    dist_autograd.backward(context, [product.sum()])
                    (gradient,) = dist_autograd.get_gradients(context).values()
                assert gradient.equal(3 * torch.ones(3))
        del made
        until(lambda: rpc.rpc_sync("worker1", held) == 0)  # none is leaked
        worker.report("done")


def test_references_and_gradients_are_exact_while_their_connection_breaks(run_workers: RunWorkers) -> None:
    workers = run_workers.start(refer_and_differentiate_while_cut, 2)
    workers[0].wait_for("done")
    workers[1].tell("done")
    workers.results()


def total(tensor: torch.Tensor) -> float:
    return float(tensor.sum())


def send_large_while_cut(worker: Worker, stripes: int) -> None:
    """Over a network, as it were: nothing goes through shared memory."""
    options = {"transports": [backend.BETWEEN_HOSTS], "shared_memory_bytes": 0, "tcp_stripes": stripes}
    with worker.group(rpc_timeout=0, **options):
        if worker.rank:
            worker.wait_for("done")
            return
        tensor = torch.ones(1 << 20)
        arrived = lost = 0
        with cutting("worker1", 0.03) as cuts:
            while until_cut(cuts, CUTS):
                try:
                    echoed = rpc.rpc_sync("worker1", torch.mul, args=(tensor, 2))
                except MessageLostError:  # whose text says whether the call ran
                    lost += 1
                else:
                    arrived += 1
                    assert echoed.equal(2 * tensor)  # none is torn
        rpc.rpc_sync("worker1", int)  # when this is answered they are connected again
        assert rpc.rpc_sync("worker1", total, args=(tensor,)) == 1 << 20
        worker.report("done", (arrived, lost))


@pytest.mark.parametrize("stripes", [1, 3])
def test_a_large_message_arrives_whole_or_its_call_says_what_became_of_it(
    run_workers: RunWorkers, stripes: int
) -> None:
    workers = run_workers.start(send_large_while_cut, 2, args=(stripes,))
    workers[0].wait_for("done")
    workers[1].tell("done")
    workers.results()


@in_processes(2)
def test_bulk_messages_are_sent_again_from_where_they_lie(worker: Worker) -> None:
    """What collectives between hosts are made of."""
    with worker.group(rpc_timeout=0, transports=[backend.BETWEEN_HOSTS], shared_memory_bytes=0):
        agent = current_agent()
        other = agent.group.peers.find(f"worker{1 - worker.rank}")
        for number in range(60):
            mine, theirs = torch.full((1 << 18,), float(number)), torch.empty(1 << 18)
            posted = agent.messages.bulk.post(other, 7, theirs.numpy())
            sent = agent.messages.bulk.send(other, 7, mine.numpy())
            if worker.rank == 0 and number % 3 == 0:
                cut(other.name)
            posted.wait(timeout=60)
            sent.wait(timeout=60)
            assert theirs.equal(mine)
