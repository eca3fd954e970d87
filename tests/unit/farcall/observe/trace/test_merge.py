"""Traces: the clocks of hosts are aligned by calls, and what processes have recorded becomes one trace."""

from __future__ import annotations

import math
from typing import Any

import msgpack
import pytest

from farcall.observe.trace.clocks import align
from farcall.observe.trace.merge import merge
from farcall.observe.trace.parts import Part, read_part


def part(worker: str, boot: str, records: list[Any], wall: float = 0.0) -> Part:
    return Part(worker, [worker], boot, boot, 1, wall, ["MainThread"] * 2, records, 0)


def call(number: int, sent: float, came: float, answered: float, back: float) -> tuple[list[Any], list[Any]]:
    """The records of a call of ``a`` to ``b``, each on its own clock."""
    return (
        [
            ("call", sent, 1, 0, number, "b", "f", "sync"),
            ("sent", sent, 1, 0, number, 10),
            ("called", back, 1, 0, number, ""),
        ],
        [
            ("came", came, 1, "a", number),
            ("run", came, 1, "a", number, "f", 0.0, 0.0),
            ("ran", answered, 1, "a", number),
            ("answered", answered, 1, "a", number, False, 10),
        ],
    )


def test_clocks_of_hosts_are_aligned_by_the_tightest_calls() -> None:
    # The clock of b is 100 s ahead; a message takes 1 ms there, and 3 ms, or 1 ms in the second call, back.
    calls = [call(1, 0.0, 100.001, 100.002, 0.005), call(2, 1.0, 101.001, 101.002, 1.003)]
    at_a, at_b = ([record for each in calls for record in each[side]] for side in (0, 1))
    found = align([part("a", "host a", at_a), part("b", "host b", at_b, wall=5000.0)])
    assert found["host b"].offset == pytest.approx(-100.0)
    assert found["host b"].error == pytest.approx(0.001)


def test_a_host_between_two_others_aligns_them() -> None:
    at_a, at_b = call(1, 0.0, 100.001, 100.002, 0.003)
    to_c = [("sent", 100.0, 1, 0, 1, 10), ("called", 100.004, 1, 0, 1, "")]
    at_c = [("came", 7.001, 1, "b", 1), ("answered", 7.003, 1, "b", 1, False, 10)]
    found = align([part("a", "x", at_a), part("b", "y", at_b + to_c), part("c", "z", at_c)])
    assert found["z"].offset == pytest.approx(-7.0)
    assert found["z"].error == pytest.approx(0.002)


def test_hosts_that_have_not_called_each_other_are_aligned_by_the_time_of_day() -> None:
    found = align([part("a", "x", [], wall=10.0), part("b", "y", [], wall=30.0)])
    assert found["y"].offset == 30.0
    assert math.isinf(found["y"].error)
    assert merge([part("a", "x", []), part("b", "y", [])]).metadata["clocks"]["y"] == "by the time of day"


def test_arrows_lead_from_a_call_to_its_run_and_back() -> None:
    at_a, at_b = call(1, 1.0, 2.0, 3.0, 4.0)
    made = merge([part("a", "x", at_a), part("b", "x", at_b)])
    arrows = [(event["ph"], event["pid"], event["id"]) for event in made.events() if event["ph"] in "stf"]
    assert sorted(arrows) == [("f", 1, 1), ("s", 1, 1), ("t", 2, 1)]
    slices = {event["name"]: event for event in made.events() if event["ph"] == "X"}
    assert slices["call f"]["ts"] == 0.0
    assert slices["call f"]["dur"] == 3e6
    assert (slices["f"]["ts"], slices["f"]["dur"], slices["f"]["pid"]) == (1e6, 1e6, 2)


def test_arrows_of_calls_with_one_number_are_told_apart_by_their_callers() -> None:
    at_a, at_b = call(1, 1.0, 2.0, 3.0, 4.0)
    at_c = [("came", 2.0, 1, "c", 1), ("run", 2.0, 1, "c", 1, "g", 0.0, 0.0), ("ran", 2.5, 1, "c", 1)]
    made = merge([part("a", "x", at_a), part("b", "x", at_b + at_c), part("c", "x", at_a)])
    arrows = [event["id"] for event in made.events() if event["ph"] == "s"]
    assert len(set(arrows)) == 2
    assert all(each < 1 << 53 for each in arrows)


def test_a_call_without_an_answer_ends_with_the_trace() -> None:
    (begun, *_), _ = call(1, 1.0, 2.0, 3.0, 4.0)
    made = merge([part("a", "x", [begun, ("span", 1.0, 1, "barrier", 9.0, True, {})])])
    (found,) = [event for event in made.events() if event["name"] == "call f"]
    assert found["args"]["error"] == "not answered yet"
    assert not [event for event in made.events() if event["ph"] == "f"]


@pytest.mark.parametrize("damaged", [b"", b"\xc1", bytes(msgpack.packb([1])), bytes(msgpack.packb({"a": 1}))])
def test_what_is_no_part_is_refused(damaged: bytes) -> None:
    with pytest.raises(ValueError, match="not a part of a trace"):
        read_part(damaged)
