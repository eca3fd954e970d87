"""Traces of whole steps in Perfetto's own trace processor: spans and arrows are counted by SQL queries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.group.farcall.test_trace_steps import (
    MICRO_BATCHES,
    STEPS,
    TRAINERS,
    drive_spmd,
    run_pipeline,
    serve_parameters,
)
from tests.support.trace_processor import query
from tests.support.workers import RunWorkers

pytestmark = [pytest.mark.processes, pytest.mark.nightly]

SPANS = """
    select process.name, slice.name, count(*) from slice
    join thread_track on slice.track_id = thread_track.id
    join thread using (utid) join process using (upid) group by 1, 2
"""
"""Spans of threads by worker and name."""

ARROWS = """
    select begin.name, end.name, count(*) from flow
    join slice begin on flow.slice_out = begin.id join slice end on flow.slice_in = end.id group by 1, 2
"""
"""Arrows by the names of the spans at their begin and end."""

LOST = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
TRANSFERS = """
    select count(*), sum(extract_arg(arg_set_id, 'args.bytes') >= 0) from slice where category = 'transfer'
"""


def counted(trace: Path) -> tuple[dict[tuple[str, str], int], dict[tuple[str, str], int]]:
    """Spans by worker and name, and arrows by names; nothing of the trace may be lost."""
    spans, arrows, lost, transfers = query(trace, SPANS, ARROWS, LOST, TRANSFERS)
    assert lost == []
    ((number, with_bytes),) = transfers
    assert number == with_bytes > 0
    by_worker: dict[tuple[str, str], int] = {}
    for process, name, count in spans:
        key = (process.partition(" ")[0], name)
        by_worker[key] = by_worker.get(key, 0) + count
    return by_worker, {(begin, end): count for begin, end, count in arrows}


def test_a_parameter_servers_step(run_workers: RunWorkers, tmp_path: Path) -> None:
    run_workers(serve_parameters, TRAINERS + 1)
    spans, arrows = counted(tmp_path / "run.json")
    for name in ("Server.weights", "Server.push"):
        assert spans["worker0", name] == arrows[f"call {name}", name] == STEPS * TRAINERS
        assert arrows[name, f"answer of {name}"] == STEPS * TRAINERS
        for trainer in ("worker1", "worker2"):
            assert spans[trainer, f"call {name}"] == spans[trainer, f"serialize {name}"] == STEPS
    assert arrows["call train", "train"] == TRAINERS


def test_a_pipelines_step(run_workers: RunWorkers, tmp_path: Path) -> None:
    run_workers(run_pipeline, 3)
    spans, arrows = counted(tmp_path / "run.json")
    for stage in ("worker1", "worker2"):
        assert spans[stage, "Stage.forward"] == STEPS * MICRO_BATCHES
        assert spans[stage, "optimizer step"] == spans[stage, "gradients"] == STEPS
    assert spans["worker0", "distributed backward"] == STEPS
    assert arrows["call Stage.forward", "Stage.forward"] == 2 * STEPS * MICRO_BATCHES
    assert arrows["Stage.forward", "answer of Stage.forward"] == 2 * STEPS * MICRO_BATCHES


def test_an_spmd_step(run_workers: RunWorkers, tmp_path: Path) -> None:
    run_workers(drive_spmd, 3)
    spans, arrows = counted(tmp_path / "run.json")
    for worker in ("worker1", "worker2"):
        assert spans[worker, "SPMD program"] == spans[worker, "all_reduce(sum, float32[])"] == STEPS
    assert spans["worker0", "an SPMD step"] >= STEPS
    runs = sum(count for (_, name), count in spans.items() if name == "ServedWorker.do")
    assert arrows["call ServedWorker.do", "ServedWorker.do"] == runs > 0
    assert arrows["ServedWorker.do", "answer of ServedWorker.do"] == runs
    lines: Any = query(
        tmp_path / "run.json",
        "select extract_arg(arg_set_id, 'args.lines') from slice where name = 'an SPMD step'",
    )
    assert sum("operations" in line and "test_trace_steps.py:" in line for (line,) in lines[0]) == STEPS
