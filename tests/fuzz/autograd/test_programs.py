"""Gradients are exact: random programs over real workers, beside the same in one process.

``make test-more`` runs a few; ``python -m tests.fuzz.autograd.programs`` as many as one likes.
"""

from __future__ import annotations

import pytest

from tests.fuzz.autograd.programs import outcomes, outcomes_with_errors
from tests.fuzz.autograd.session import QUICK_SEEDS
from tests.support.devices import device_kind
from tests.support.workers import RunWorkers

__all__ = ["device_kind"]

AT_ONCE = range(60, 100)


@pytest.mark.nightly
def test_programs_at_once_do_not_disturb_each_other(run_workers: RunWorkers) -> None:
    done = list(outcomes(run_workers, AT_ONCE, at_once=4))
    problems = [problem for outcome in done for problem in outcome.problems]
    assert not problems, "\n".join(problems)
    assert len(done) == len(AT_ONCE)


def test_random_programs_match_the_same_in_one_process(run_workers: RunWorkers) -> None:
    done = list(outcomes(run_workers, QUICK_SEEDS))
    problems = [problem for outcome in done for problem in outcome.problems]
    assert not problems, "\n".join(problems)
    assert sorted(outcome.seed for outcome in done) == list(QUICK_SEEDS)
    assert sum(outcome.arrivals for outcome in done) > 100


def test_an_error_in_a_backward_comes_out_and_leaves_nothing_behind(run_workers: RunWorkers) -> None:
    done = list(outcomes_with_errors(run_workers, range(20)))
    problems = [problem for outcome in done for problem in outcome.problems]
    assert not problems, "\n".join(problems)
    assert len(done) == 20


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["random", "lazy"])
def test_programs_on_devices_match_the_same_in_one_process(
    run_workers: RunWorkers, device_kind: str, mode: str
) -> None:
    done = list(outcomes(run_workers, QUICK_SEEDS, mode=mode))
    problems = [problem for outcome in done for problem in outcome.problems]
    assert not problems, "\n".join(problems)
    assert len(done) == len(QUICK_SEEDS)
