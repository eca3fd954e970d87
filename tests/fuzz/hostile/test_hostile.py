"""What has broken something once breaks nothing now, and mutated inputs do not either: a few of each, each
time.
"""

from __future__ import annotations

import warnings

import pytest

from tests.fuzz.hostile import corpus
from tests.fuzz.hostile.campaign import outcome
from tests.fuzz.hostile.cores import TARGETS, Target
from tests.fuzz.hostile.mutation import Mutator
from tests.support.effort import EFFORT

INPUTS = 100 * EFFORT


@pytest.mark.parametrize("part", TARGETS, ids=lambda part: part.name)
def test_what_others_say_breaks_no_rule(part: Target) -> None:
    with warnings.catch_warnings(action="ignore"):
        known = [*part.seeds(), *corpus.load(part.name)]
        mutator = Mutator(seed=EFFORT)
        mutate = mutator.of_values if part.of_values else mutator.of_bytes
        new = [mutate(mutator.chance.choice(known), known) for _ in range(INPUTS)]
        failures = [outcome(part, data) for data in known + new]
    assert [failure for failure in failures if failure is not None] == []
