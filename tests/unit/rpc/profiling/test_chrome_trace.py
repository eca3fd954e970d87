"""Calls in the Chrome traces of PyTorch's profiler are at their places on its clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rpc.profiling.calls import Gathered, Span
from rpc.profiling.chrome_trace import exporting

BASE_US = 1_000_000.0


def event(name: str, ts: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": ts, "dur": 1.0, "pid": 1, "tid": 1}


@pytest.mark.parametrize("ahead", [-50_000.0, 0.0, 50_000.0], ids=lambda us: f"{us:+.0f} us")
def test_a_call_ends_where_it_ended_by_the_clock_that_shows_its_beginning(
    tmp_path: Path, ahead: float
) -> None:
    gathered = Gathered((True, True, True, True), 0)
    at = BASE_US + 100_000
    gathered.spans.append(Span("the call", "sync", 1, at - 2, at + 3, at + 400))
    path = tmp_path / "trace.json"

    def export(to: str) -> None:
        events = [event("the call", 100_000 + ahead), event("the next", 100_410 + ahead)]
        Path(to).write_text(json.dumps({"traceEvents": events, "baseTimeNanoseconds": BASE_US * 1000}))

    exporting(export, gathered)(str(path))
    call, following, *_ = json.loads(path.read_text())["traceEvents"]
    assert call["dur"] == pytest.approx(400, abs=5)
    assert call["ts"] + call["dur"] <= following["ts"]
