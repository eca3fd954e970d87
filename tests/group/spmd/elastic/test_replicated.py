"""Replicated objects in real processes: their workers are killed while others call."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

import pytest
import torch
from torch import nn, optim

import dist_autograd
import rpc
from dist_optim import DistributedOptimizer
from rpc.errors import NameTakenError, RpcTimeoutError, WorkerLostError
from spmd.elastic.errors import ElasticError, StateLostError
from spmd.elastic.replicated.handle import Replicated, _shown
from spmd.elastic.replicated.hosts import hosts
from tests.group.spmd.elastic.test_elastic import init
from tests.support.serving import in_standing_group
from tests.support.workers import RunWorkers, Worker


class Server:
    """Sums what it is sent, and draws random numbers from a generator of its own."""

    def __init__(self) -> None:
        self.total = torch.zeros(3, dtype=torch.float64)
        self.updates = 0
        self.random = torch.Generator().manual_seed(3)
        self.arguments: list[torch.Tensor] = []

    def push(self, gradient: torch.Tensor) -> int:
        self.total += gradient + torch.rand(3, generator=self.random, dtype=torch.float64)
        self.updates += 1
        return self.updates

    def fail(self) -> None:
        self.updates += 1
        raise ValueError(f"update {self.updates} fails")

    def keep_argument(self, gradient: torch.Tensor) -> None:
        self.arguments.append(gradient)

    def kept_arguments(self) -> list[int]:
        return [int(each[0]) for each in self.arguments]

    def look(self) -> tuple[torch.Tensor, int, str]:
        return self.total, self.updates, rpc.get_worker_info().name

    def keep(self) -> Any:
        self.updates += 1
        return threading.Lock()


def expected(updates: int, each: float) -> torch.Tensor:
    random = torch.Generator().manual_seed(3)
    total = torch.zeros(3, dtype=torch.float64)
    for _ in range(updates):
        total += each + torch.rand(3, generator=random, dtype=torch.float64)
    return total


def serve(worker: Worker, name: str = "server") -> None:
    """Keep a copy until the test ends."""
    init(worker)
    Replicated(Server, name=name)
    worker.report("serves")
    worker.wait_for("end")


def wait_for_copies(server: Replicated) -> list[str]:
    """Wait until a worker that stood by has replaced the lost one; return the names."""
    while len(names := server.workers()) < 2:
        pass
    return names


def test_no_update_is_lost_or_doubled_when_servers_are_killed(run_workers: RunWorkers) -> None:
    def train(worker: Worker) -> Any:
        init(worker)
        server = Replicated.find("server")
        for number in range(60):
            server.rpc_sync().push(torch.ones(3, dtype=torch.float64))
            if number == 20:
                worker.report("a third is done", server.workers()[0])
            if number == 40:
                worker.wait_for("killed")
        worker.report("pushed", wait_for_copies(server))
        worker.wait_for("look")
        return server.rpc_sync().look()

    workers = run_workers.start([serve, serve, serve, train, train], 5, time_limit=60)
    servers = {each.name: each for each in workers[:3]}
    servers.pop(workers[3].wait_for("a third is done")).kill()
    for each in workers[3:]:
        each.tell("killed")
    for each in workers[3:]:
        names = each.wait_for("pushed")
    assert set(names) == set(servers)
    servers.pop(names[0]).kill()
    for each in workers[3:]:
        each.tell("look")
    for each in workers[3:]:
        total, updates, name = each.result()
        assert (updates, name) == (120, names[1])
        assert torch.equal(total, expected(120, 1.0))
    servers[names[1]].tell("end")


def test_further_worker_gets_a_copy_with_the_whole_state_and_takes_over(run_workers: RunWorkers) -> None:
    def call(worker: Worker) -> Any:
        init(worker)
        server = Replicated.find("server")
        one = torch.ones(3, dtype=torch.float64)
        answers = [future.wait() for future in [server.rpc_async().push(one) for _ in range(20)]]
        worker.report("pushed")
        worker.wait_for("go on")
        answers += [server.rpc_sync().push(one) for _ in range(5)]
        worker.report("pushed again", wait_for_copies(server))
        worker.wait_for("look")
        return sorted(answers), server.rpc_sync().look()

    workers = run_workers.start([serve, serve, call], 3, time_limit=60)
    workers[2].wait_for("pushed")
    workers[0].kill()
    newcomer = workers.add(serve, name="worker0", rank=0)
    newcomer.wait_for("serves")
    workers[2].tell("go on")
    assert workers[2].wait_for("pushed again") == ["worker1", "worker0"]
    workers[1].kill()
    workers[2].tell("look")
    answers, (total, updates, name) = workers[2].result()
    assert (answers, updates, name) == (list(range(1, 26)), 25, "worker0")
    assert torch.equal(total, expected(25, 1.0))
    newcomer.tell("end")


def test_worker_with_a_copy_calls_it_too_and_may_change_its_arguments_afterwards(
    run_workers: RunWorkers,
) -> None:
    def both(worker: Worker) -> Any:
        init(worker)
        server = Replicated(Server)
        gradient = torch.ones(3, dtype=torch.float64)
        for _ in range(5):
            server.rpc_sync().keep_argument(gradient)
            gradient += 1
        if worker.rank == 1:
            worker.report("pushed")
            worker.wait_for("end")
        elif worker.rank == 0:
            worker.report("pushed")
            worker.wait_for("never")
        return server.rpc_sync().kept_arguments(), server.workers()

    workers = run_workers.start(both, 2, time_limit=60)
    workers.wait_for("pushed")
    workers[0].kill()
    workers[1].tell("end")
    kept, names = workers[1].result()
    assert (sorted(kept), names) == ([1, 1, 2, 2, 3, 3, 4, 4, 5, 5], ["worker1"])


def test_errors_reach_the_caller_and_leave_all_copies_equal(run_workers: RunWorkers) -> None:
    def call(worker: Worker) -> Any:
        init(worker)
        handle = Replicated.find("server")
        server = handle.rpc_sync()
        found: list[str] = []
        for wrong in (
            server.fail,
            server.keep,  # a value that cannot be copied
            lambda: server.push(threading.Lock()),  # an argument that cannot be sent
            lambda: server.push(torch.ones(4, dtype=torch.float64)),
            server.missing,
            lambda: Replicated(nn.Identity, name="server"),
            lambda: Replicated.find("nothing", timeout=0.3),
            lambda: Replicated(Server, copies=9, name="others", timeout=0.3),
        ):
            try:
                wrong()
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
        worker.report("called", (found, handle.workers()))
        worker.wait_for("look")
        return server.look()

    workers = run_workers.start([serve, serve, call], 3, time_limit=60)
    found, names = workers[2].wait_for("called")
    kinds = [each.partition(":")[0] for each in found]
    assert kinds == [
        "ValueError",
        "TypeError",
        "SerializationError",
        "RuntimeError",
        "AttributeError",
        "NameTakenError",
        "RpcTimeoutError",
        "ElasticError",
    ], found
    assert found[0] == "ValueError: update 1 fails"
    assert "only 1 of the 3 workers" in found[-1]
    servers = {each.name: each for each in workers[:2]}
    servers.pop(names[0]).kill()
    workers[2].tell("look")
    _, updates, name = workers[2].result()
    assert (updates, name) == (2, names[1])  # as at the copy that is lost
    servers[name].tell("end")


class Unfit:
    """An object that one worker cannot take over, and whose maker fails where told."""

    def __init__(self) -> None:
        if rpc.get_worker_info().name == "worker0":
            raise OSError("no data here")

    def __setstate__(self, state: Any) -> None:
        if rpc.get_worker_info().name == "worker2":
            raise OSError("no room here")

    def where(self) -> str:
        return rpc.get_worker_info().name


def test_worker_that_cannot_make_or_keep_a_copy_gets_the_error_and_others_do_without(
    run_workers: RunWorkers,
) -> None:
    def keep(worker: Worker) -> Any:
        init(worker)
        if worker.rank:
            with contextlib.suppress(RpcTimeoutError):
                Replicated.find("unfit", timeout=0.1)
        worker.report("there")
        worker.wait_for("begin")
        try:
            handle = Replicated(Unfit, name="unfit", timeout=40)
        except (OSError, ElasticError) as error:
            worker.report("done")
            worker.wait_for("end")
            return type(error).__name__, "no data here" in str(error), "no room here" in str(error)
        where = handle.rpc_sync().where()
        worker.report("done")
        worker.wait_for("end")
        return where

    workers = run_workers.start(keep, 4, time_limit=60)
    workers.wait_for("there")
    workers[0].tell("begin")
    workers[0].wait_for("done")  # it was the only one that could found the object
    for number in (1, 2, 3):
        workers[number].tell("begin")
    for number in (1, 2, 3):
        workers[number].wait_for("done")
    workers.tell("end")
    results = workers.results()
    assert results[0] == ("OSError", True, False)
    founder = results[1]
    assert founder in ("worker1", "worker2", "worker3")
    assert results[3] == founder
    assert results[2] in (founder, ("ElasticError", False, True))  # it need not take over a copy


class Crowded(Server):
    """A server for a copy of which one worker has no room when it is first asked."""

    refused = 0
    kept = threading.Event()

    def __setstate__(self, state: Any) -> None:
        if rpc.get_worker_info().name == "worker2" and not Crowded.refused:
            Crowded.refused += 1
            raise MemoryError
        self.__dict__.update(state)
        Crowded.kept.set()


def test_worker_that_could_not_keep_a_copy_is_asked_again(
    run_workers: RunWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spmd.elastic.replicated.host._REST_SECONDS", (0.1, 1.0))  # of the workers, too

    def keep(worker: Worker) -> int:
        init(worker)
        if worker.name == "worker2":
            Replicated.find("crowded")  # the others have the copies
        handle = Replicated(Crowded, name="crowded")
        worker.report("keeps")
        if worker.name == "worker2":
            worker.wait_for("killed")
            assert Crowded.kept.wait(60)
            while worker.name not in handle.workers():
                pass  # until the copy that is kept is known
            worker.report("keeps a copy")
        worker.wait_for("end")
        return Crowded.refused

    workers = run_workers.start(keep, 3, time_limit=120)
    workers.wait_for("keeps")
    workers[1].kill()
    workers[2].tell("killed")
    workers[2].wait_for("keeps a copy")
    for each in (workers[0], workers[2]):
        each.tell("end")
    assert workers[2].result() == 1


@pytest.mark.parametrize("other", [False, True])
def test_object_whose_copies_are_all_gone_is_lost_for_its_callers_and_can_be_made_again(
    run_workers: RunWorkers, other: bool
) -> None:
    def call(worker: Worker) -> Any:
        init(worker)
        server = Replicated.find("server")
        server.rpc_sync().push(torch.ones(3, dtype=torch.float64))
        worker.report("called", server.workers())
        worker.wait_for("look")
        with pytest.raises(StateLostError, match="are gone: its state is lost"):
            server.rpc_sync().look()
        if other:
            return Replicated(Table, copies=1, name="server").rpc_sync().count()
        again = Replicated(Server, name="server")
        return again.rpc_sync().push(torch.ones(3, dtype=torch.float64)), set(again.workers())

    def stand_by(worker: Worker) -> None:
        init(worker)
        Replicated.find("server")
        Replicated(Server, name="server")
        worker.report("stands by")
        worker.wait_for("end")

    workers = run_workers.start([serve, serve, stand_by, call], 4, time_limit=120)
    assert set(workers[3].wait_for("called")) == {"worker0", "worker1"}
    workers[2].wait_for("stands by")
    for each in workers[:2]:
        each.stop()  # neither can give the other's copy to the one that stands by
    for each in workers[:2]:
        each.kill()
    workers[3].tell("look")
    assert workers[3].result() == (10 if other else (1, {"worker2", "worker3"}))
    workers[2].tell("end")


class Table:
    """An object that is made with an argument."""

    def __init__(self, rows: int = 10) -> None:
        self.rows = rows

    def count(self) -> int:
        return self.rows


def test_object_that_is_made_with_other_arguments_needs_another_name(run_workers: RunWorkers) -> None:
    def make(worker: Worker) -> Any:
        init(worker)
        if worker.rank:
            worker.wait_for("made")
            with pytest.raises(
                NameTakenError, match=r"a Table\(10\) in 1 copies, where this .* Table\(1000\)"
            ):
                Replicated(functools.partial(Table, 1000), copies=1)
            return Replicated(functools.partial(Table, 10), copies=1).rpc_sync().count()
        first, again = (Replicated(functools.partial(Table, 10), copies=1) for _ in range(2))
        with pytest.raises(NameTakenError, match="named 'Table', which another function, or other arguments"):
            Replicated(functools.partial(Table, 1000), copies=1)
        other = Replicated(functools.partial(Table, 1000), copies=1, name="other")
        worker.report("made")
        worker.wait_for("end")
        return [each.rpc_sync().count() for each in (first, again, other)]

    workers = run_workers.start(make, 2, time_limit=60)
    workers[0].wait_for("made")
    workers[1].tell("made")
    assert workers[1].result() == 10
    workers[0].tell("end")
    assert workers[0].result() == [10, 10, 1000]


def test_only_plain_arguments_of_makers_are_compared_between_workers() -> None:
    assert [_shown(each) for each in (1, 2.5, "a", None)] == ["1", "2.5", "'a'", "None"]
    assert {_shown(each) for each in (torch.rand(3), {"b", "a"}, [1], object(), "a" * 2000)} == {"..."}


@in_standing_group()
def test_static_group_has_no_replicated_objects() -> None:
    with pytest.raises(ElasticError, match="needs a dynamic group"):
        Replicated(Server)


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def keep_model(worker: Worker) -> None:
    init(worker)
    Replicated(model, name="model")
    worker.wait_for("end")


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True)


def test_distributed_optimizer_steps_all_copies_exactly_once(run_workers: RunWorkers) -> None:
    def train(worker: Worker) -> Any:
        init(worker)
        handle = Replicated.find("model")
        names = handle.workers()
        optimizer = DistributedOptimizer(optim.Adam, handle.remote_parameters(), lr=0.01)
        repeated = 0
        for step in range(24):
            x, y = batch(step)
            while True:
                try:
                    with dist_autograd.context() as context_id:
                        loss = (handle.rpc_sync().forward(x) - y).square().mean()
                        if step == 8 and not repeated:  # between the forward and the backward pass
                            worker.report("forward", names[0])
                            worker.wait_for("killed")
                        dist_autograd.backward(context_id, [loss])
                        optimizer.step(context_id)
                    break
                except WorkerLostError:
                    repeated += 1
        return handle.rpc_sync().state_dict(), repeated

    workers = run_workers.start([keep_model, keep_model, train], 3, time_limit=60)
    servers = {each.name: each for each in workers[:2]}
    servers.pop(workers[2].wait_for("forward")).kill()
    workers[2].tell("killed")
    state, repeated = workers[2].result()
    alone = model()
    adam = optim.Adam(alone.parameters(), lr=0.01)
    for step in range(24):
        x, y = batch(step)
        adam.zero_grad()
        (alone(x) - y).square().mean().backward()
        adam.step()
    assert repeated == 1
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)
    (survivor,) = servers.values()
    survivor.tell("end")


def kept_optimizers() -> list[bool]:
    """Which optimizers the copy of this worker has, by number."""
    return [each is not None for each in hosts().by_name["model"].machine._optimizers]


def test_optimizer_ends_with_the_worker_that_has_made_it(run_workers: RunWorkers) -> None:
    def make(worker: Worker) -> None:
        init(worker)
        DistributedOptimizer(optim.Adam, Replicated.find("model").remote_parameters(), lr=0.01)
        worker.report("made")
        worker.wait_for("never")

    def go_on(worker: Worker) -> Any:
        init(worker)
        handle = Replicated.find("model")
        worker.wait_for("killed")
        optimizer = DistributedOptimizer(optim.Adam, handle.remote_parameters(), lr=0.01)
        while any(rpc.rpc_sync(each, kept_optimizers)[0] for each in handle.workers()):
            handle.rpc_sync().forward(batch(0)[0])  # until the death is known there
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [handle.rpc_sync().forward(batch(0)[0]).sum()])
            optimizer.step(context_id)
        return [rpc.rpc_sync(each, kept_optimizers) for each in handle.workers()]

    workers = run_workers.start([keep_model, keep_model, make, go_on], 4, time_limit=60)
    workers[2].wait_for("made")
    workers[2].kill()
    workers[3].tell("killed")
    assert workers[3].result() == [[False, True], [False, True]]
    for each in workers[:2]:
        each.tell("end")
