"""Members that a proposer asks to form the groups of a view: if one does not, no other waits for it."""

from __future__ import annotations

import errno
from typing import Any
from unittest.mock import patch

import pytest

import rpc
from rpc.errors import GivenUpError, RpcError
from rpc.runtime.current import current_agent
from spmd.collectives.group import Group
from spmd.elastic import groups, losses
from spmd.elastic.replicas import Replica
from spmd.elastic.views import Views
from tests.group.spmd.elastic.test_elastic import init
from tests.support.streams import until
from tests.support.workers import RunWorkers, Worker, Workers

BALLOT, LATER = (1, 1), (2, 1)


def meet(worker: Worker, places: int) -> tuple[Views, list[int]]:
    """This worker's part of a job whose replicas have so many places, and all members."""
    init(worker)
    me = current_agent().incarnation
    worker.report("here", me)
    members: list[int] = worker.wait_for("members")
    first = worker.rank - worker.rank % places
    views = Views("a job", 1, lambda: iter(()), Replica(tuple(members[first : first + places])))
    views.begin()
    until(lambda: all(map(views.losses.peer, members)))
    views.freeze(BALLOT)
    return views, members


def given_up(worker: Worker, views: Views, members: list[int], kind: type[Exception] = GivenUpError) -> str:
    with pytest.raises(kind) as caught:
        views.install(BALLOT, "a view", members, (), [])
    worker.report("given up")
    worker.wait_for("end")  # it lives until all have given up
    rpc.shutdown()
    return str(caught.value)


def let_meet(workers: Workers) -> None:
    workers.tell("members", workers.wait_for("here"))


@pytest.mark.parametrize("why", ["a later ballot", "a loss", "no descriptors"])
def test_member_that_does_not_install_a_view_is_not_waited_for(run_workers: RunWorkers, why: str) -> None:
    def install(worker: Worker) -> str:
        views, members = meet(worker, 1)
        if worker.rank == 1 and why == "a later ballot":
            views.freeze(LATER)
        elif worker.rank == 1 and why == "no descriptors":
            patch.object(losses, "start_time", side_effect=OSError(errno.EMFILE, "none is left")).start()
            return given_up(worker, views, members, OSError)
        elif worker.rank == 1:
            known = {each: views.losses.peer(each) for each in members[:2]}
            patch.object(views.losses, "peer", known.get).start()
        return given_up(worker, views, members)

    def stay(worker: Worker) -> None:
        meet(worker, 1)
        worker.report("given up")
        worker.wait_for("end")
        rpc.shutdown()

    workers = run_workers.start([install, install, stay])
    let_meet(workers)
    workers.wait_for("given up")
    workers.tell("end")
    assert "rank 1 (worker 'worker1') has given up forming the group" in workers[0].result()
    workers.results()


class FailsOnceFormed(Group):
    """A rank learns of a loss at the end, when the others have formed the group."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.close()
        raise RpcError("a loss")


def test_member_that_does_not_form_all_groups_of_a_view_is_not_waited_for(run_workers: RunWorkers) -> None:
    def install(worker: Worker) -> str:
        views, members = meet(worker, 2)
        if worker.rank == 3:
            patch.object(groups, "Group", FailsOnceFormed).start()
        return given_up(worker, views, members)

    workers = run_workers.start(install, 4)
    let_meet(workers)
    workers.wait_for("given up")
    workers.tell("end")
    results = workers.results()
    assert "rank 1 (worker 'worker3') has given up forming the group" in results[1], results
    assert "rank 1 (worker 'worker3') has given up forming the group" in results[2], results
    assert "rank 1 (worker 'worker1') has given up forming the group" in results[0], results
