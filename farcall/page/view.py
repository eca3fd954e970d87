"""What the page shows of a job at one moment, made of the state of its workers. Pure."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from farcall.observe.reading.figures import Row, elastic_in_words, rows_of
from farcall.observe.reading.state import (
    JobState,
    WorkerState,
    items,
    mappings,
    number,
    owned_objects,
    whole,
)
from farcall.observe.reading.stores import stores_of
from farcall.observe.why.analysis import STILL_SECONDS, Report
from farcall.observe.why.words import in_words
from farcall.page.wait_layers import wait_layers

__all__ = ["job_view", "past_job", "point_of"]

_MAX_WORKERS: Final = 1024
_MAX_EDGES: Final = 600
"""Maximum number of pairs of workers between which calls are drawn; those with the most calls."""

_MAX_FINDINGS: Final = 12
_MAX_PAST_FINDINGS: Final = 4
"""Maximum number of findings that the history keeps of a job."""

_MAX_OBJECTS: Final = 300
_MAX_GROUPS: Final = 64
_MAX_OPERATIONS: Final = 100
_QUIET_LINKS: Final = frozenset(("ESTABLISHED", "UNCONNECTED", "LOST", "LEFT"))


def job_view(job: JobState, report: Report, earlier: JobState | None = None) -> dict[str, Any]:
    """The view of a job.

    Args:
        job: its state.
        report: what was found out about it.
        earlier: its state some time ago, for what is counted per second since then.
    """
    rows = rows_of(job, earlier)[:_MAX_WORKERS]
    before = {} if earlier is None else {each.incarnation: each for each in earlier}
    return {
        "job": _job(job, report),
        "workers": [
            _worker(each, row, before.get(each.incarnation)) for each, row in zip(job, rows, strict=False)
        ],
        **_edges(job),
        "findings": [
            {
                "kind": each.kind,
                "label": report.label(each),
                "text": each.text,
                "waiting": each.waiting,
                "worker": each.culprit.worker,
                "place": None if each.culprit.place is None else str(each.culprit.place),
            }
            for each in report.findings[:_MAX_FINDINGS]
        ],
        "waits": wait_layers(report),
        "references": _references(job),
        "weights": [each.to_json() for each in stores_of(job)],
        "collectives": _collectives(job),
        "spmd": [view for each in job if (view := _spmd(each)) is not None],
        "skipped": [{"file": file, "why": why} for file, why in job.skipped[:20]],
    }


@dataclass(frozen=True, slots=True)
class PastJob:
    """A job in the list of jobs.

    Attributes:
        id: its name.
        program: its program, for people.
        host: the host on which it was seen.
        began, seen: when it began, and was seen last, in seconds since 1970.
        workers: number of workers.
        state: "running", "left" (all its workers have left), "failed" or "dead".
        why: what was found out about it at its end, a finding a line.
    """

    id: str
    program: str
    host: str
    began: float
    seen: float
    workers: int
    state: str
    why: str

    def to_json(self) -> dict[str, Any]:
        """For the page."""
        return asdict(self)


def past_job(report: Report) -> PastJob | None:
    """A job as the list of jobs has it; None if it has no workers."""
    job = report.job
    if not job.workers:
        return None
    facts = _job(job, report)
    if job.has_failed:
        state = "failed"
    else:
        state = "running" if job.living else "left" if all(each.has_left for each in job) else "dead"
    is_well = state == "left" or facts["state"] in ("moving", "computes")
    found = [each for each in report.findings if not is_well or each.kind == "cycle"]
    return PastJob(
        job.id,
        facts["program"],
        socket.gethostname(),
        facts["began"],
        max((each.beat.wall for each in job if each.beat is not None), default=0.0),
        len(job.workers),
        state,
        "\n".join(
            [
                *([job.end_in_words()] if state == "failed" else []),
                *(f"{report.label(each)}: {each.text}" for each in found[:_MAX_PAST_FINDINGS]),
            ]
        ),
    )


def point_of(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float, float, int]:
    """Calls and requests per second, cores in use, and bytes of memory, of the workers of a view in all."""
    return (
        round(sum(row["calls"] for row in rows), 2),
        round(sum(row["requests"] for row in rows), 2),
        round(sum(row["share"] for row in rows), 3),
        sum(row["memory"] for row in rows),
    )


# ---- the job and its workers


def _job(job: JobState, report: Report) -> dict[str, Any]:
    if not job.living:
        state = "over"
    elif job.still >= STILL_SECONDS:
        state = "still"
    elif job.quiet >= STILL_SECONDS:
        state = "computes"
    else:
        state = "moving"
    programs = (str(each.fact("program")) for each in job if each.fact("program"))
    return {
        "id": job.id,
        "program": next(programs, ""),
        "began": job.began,
        "living": len(job.living),
        "dead": sum(each.is_dead for each in job),
        "count": len(job.workers),
        "state": state,
        "still": round(job.still, 1),
        "headline": " · ".join(
            filter(None, (next(in_words(report, 1 << 16)).partition(" · ")[2], elastic_in_words(job)))
        ),
    }


def _worker(worker: WorkerState, row: Row, before: WorkerState | None) -> dict[str, Any]:
    executor = worker.snapshot.get("executor")
    counts = executor if isinstance(executor, Mapping) else {}
    threads = whole(counts.get("threads"))
    found = row.to_json()
    found["share"] = _share(worker, before, row.share)
    for name in ("share", "calls", "requests", "oldest"):
        found[name] = round(found[name], 2)
    return found | {
        "busy": max(0, threads - whole(counts.get("idle_threads"))),
        "threads": threads,
        "queued": whole(counts.get("queued_tasks")),
        "doing": _doing(worker),
        "python": str(worker.fact("python")),
        "silent": round(worker.silent, 1),
        **_memory(worker),
    }


def _memory(worker: WorkerState) -> dict[str, int]:
    """Bytes of shared memory for messages, those of them that receivers still use, and those that wait to be
    sent; numbers of objects with remote references, and of autograd contexts.
    """
    counters, objects, autograd = (
        part if isinstance(part := worker.snapshot.get(name), Mapping) else {}
        for name in ("counters", "rref", "autograd")
    )
    shared = [*items(counters.get("memory"))[:2], 0, 0]
    return {
        "shared": whole(shared[0]),
        "lent": whole(shared[1]),
        "unsent": whole(counters.get("send_queue")),
        "objects": whole(objects.get("objects")),
        "contexts": whole(autograd.get("contexts")),
    }


def _share(worker: WorkerState, before: WorkerState | None, sampled: float) -> float:
    """CPU time used per second since the look before; the sampled value, if none was before."""
    now, then = worker.beat, None if before is None else before.beat
    if now is None or then is None or now.monotonic <= then.monotonic or not worker.process.alive:
        return sampled
    return max(0.0, (now.processor - then.processor) / (now.monotonic - then.monotonic))


def _doing(worker: WorkerState) -> str:
    """Where the main thread is in the program."""
    main = next((each for each in worker.threads if each.name == "MainThread"), None)
    if main is None:
        return ""
    if main.waits:
        return f"in {main.waits[-1].get('what')}"
    return "" if main.at is None else f"{main.at.function}  {main.at}"


def _edges(job: JobState) -> dict[str, Any]:
    """Pairs of workers, by index, with the calls in flight from the one to the other; and broken links."""
    shown = list(job)[:_MAX_WORKERS]
    index = {each.name: n for n, each in enumerate(shown)}
    pairs: dict[tuple[int, int], dict[str, Any]] = {}
    links: list[dict[str, Any]] = []
    for n, worker in enumerate(shown):
        if worker.is_dead or worker.has_left:
            continue
        for call in worker.calls:
            to = index.get(str(call.get("to")))
            if to is None:
                continue
            edge = pairs.setdefault((n, to), {"from": n, "to": to, "count": 0, "oldest": 0.0, "what": []})
            edge["count"] += 1
            edge["oldest"] = max(edge["oldest"], round(worker.age(call.get("began")), 1))
            what = str(call.get("what"))
            if what not in edge["what"] and len(edge["what"]) < 3:
                edge["what"].append(what)
        links += [
            {"from": n, "to": index[str(peer.get("name"))], "state": str(peer.get("state"))}
            for peer in worker.peers
            if str(peer.get("name")) in index and str(peer.get("state", "LOST")) not in _QUIET_LINKS
        ]
    by_count = sorted(pairs.values(), key=lambda each: (-each["count"], -each["oldest"]))
    return {
        "edges": by_count[:_MAX_EDGES],
        "edges_left_out": max(0, len(by_count) - _MAX_EDGES),
        "links": links[:_MAX_EDGES],
    }


# ---- what extensions of the agent have left in the snapshots


def _references(job: JobState) -> dict[str, Any]:
    """Objects that workers own, and the workers that hold references to them."""
    names = {each.incarnation: each.name for each in job}
    owners: list[dict[str, Any]] = []
    objects: list[dict[str, Any]] = []
    for worker in job:
        part = worker.snapshot.get("rref")
        if isinstance(part, Mapping):
            owners.append({"worker": worker.name, "objects": whole(part.get("objects"))})
    for owner, name, each in owned_objects(job.workers):
        holders = [
            [names.get(holder, f"a worker that is gone ({holder:x})"), count]
            for holder, count in _counts(each.get("holders"))
        ]
        objects.append(
            {
                "owner": owner.name,
                "id": name,
                "type": str(each.get("type", "")),
                "bytes": whole(each.get("bytes")),
                "state": str(each.get("state", "")),
                "holders": sorted(holders),
            }
        )
    objects.sort(key=lambda each: -sum(count for _, count in each["holders"]))
    total = sum(each["objects"] for each in owners)
    shown = objects[:_MAX_OBJECTS]
    return {"owners": owners, "objects": shown, "left_out": max(0, total - len(shown))}


def _counts(value: object) -> list[tuple[int, int]]:
    return [
        (each[0], each[1])
        for each in items(value)
        if isinstance(each, list) and len(each) == 2 and all(isinstance(n, int) for n in each)
    ]


def _collectives(job: JobState) -> dict[str, Any]:
    """Process groups and how far each rank is in them, and the last operations."""
    groups: dict[str, dict[str, Any]] = {}
    operations: dict[str, dict[str, Any]] = {}
    for worker in job:
        for group in mappings(worker.snapshot.get("spmd.node")):
            name = str(group.get("name"))
            known = groups.setdefault(name, {"name": name, "ranks": []})
            begun, operation = whole(group.get("number")), str(group.get("operation", ""))
            known["ranks"].append({"worker": worker.name, "number": begun, "operation": operation})
        for each in mappings(worker.snapshot.get("spmd.collectives")):
            name = str(each.get("name")).partition("(")[0]
            seconds = number(each.get("ended")) - number(each.get("started"))
            known = operations.setdefault(
                name, {"name": name, "count": 0, "seconds": 0.0, "bytes": 0, "longest": 0.0, "running": 0}
            )
            if not each.get("ended"):
                known["running"] += 1
                continue
            known["count"] += 1
            known["seconds"] += max(0.0, seconds)
            known["bytes"] += whole(each.get("bytes"))
            known["longest"] = max(known["longest"], seconds)
    for known in groups.values():
        furthest = max(each["number"] for each in known["ranks"])
        behind = [each["worker"] for each in known["ranks"] if each["number"] < furthest]
        known["behind"] = behind
        known["furthest"] = furthest
        last = {each["operation"] for each in known["ranks"] if each["number"] == furthest}
        known["operations"] = sorted(last - {""})
        del known["ranks"][_MAX_WORKERS:]
    shown = sorted(operations.values(), key=lambda each: -each["seconds"])
    return {"groups": list(groups.values())[:_MAX_GROUPS], "operations": shown[:_MAX_OPERATIONS]}


def _spmd(worker: WorkerState) -> dict[str, Any] | None:
    """An SPMD driver: what it has sent to its workers, the layouts of its tensors, and what was moved."""
    part = worker.snapshot.get("spmd.session")
    if not isinstance(part, Mapping):
        return None
    counts = part.get("counts")
    return {
        "driver": worker.name,
        "workers": whole(part.get("workers")),
        "counts": {
            str(name): whole(count) for name, count in (counts.items() if isinstance(counts, Mapping) else ())
        },
        "layouts": [
            {
                "dtype": str(each.get("dtype")),
                "shape": [whole(n) for n in items(each.get("shape"))],
                "mesh": [whole(n) for n in items(each.get("mesh"))],
                "placements": [str(n) for n in items(each.get("placements"))],
                "count": whole(each.get("count")),
                "bytes": whole(each.get("bytes")),
            }
            for each in mappings(part.get("layouts"))[:_MAX_OPERATIONS]
        ],
        "moved": [
            {
                "operator": str(each.get("operator")),
                "where": str(each.get("where")),
                "note": str(each.get("note")),
                "count": whole(each.get("count")),
                "bytes": whole(each.get("bytes")),
            }
            for each in mappings(part.get("moved"))[:_MAX_OPERATIONS]
        ],
    }
