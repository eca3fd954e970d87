"""What a callee tells of its part in a profile is looked at before PyTorch's tables get it."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from torch.autograd.profiler_util import EventList, FunctionEvent

from rpc.profiling.calls import Gathered, Span, _event

GOOD: dict[str, Any] = {
    "name": "aten::mul",
    "thread": 1,
    "start": 1000.0,
    "end": 1100.5,
    "fwd_thread": None,
    "input_shapes": [[2, 3], []],
    "stack": ["a line"],
    "scope": 0,
    "cpu_memory_usage": 64,
    "is_async": False,
    "is_remote": False,
    "sequence_nr": -1,
    "node_id": 1,
    "flops": None,
}


def merged(answer: Any) -> list[FunctionEvent]:
    """The events of a profile with one call, of which the callee has told this."""
    gathered = Gathered((True, True, True, True), 0)
    gathered.spans.append(Span("the call", "sync", 1, 900.0, 900.0, 1200.0, answer))
    place = _event([{**GOOD, "name": "the call", "flops": 0}[name] for name in GOOD])
    return gathered.merged([place], 0.0)


def answer(start: Any = 1000.0, end: Any = 1100.5, **changes: Any) -> str:
    return json.dumps([start, end, [list((GOOD | changes).values())]])


def test_what_a_callee_tells_is_shown() -> None:
    events = merged(answer())
    assert [event.name for event in events] == ["the call", "the call#remote_op: aten::mul"]
    table = EventList(events, profile_memory=True, with_flops=True)  # type: ignore[no-untyped-call]
    assert "aten::mul" in table.table()  # type: ignore[no-untyped-call]


MALFORMED: dict[str, Any] = {
    "no text": 7,
    "no JSON": "[",
    "nested too deeply": "[" * 100_000,
    "no list": "3",
    "no events": json.dumps([1.0, 2.0, 3]),
    "an event that is none": json.dumps([1.0, 2.0, [3]]),
    "a short event": json.dumps([1.0, 2.0, [[3]]]),
    "a beginning that is none": answer(start="x"),
    "a beginning that is a list": answer(start=[]),
    "an infinite end": answer(end=float("inf")),
    "a huge end": answer(end=10**400),
    "no time": answer(start=float("nan")),
    **{f"{name}: a map": answer(**{name: {}}) for name in GOOD},
    **{f"{name}: a huge number": answer(**{name: 10**400}) for name in GOOD},
    **{f"{name}: not a number": answer(**{name: float("nan")}) for name in GOOD},
    **{f"{name}: a deep list": answer(**{name: [[[[[1]]]]]}) for name in GOOD},
}


@pytest.mark.parametrize("said", MALFORMED.values(), ids=MALFORMED)
def test_what_makes_no_sense_is_left_out_and_the_table_is_made(
    said: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        events = merged(said)
    assert [event.name for event in events] == ["the call"]
    assert caplog.messages == ["worker 1 has sent a malformed profile of the call"]
    table = EventList(events, profile_memory=True, with_flops=True)  # type: ignore[no-untyped-call]
    assert "the call" in table.table()  # type: ignore[no-untyped-call]
