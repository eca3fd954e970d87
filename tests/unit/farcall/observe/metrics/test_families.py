"""The metrics of a job, made from the states of its workers; and the queries of the dashboard for Grafana."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from farcall.observe.format.layout import Beat
from farcall.observe.metrics.families import families
from farcall.observe.reading.state import JobState, Process, WorkerState
from farcall.observe.worker.counters import BOUNDS

DASHBOARD = Path(__file__).resolve().parents[5] / "docs" / "grafana.json"

DURATIONS = [[*range(1, len(BOUNDS) + 2)], 2.5]

COUNTERS: dict[str, Any] = {
    "on": True,
    "in_flight": [3, 2],
    "peers": [4, 1, 2, 1],
    "memory": [1 << 20, 1 << 10, 5000, 6000],
    "send_queue": 77,
    "calls": {"torch.add": {"outcomes": {"ok": 12, "timeout": 1}, "seconds": DURATIONS}},
    "requests": {"work": {"outcomes": {"ok": 5, "failed": 2}, "seconds": DURATIONS}},
    "queued": DURATIONS,
    "sent": {"unix": 100, "tcp": 200},
    "received": {"unix": 300},
    "spans": {"SPMD program": [8, 0, 0, 1.5]},
    "collectives": {"all_reduce": [10, 1, 4000, 0.5]},
}


def worker(rank: int, counters: Any, **process: Any) -> WorkerState:
    facts = {"name": f"worker{rank}", "rank": rank, "phase": "running", "pid": 50 + rank, "host": "h"}
    snapshot = {
        "worker": facts,
        "executor": {"threads": 4, "idle_threads": 1, "queued_tasks": 6},
        "rref": {"objects": 9},
        "autograd": {"contexts": 2, "backwards": 1},
        "moved": 90.0,
    }
    if counters is not None:
        snapshot["counters"] = counters
    beat = Beat(1, 99.0, 1000.0, 1234, 567, 8.5)
    return WorkerState(beat, snapshot, Process(**{"alive": True, "memory": 1 << 30} | process), 100.0)


class Fixed(Collector):
    def __init__(self, job: JobState) -> None:
        self.job = job

    def collect(self) -> Iterator[Metric]:
        yield from families(self.job)


def exposed(*workers: WorkerState) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """The samples as a reader of the endpoint gets them."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Fixed(JobState("j", workers)))
    text = generate_latest(registry).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


W = {"worker": "worker0"}


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("farcall_workers", {"state": "running"}, 1),
        ("farcall_workers", {"state": "dead"}, 1),
        ("farcall_worker_up", W, 1),
        ("farcall_worker_up", {"worker": "worker1"}, 0),
        ("farcall_worker_still_seconds", W, 10),
        ("farcall_worker_cpu_seconds_total", W, 8.5),
        ("farcall_calls_made_total", W, 1234),
        ("farcall_requests_taken_total", W, 567),
        ("farcall_calls_in_flight", W, 3),
        (
            "farcall_function_calls_total",
            W | {"function": "torch.add", "outcome": "timeout"},
            1,
        ),
        (
            "farcall_function_call_seconds_bucket",
            W | {"function": "torch.add", "le": "0.001"},
            3,
        ),
        ("farcall_function_call_seconds_sum", W | {"function": "torch.add"}, 2.5),
        (
            "farcall_function_requests_total",
            W | {"function": "work", "outcome": "failed"},
            2,
        ),
        ("farcall_executor_threads", W | {"state": "busy"}, 3),
        ("farcall_sent_bytes_total", W | {"transport": "tcp"}, 200),
        ("farcall_shared_memory_received_bytes_total", W, 6000),
        ("farcall_connections_made_again_total", W, 1),
        ("farcall_rref_objects", W, 9),
        (
            "farcall_collectives_total",
            W | {"operation": "all_reduce", "outcome": "failed"},
            1,
        ),
        ("farcall_collective_bytes_total", W | {"operation": "all_reduce"}, 4000),
        ("farcall_spans_total", W | {"span": "SPMD program", "outcome": "ok"}, 8),
    ],
)
def test_metric_has_the_value_of_the_state(name: str, labels: dict[str, str], value: float) -> None:
    found = exposed(worker(0, COUNTERS), worker(1, COUNTERS, alive=False))
    assert found[name, frozenset(labels.items())] == value


def test_worker_that_counts_nothing_yet_has_the_other_metrics() -> None:
    found = exposed(worker(0, None))
    assert found["farcall_calls_made_total", frozenset(W.items())] == 1234
    assert not any(name.startswith("farcall_function") for name, _ in found)


@pytest.mark.parametrize("part", [*COUNTERS])
@pytest.mark.parametrize(
    "value", [None, 7, "x", [], [1], {"a": 1}, {"a": {"outcomes": 3, "seconds": [[1], 2]}}]
)
def test_damaged_part_is_left_out(part: str, value: object) -> None:
    exposed(worker(0, COUNTERS | {part: value}))


def queries() -> list[str]:
    board = json.loads(DASHBOARD.read_text())
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])] + [
        variable["query"] for variable in board["templating"]["list"] if variable["type"] == "query"
    ]


@pytest.mark.parametrize("query", queries())
def test_query_of_the_dashboard_names_metrics_and_labels_that_there_are(query: str) -> None:
    samples = exposed(worker(0, COUNTERS))
    labels: dict[str, set[str]] = {}
    for name, pairs in samples:
        labels.setdefault(name, set()).update(label for label, _ in pairs)
    used = re.findall(r"farcall_\w+", query)
    assert used
    assert set(used) <= labels.keys()
    grouped = [name.strip() for names in re.findall(r"by \(([\w, ]*)\)", query) for name in names.split(",")]
    matched = re.findall(r'(\w+)(?:=~|!=|=)"', query)
    for name in used:
        assert {*grouped, *matched} <= labels[name], name


def test_dashboard_shows_every_metric() -> None:
    shown = {name for query in queries() for name in re.findall(r"farcall_\w+", query)}
    exposed_names = {name for name, _ in exposed(worker(0, COUNTERS))}
    parts = {re.sub(r"_(count|sum|created)$", "_bucket", name) for name in exposed_names}
    assert parts - shown <= {"farcall_worker_info"}
