"""Errors and deaths in the middle of random programs: never a hang, never a context left behind.

``python -m tests.fuzz.autograd.programs --faults deaths`` (or ``errors``) runs as many as one likes.
"""

from __future__ import annotations

import pytest

from tests.fuzz.autograd.programs import outcomes_with_deaths, outcomes_with_errors
from tests.support.workers import RunWorkers


def test_an_error_in_a_backward_comes_out_and_leaves_nothing_behind(run_workers: RunWorkers) -> None:
    done = list(outcomes_with_errors(run_workers, range(20)))
    problems = [problem for outcome in done for problem in outcome.problems]
    assert not problems, "\n".join(problems)
    assert len(done) == 20


@pytest.mark.parametrize("seed", range(6))
def test_a_death_in_a_backward_ends_it_and_frees_the_living(run_workers: RunWorkers, seed: int) -> None:
    (outcome,) = outcomes_with_deaths(run_workers, [seed])
    assert not outcome.problems, "\n".join(outcome.problems)
