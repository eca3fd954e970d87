"""The comparison finds what differs: a test that could not fail would be no test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from tests.fuzz.autograd.observations import Observed, is_exact, mismatches

ONE = torch.ones(2, dtype=torch.float64)


def observed() -> Observed:
    return Observed(
        gradients={"worker0 leaf0": ONE, "worker0 leaf1": None},
        seen={"1 hook": [ONE, 2 * ONE, None]},
        executions=Counter({"1 hook, MulBackward0 #0": 1}),
        arrivals=Counter({"results of body1": 1}),
        retained={"2 retain": ONE},
        roots=[ONE.sum()],
    )


def complaints(actual: Observed, exact: bool = True) -> list[str]:
    return mismatches(observed(), actual, exact=exact)


def test_equal_ones_match() -> None:
    assert complaints(observed()) == complaints(observed(), exact=False) == []


def test_hooks_may_be_called_in_any_order() -> None:
    actual = observed()
    actual.seen["1 hook"].reverse()
    assert complaints(actual) == []


CHANGES: dict[str, Callable[[Observed], object]] = {
    "another gradient": lambda actual: actual.gradients.update({"worker0 leaf0": ONE + 1e-6}),
    "zeros for a missing gradient": lambda actual: actual.gradients.update({"worker0 leaf1": 0 * ONE}),
    "a gradient too many": lambda actual: actual.gradients.update({"worker0 unknown": ONE}),
    "a hook that saw parts": lambda actual: actual.seen["1 hook"].insert(1, ONE),
    "a hook that saw something else": lambda actual: actual.seen.update({"1 hook": [ONE, 2 * ONE, ONE]}),
    "a node that ran twice": lambda actual: actual.executions.update({"1 hook, MulBackward0 #0": 1}),
    "a message that was left out": lambda actual: actual.arrivals.clear(),
    "another retained gradient": lambda actual: actual.retained.update({"2 retain": None}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("exact", [True, False])
def test_what_differs_is_found(change: Callable[[Observed], object], exact: bool) -> None:
    actual = observed()
    change(actual)
    assert len(complaints(actual, exact)) == 1


def test_the_last_bit_counts_where_sums_are_exact() -> None:
    actual = observed()
    actual.gradients["worker0 leaf0"] = ONE + 2**-52
    assert len(complaints(actual)) == 1
    assert complaints(actual, exact=False) == []


def test_sparse_and_dense_gradients_are_compared_by_value() -> None:
    actual = observed()
    actual.gradients["worker0 leaf0"] = ONE.to_sparse()
    assert complaints(actual) == []


def test_integers_are_exact_and_others_are_not() -> None:
    assert is_exact(observed())
    assert not is_exact(Observed(gradients={"leaf": ONE / 3}))
    assert not is_exact(Observed(seen={"hook": [ONE * 2**51]}))
