"""The metrics of a job's workers, for Prometheus: views of their states. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from farcall.observe.reading.figures import row_of, state_of
from farcall.observe.reading.state import JobState, WorkerState, items, number, whole
from farcall.observe.reading.stores import stores_of
from farcall.observe.worker.counters import BOUNDS, EXTENSION

__all__ = ["families"]

STATES: Final = ("starting", "joining", "running", "leaving", "left", "dead", "stopped", "traced", "frozen")
"""States of workers; any other counts as "unknown"."""

_BOUNDS: Final = (*map(str, BOUNDS), "+Inf")


def families(job: JobState) -> list[Metric]:
    """Return all metrics of a job. Each except ``farcall_workers`` has the label ``worker``."""
    workers = list(job)
    return [
        *_of_processes(job, workers),
        *_of_calls(workers),
        *_of_queues(workers),
        *_of_peers(workers),
        *_of_bytes(workers),
        *_of_objects(workers),
        *_of_weights(job),
        *_of_sums(workers, "collectives", "collective", "operation", "Collectives"),
        *_of_sums(workers, "spans", "span", "span", "Spans, such as steps of optimizers and SPMD programs,"),
    ]


def _of_processes(job: JobState, workers: list[WorkerState]) -> Iterator[Metric]:
    states = GaugeMetricFamily("farcall_workers", "Workers of the job by state.", labels=["state"])
    counts = [_state(each) for each in workers]
    for state in (*STATES, "unknown"):
        states.add_metric([state], counts.count(state))
    yield states
    info = InfoMetricFamily("farcall_worker", "Who a worker is.", labels=["worker"])
    for each in workers:
        facts = {"job": job.id, "rank": str(each.rank), "host": each.host, "pid": str(each.pid)}
        info.add_metric([each.name], facts)
    yield info
    yield _gauge("worker_up", "1 if the process lives and its interpreter runs.", _each(workers, _is_up))
    rows = [(each, row_of(each)) for each in workers]
    yield _gauge(
        "worker_oldest_wait_seconds",
        "Age of the oldest call or operation of a group that a worker waits for.",
        [([each.name], row.oldest) for each, row in rows],
    )
    yield _gauge("worker_still_seconds", "Time since anything has moved in a worker.", _each(workers, _still))
    yield _gauge(
        "worker_resident_bytes",
        "Resident memory.",
        [([each.name], row.memory) for each, row in rows if row.memory],
    )
    yield _counter("worker_cpu_seconds", "CPU time.", _of_beats(workers, "processor"))


def _of_calls(workers: list[WorkerState]) -> Iterator[Metric]:
    yield _counter("calls_made", "Calls and other requests made.", _of_beats(workers, "calls"))
    yield _counter("requests_taken", "Requests of others taken in.", _of_beats(workers, "requests"))
    for index, (name, text) in enumerate((("calls", "Calls made"), ("requests", "Requests of others"))):
        samples = [([each.name], _at(_part(each, "in_flight"), index)) for each in workers]
        yield _gauge(f"{name}_in_flight", f"{text}, not answered yet.", samples)
    for name, text in (("calls", "Calls made that have ended"), ("requests", "Requests of others answered")):
        outcomes = CounterMetricFamily(
            f"farcall_function_{name}", f"{text}.", labels=["worker", "function", "outcome"]
        )
        seconds = HistogramMetricFamily(
            f"farcall_function_{name[:-1]}_seconds", f"Duration of: {text}.", labels=["worker", "function"]
        )
        for worker in workers:
            for function, counted in _mapping(_part(worker, name)).items():
                if isinstance(counted, Mapping):
                    for outcome, count in _mapping(counted.get("outcomes")).items():
                        outcomes.add_metric([worker.name, str(function), str(outcome)], number(count))
                    _add_durations(seconds, [worker.name, str(function)], counted.get("seconds"))
        yield outcomes
        yield seconds
    queued = HistogramMetricFamily(
        "farcall_request_queued_seconds", "From a request to its run.", labels=["worker"]
    )
    for worker in workers:
        _add_durations(queued, [worker.name], _part(worker, "queued"))
    yield queued


def _of_queues(workers: list[WorkerState]) -> Iterator[Metric]:
    threads = GaugeMetricFamily(
        "farcall_executor_threads", "Threads that run requests.", labels=["worker", "state"]
    )
    queued = []
    for worker in workers:
        counts = _mapping(worker.snapshot.get("executor"))
        if counts:
            idle = whole(counts.get("idle_threads"))
            threads.add_metric([worker.name, "idle"], idle)
            threads.add_metric([worker.name, "busy"], max(0, whole(counts.get("threads")) - idle))
            queued.append(([worker.name], whole(counts.get("queued_tasks"))))
    yield threads
    yield _gauge("executor_queued_tasks", "Tasks that wait for a thread.", queued)
    samples = [([each.name], number(_part(each, "send_queue"))) for each in _counting(workers)]
    yield _gauge("send_queue_bytes", "Bytes that wait to be written to connections.", samples)


def _of_peers(workers: list[WorkerState]) -> Iterator[Metric]:
    connected = [
        ([each.name], sum(peer.get("connected") is True and not peer.get("self") for peer in each.peers))
        for each in workers
    ]
    yield _gauge("connected_peers", "Other workers that a worker is connected to.", connected)
    for index, (name, text) in enumerate(
        (
            ("peers_joined", "Other workers that have become known."),
            ("peers_lost", "Other workers that are gone: they have left, died or been cut off."),
            ("connections_broken", "Connections that broke."),
            ("connections_made_again", "Connections that broke and were made again."),
        )
    ):
        yield _counter(name, text, _indexed(workers, "peers", index))


def _of_bytes(workers: list[WorkerState]) -> Iterator[Metric]:
    for name, text in (("sent", "Bytes sent in messages"), ("received", "Bytes received in messages")):
        samples = [
            ([each.name, str(transport)], number(size))
            for each in workers
            for transport, size in _mapping(_part(each, name)).items()
        ]
        yield _counter(f"{name}_bytes", f"{text}, by transport of the connection.", samples, "transport")
    for index, (name, text) in enumerate(
        (
            ("shared_memory_bytes", "Shared memory that a worker sends through."),
            ("shared_memory_lent_bytes", "The part of it that receivers still use."),
        )
    ):
        yield _gauge(name, text, _indexed(workers, "memory", index))
    for index, direction in enumerate(("sent", "received"), 2):
        yield _counter(
            f"shared_memory_{direction}_bytes",
            f"The part of the bytes {direction} that went through shared memory.",
            _indexed(workers, "memory", index),
        )


def _of_objects(workers: list[WorkerState]) -> Iterator[Metric]:
    for part, field, name, text in (
        ("rref", "objects", "rref_objects", "Objects that a worker owns for references."),
        ("autograd", "contexts", "autograd_contexts", "Contexts of distributed autograd."),
        ("autograd", "backwards", "autograd_backwards", "Backward passes under way."),
    ):
        found = [(each, _mapping(each.snapshot.get(part))) for each in workers]
        samples = [([each.name], whole(counts.get(field))) for each, counts in found if counts]
        yield _gauge(name, text, samples)


def _of_weights(job: JobState) -> Iterator[Metric]:
    labels = ["worker", "store"]
    stores = [each for each in stores_of(job) if not each.copy]
    for name, text in (
        ("newest_version", "Number of the newest version of a weight store."),
        ("versions", "Whole versions of a weight store."),
        ("newest_age_seconds", "Time since the newest version became whole."),
        ("bytes", "Memory of a weight store."),
        ("leases", "Leases of versions."),
    ):
        family = GaugeMetricFamily(f"farcall_weights_{name}", text, labels=labels)
        for each in stores:
            newest = each.versions[-1] if each.versions else None
            values = {
                "newest_version": None if newest is None else newest.number,
                "versions": len(each.versions),
                "newest_age_seconds": None if newest is None else newest.age,
                "bytes": each.bytes,
                "leases": sum(len(version.leases) for version in each.versions),
            }
            if values[name] is not None:
                family.add_metric([each.worker, each.name], number(values[name]))
        yield family
    for name, text in (
        ("sent", "that went to other hosts"),
        ("received", "that came from other hosts"),
        ("saved", "that did not go to other hosts, as only differences did"),
    ):
        what = f"Bytes of versions {text}."
        counter = CounterMetricFamily(f"farcall_weights_{name}_bytes", what, labels=labels)
        for each in stores:
            counter.add_metric([each.worker, each.name], getattr(each, name))
        yield counter


def _of_sums(workers: list[WorkerState], part: str, name: str, label: str, text: str) -> Iterator[Metric]:
    ended = CounterMetricFamily(
        f"farcall_{name}s", f"{text} that have ended.", labels=["worker", label, "outcome"]
    )
    seconds = CounterMetricFamily(f"farcall_{name}_seconds", f"{text}: duration.", labels=["worker", label])
    sizes = CounterMetricFamily(f"farcall_{name}_bytes", f"{text}: size of inputs.", labels=["worker", label])
    for worker in workers:
        for operation, counted in _mapping(_part(worker, part)).items():
            count, failed, size, duration = (number(_at(counted, n)) for n in range(4))
            ended.add_metric([worker.name, str(operation), "ok"], count - failed)
            ended.add_metric([worker.name, str(operation), "failed"], failed)
            seconds.add_metric([worker.name, str(operation)], duration)
            sizes.add_metric([worker.name, str(operation)], size)
    yield ended
    yield seconds
    if part == "collectives":
        yield sizes


# ---- parts


def _gauge(name: str, text: str, samples: Iterable[tuple[list[str], Any]]) -> Metric:
    family = GaugeMetricFamily(f"farcall_{name}", text, labels=["worker"])
    for labels, value in samples:
        family.add_metric(labels, number(value))
    return family


def _counter(name: str, text: str, samples: Iterable[tuple[list[str], Any]], *labels: str) -> Metric:
    family = CounterMetricFamily(f"farcall_{name}", text, labels=["worker", *labels])
    for values, value in samples:
        family.add_metric(values, number(value))
    return family


def _each(workers: list[WorkerState], value: Callable[[WorkerState], float]) -> list[tuple[list[str], Any]]:
    return [([each.name], value(each)) for each in workers]


def _of_beats(workers: list[WorkerState], field: str) -> list[tuple[list[str], Any]]:
    return [([each.name], getattr(each.beat, field)) for each in workers if each.beat is not None]


def _indexed(workers: list[WorkerState], part: str, index: int) -> list[tuple[list[str], Any]]:
    return [([each.name], _at(_part(each, part), index)) for each in _counting(workers)]


def _counting(workers: list[WorkerState]) -> list[WorkerState]:
    """Return the workers that have had an agent."""
    return [each for each in workers if _mapping(each.snapshot.get(EXTENSION))]


def _part(worker: WorkerState, name: str) -> Any:
    return _mapping(worker.snapshot.get(EXTENSION)).get(name)


def _mapping(value: object) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}


def _at(value: object, index: int) -> Any:
    found = items(value)
    return found[index] if index < len(found) else 0


def _add_durations(family: HistogramMetricFamily, labels: list[str], value: object) -> None:
    counts, total = _at(value, 0), _at(value, 1)
    if isinstance(counts, list) and len(counts) == len(_BOUNDS):
        buckets = [(bound, number(count)) for bound, count in zip(_BOUNDS, counts, strict=True)]
        family.add_metric(labels, buckets, number(total))


def _state(worker: WorkerState) -> str:
    state = state_of(worker)
    return state if state in STATES else "unknown"


def _still(worker: WorkerState) -> float:
    return worker.still


def _is_up(worker: WorkerState) -> bool:
    return state_of(worker) in ("starting", "joining", "running", "leaving")
