"""Errors and deaths in the middle of random programs: never a hang, never a context left behind."""

from __future__ import annotations

import pytest

from tests.dist_autograd.faults import lead_through_a_death, lead_through_errors
from tests.dist_autograd.session import WORKERS, Outcome
from tests.serving import serve
from tests.workers import RunWorkers, Worker


def complaints(outcome: Outcome) -> str:
    return "\n".join(outcome.problems)


def test_an_error_in_a_backward_comes_out_and_leaves_nothing_behind(run_workers: RunWorkers) -> None:
    seeds = range(20)

    def first(worker: Worker) -> None:
        lead_through_errors(worker, seeds)

    workers = run_workers.start([first, *[serve] * (WORKERS - 1)])
    for seed in seeds:
        outcome: Outcome = workers[0].wait_for("outcome")
        assert outcome.seed == seed
        assert not outcome.problems, complaints(outcome)
    workers.results()


@pytest.mark.parametrize("seed", range(6))
def test_a_death_in_a_backward_ends_it_and_frees_the_living(run_workers: RunWorkers, seed: int) -> None:
    def last(worker: Worker) -> None:
        lead_through_a_death(worker, seed)

    workers = run_workers.start([*[serve] * WORKERS, last])
    outcome: Outcome = workers[WORKERS].wait_for("outcome")
    assert not outcome.problems, complaints(outcome)
    workers.results()
