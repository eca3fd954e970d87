"""The random programs themselves: they are reproducible, valid and contain everything."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.fuzz.autograd.features import Feature, features
from tests.fuzz.autograd.generation import generate
from tests.fuzz.autograd.observations import mismatches
from tests.fuzz.autograd.program import Numbers
from tests.fuzz.autograd.reference import run_in_one_process
from tests.fuzz.autograd.session import QUICK_SEEDS
from tests.fuzz.autograd.shrinking import shrink, simpler


def test_a_seed_gives_one_program() -> None:
    for seed in range(50):
        assert generate(seed) == generate(seed)


def test_programs_differ() -> None:
    assert len({str(generate(seed)) for seed in range(50)}) == 50


@pytest.mark.parametrize("feature", Feature, ids=lambda feature: feature.name)
def test_every_feature_is_in_many_of_a_thousand_programs(feature: Feature, counts: Counter[Feature]) -> None:
    assert counts[feature] >= 25


@pytest.fixture(scope="module")
def counts() -> Counter[Feature]:
    return Counter(feature for seed in range(1000) for feature in features(generate(seed)))


def test_every_feature_is_in_the_programs_of_the_quick_run() -> None:
    found = {feature for seed in QUICK_SEEDS for feature in features(generate(seed))}
    assert set(Feature) - found == set()


def test_programs_are_valid_and_most_send_gradients_back() -> None:
    arrivals = []
    for seed in range(100):
        context, _ = run_in_one_process(generate(seed))
        arrivals.append(sum(context.arrivals.values()))
    assert sum(count > 0 for count in arrivals) > 70


def test_running_a_program_twice_gives_the_same_to_the_bit() -> None:
    for seed in range(30):
        program = generate(seed)
        once, twice = run_in_one_process(program), run_in_one_process(program)
        for one, other in zip(once, twice, strict=True):
            assert mismatches(one, other, exact=True) == []


def test_programs_are_of_both_kinds_of_numbers() -> None:
    assert {generate(seed).numbers for seed in range(20)} == set(Numbers)


def test_a_program_is_shown_with_all_its_steps() -> None:
    for seed in range(30):
        program = generate(seed)
        shown = str(program)
        for body in program.bodies:
            for step in body.steps:
                assert str(step) in shown


@pytest.mark.parametrize("feature", [Feature.CHECKPOINT, Feature.COROUTINE, Feature.SPARSE_CROSSING])
def test_shrinking_leaves_only_what_is_needed(feature: Feature) -> None:
    program = next(program for program in map(generate, range(100)) if feature in features(program))
    small = shrink(program, lambda candidate: feature in features(candidate))
    assert feature in features(small)
    assert not any(feature in features(candidate) for candidate in simpler(small))
    assert sum(len(body.steps) for body in small.bodies) < 6
