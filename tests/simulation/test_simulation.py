"""Groups live as is promised, whatever goes wrong, and the same each time."""

from __future__ import annotations

import gc
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.simulation.cost import measure, too_steep
from tests.simulation.life import Life, Plan
from tests.simulation.membership import Membership
from tests.simulation.truth import Violation

ROOT: Final = Path(__file__).resolve().parent.parent.parent
PARTS: Final = 20
NIGHTLY: Final = 10_000


@pytest.fixture(autouse=True)
def small_heap() -> Iterator[None]:
    """Runs collect garbage, of which what was there before is none."""
    gc.freeze()
    yield
    gc.unfreeze()


def test_promises_hold_in_many_lives() -> None:
    for seed in range(60):
        Life(Plan.of(seed)).run()


def test_backward_passes_are_exact_or_fail_and_end_whatever_goes_wrong() -> None:
    for seed in range(40):
        Life(Plan.of_backward(seed)).run()


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(PARTS))
def test_promises_hold_in_ten_thousand_lives(part: int) -> None:
    for seed in range(part, NIGHTLY, PARTS):
        try:
            Life(Plan.of(seed)).run()
            Life(Plan.of_backward(seed)).run()
        except Violation as violation:
            violation.add_note(f"python -m tests.simulation --seed {seed} --trace --shrink")
            raise


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_promises_hold_in_a_group_of_hundreds() -> None:
    Life(Plan.of(0, workers=300)).run()


def trace(seed: int) -> list[str]:
    lines: list[str] = []
    Life(Plan.of(seed), lines.append).run()
    return lines


def test_a_seed_says_all_that_happens() -> None:
    assert trace(3) == trace(3)


@pytest.mark.nightly
def test_a_seed_says_all_that_happens_in_any_process() -> None:
    def printed(hashing: str) -> list[str]:
        command = [sys.executable, "-m", "tests.simulation", "--seed", "3", "--trace"]
        environment = {**os.environ, "PYTHONHASHSEED": hashing}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        text = re.sub(r"since about [\d:]+", "since", done.stdout)  # the time of day
        return text.splitlines()[:-1]  # the last line tells how long it took

    assert printed("1") == printed("2")


# ---- dynamic groups in their store


def test_of_a_dynamic_group_one_goes_on_whatever_goes_wrong(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "rpc.rendezvous")  # damage to the log is reported, hundreds of times
    for seed in range(40):
        Membership(seed).run()


# ---- what it costs


def test_what_a_worker_costs_others_does_not_grow_with_the_square() -> None:
    assert too_steep([*measure(8), *measure(32)]) == []
