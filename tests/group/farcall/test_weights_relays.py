"""Weight stores on several hosts: a version goes from the store's host once, and on from host to host.

The hosts are simulated: each process takes itself for one, so its weights come in calls, and not through the
memory of this machine. The bytes are those of the tensors that the store's worker sends.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rpc
from farcall.weights import Store
from farcall.weights import transfer as transfer_module
from farcall.weights.copies import Arrival
from tests.support.streams import until
from tests.support.weights import be_on
from tests.support.workers import RunWorkers, Worker, current_worker

BYTES = 1 << 20
BLOCK = 1 << 16


def state(number: int) -> dict[str, torch.Tensor]:
    tensor = torch.arange(BYTES // 8.0 - 1) + number
    return {"scalar": torch.tensor(number), "a": tensor.view(-1, 1), "b": torch.cat([tensor, tensor[:1]])}


def be_a_host(worker: Worker) -> None:
    be_on(worker.name)
    setattr(transfer_module, "_MESSAGE_BYTES", BLOCK)  # noqa: B010


def holds(store: Store, number: int) -> bool:
    into = {name: torch.zeros_like(value) for name, value in state(0).items()}
    found = store.get(into, version=number) == number
    return found and all(torch.equal(into[name], value) for name, value in state(number).items())


def publish_and_count(worker: Worker) -> int:
    be_a_host(worker)
    with worker.group():
        store = Store("policy", on="worker0")
        store.put(1, state(1))
        rpc.barrier()  # the readers begin
        rpc.barrier()
        return int(store.usage()["sent_bytes"])


def read(worker: Worker) -> bool:
    be_a_host(worker)
    with worker.group():
        store = Store("policy", on="worker0")
        rpc.barrier()
        found = holds(store, 1)
        rpc.barrier()
        return found


def test_four_hosts_cost_the_publisher_one_upload(run_workers: RunWorkers) -> None:
    sent, *found = run_workers([publish_and_count, read, read, read, read], 5)
    assert found == [True] * 4
    size = sum(each.nbytes for each in state(1).values())
    assert size <= sent <= 1.3 * size


def publish(worker: Worker) -> None:
    be_a_host(worker)
    worker.join()
    Store("policy", on="worker0").put(1, state(1))
    worker.report("ready")
    worker.wait_for("never")


def stop_after_three(arrival: Arrival, index: int, data: Any) -> None:
    if index == 3:
        current_worker().report("has three")
        current_worker().wait_for("never")
    put(arrival, index, data)


put = Arrival.put


def stop_half_way(worker: Worker) -> None:
    """Get the first blocks of a version, and no more."""
    be_a_host(worker)
    worker.join()
    setattr(Arrival, "put", stop_after_three)  # noqa: B010  # mypy knows another type
    worker.wait_for("read")
    holds(Store("policy", on="worker0"), 1)


def read_from_the_stopped(worker: Worker) -> list[Any]:
    be_a_host(worker)
    worker.join()
    blocks: list[int] = []

    def note(arrival: Arrival, index: int, data: Any) -> None:
        put(arrival, index, data)
        blocks.append(index)
        if index == 2:
            worker.report("has three")

    setattr(Arrival, "put", note)  # noqa: B010  # mypy knows another type
    worker.wait_for("read")
    store = Store("policy", on="worker0")
    found = holds(store, 1)
    until(lambda: not store.usage()["leases"])
    rpc.shutdown(graceful=False)
    return [found, blocks]


@pytest.mark.parametrize("dies", [True, False])
def test_another_source_takes_the_place_of_one_that_is_lost(run_workers: RunWorkers, *, dies: bool) -> None:
    """The relay dies while another host waits for its blocks, or before that one has asked it."""
    workers = run_workers.start([publish, stop_half_way, read_from_the_stopped], 3)
    workers[0].wait_for("ready")
    workers[1].tell("read")
    workers[1].wait_for("has three")
    if not dies:
        workers[1].kill()
    workers[2].tell("read")
    workers[2].wait_for("has three")
    if dies:
        workers[1].kill()
    found, blocks = workers[2].result()
    assert found
    assert blocks == list(range(len(blocks))), "each block comes once"
    workers[0].kill()
