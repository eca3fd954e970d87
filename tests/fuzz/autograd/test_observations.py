"""The comparison finds what differs: a test that could not fail would be no test."""

from __future__ import annotations

from collections import Counter

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


def test_another_gradient_is_found() -> None:
    actual = observed()
    actual.gradients["worker0 leaf0"] = ONE + 1e-6
    assert len(complaints(actual, exact=False)) == 1


def test_the_last_bit_counts_where_sums_are_exact() -> None:
    actual = observed()
    actual.gradients["worker0 leaf0"] = ONE + 2**-52
    assert len(complaints(actual)) == 1
    assert complaints(actual, exact=False) == []


def test_a_missing_gradient_is_not_the_same_as_zeros() -> None:
    actual = observed()
    actual.gradients["worker0 leaf1"] = 0 * ONE
    assert len(complaints(actual, exact=False)) == 1


def test_a_gradient_too_many_is_found() -> None:
    actual = observed()
    actual.gradients["worker0 unknown"] = ONE
    assert len(complaints(actual)) == 1


def test_a_hook_that_saw_parts_is_found() -> None:
    actual = observed()
    actual.seen["1 hook"][1:2] = [ONE, ONE]
    assert "called 4 times, should be 3" in complaints(actual)[0]


def test_a_hook_that_saw_something_else_is_found() -> None:
    actual = observed()
    actual.seen["1 hook"][2] = ONE
    assert len(complaints(actual)) == 1


def test_a_node_that_ran_twice_is_found() -> None:
    actual = observed()
    actual.executions["1 hook, MulBackward0 #0"] = 2
    assert len(complaints(actual)) == 1


def test_a_message_that_was_left_out_is_found() -> None:
    actual = observed()
    actual.arrivals.clear()
    assert len(complaints(actual)) == 1


def test_another_retained_gradient_is_found() -> None:
    actual = observed()
    actual.retained["2 retain"] = None
    assert len(complaints(actual)) == 1


def test_sparse_and_dense_gradients_are_compared_by_value() -> None:
    actual = observed()
    actual.gradients["worker0 leaf0"] = ONE.to_sparse()
    assert complaints(actual) == []


def test_integers_are_exact_and_others_are_not() -> None:
    assert is_exact(observed())
    assert not is_exact(Observed(gradients={"leaf": ONE / 3}))
    assert not is_exact(Observed(seen={"hook": [ONE * 2**51]}))
