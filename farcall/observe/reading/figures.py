"""Figures of workers, for ``ps`` and ``top``: plain values, and the tables that show them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from farcall.observe.reading.state import JobState, ThreadState, WorkerState, items, number, whole

__all__ = ["COLUMNS", "Row", "elastic_in_words", "job_lines", "row_of", "rows_of", "state_of", "table"]


_WAITS_SECONDS: Final = 2.0
"""Time in seconds from which a thread that waits for other workers makes the state of its worker "waits"."""


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one worker.

    Attributes:
        state: see ``state_of``; of a worker that runs, what its busiest thread does.
        share: CPU time used per second.
        memory: resident memory, in bytes.
        calls, requests: calls made and requests received, per second.
        oldest: age of the oldest call or wait, in seconds, except for a wait in shutdown.
    """

    name: str
    rank: int
    host: str
    pid: int
    state: str
    share: float
    memory: int
    calls: float
    requests: float
    oldest: float

    def to_json(self) -> dict[str, Any]:
        """Return it as values for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def state_of(worker: WorkerState) -> str:
    """Return the state of a worker, in one word."""
    if worker.error:
        return "failed"
    if worker.has_left:
        return "left"
    if worker.is_dead:
        return "dead"
    if worker.process.traced:
        return "traced"
    if worker.process.stopped:
        return "stopped"
    if worker.is_frozen:
        return "frozen"
    return worker.phase or "unknown"


def _doing(worker: WorkerState) -> str:
    """Return the state of a worker or, if it runs, what its busiest thread does: "computes", "running",
    "waits", or "leaving" if nothing is left but a wait in shutdown.
    """
    state = state_of(worker)
    if state not in ("starting", "joining", "running", "leaving"):
        return state
    if any(each.fields.get("computes") for each in worker.threads):
        return "computes"
    if state != "running":
        return state
    busy = [each for each in worker.threads if each.waits or not each.fields.get("idle")]
    others = [each for each in busy if not _is_in_shutdown(each)]
    if not others:
        return "leaving" if busy else state
    return "waits" if all(_waits(worker, each) for each in others) else "running"


def _is_in_shutdown(thread: ThreadState) -> bool:
    return any(wait.get("what") == "shutdown" for wait in thread.waits)


def _waits(worker: WorkerState, thread: ThreadState) -> bool:
    """Whether a thread has waited long: for other workers, or for another thread while it runs a request."""
    is_waiting = bool(thread.waits) or thread.call is not None
    if thread.request is not None:
        is_waiting |= str(thread.fields.get("doing", "")).startswith("waits")
    return is_waiting and worker.age(thread.fields.get("since")) >= _WAITS_SECONDS


def row_of(worker: WorkerState, earlier: WorkerState | None = None) -> Row:
    """Return the figures of a worker.

    Args:
        earlier: an earlier state of it; rates are averages since then.
    """
    calls, requests = _rates(worker, earlier)
    lives = worker.process.alive is not False and not worker.has_left
    ages = [worker.age(call.get("began")) for call in worker.calls]
    # A worker waits in shutdown for as long as others work: that is usual.
    ages += [
        worker.age(wait.get("since"))
        for each in worker.threads
        for wait in each.waits
        if not _is_in_shutdown(each)
    ]
    return Row(
        worker.name,
        worker.rank,
        worker.host,
        worker.pid,
        _doing(worker),
        worker.process.share if lives else 0.0,
        worker.process.memory,
        calls if lives else 0.0,
        requests if lives else 0.0,
        max(ages, default=0.0) if lives else 0.0,
    )


def _rates(worker: WorkerState, earlier: WorkerState | None) -> tuple[float, float]:
    beat, before = worker.beat, None if earlier is None else earlier.beat
    if beat is None:
        return 0.0, 0.0
    if before is not None and beat.monotonic > before.monotonic and earlier is not None:
        seconds = beat.monotonic - before.monotonic
        return (beat.calls - before.calls) / seconds, (beat.requests - before.requests) / seconds
    return beat.call_rate, beat.request_rate


def rows_of(job: JobState, earlier: JobState | None = None) -> list[Row]:
    """Return the figures of all workers of a job."""
    before = {} if earlier is None else {(each.name, each.pid): each for each in earlier}
    return [row_of(each, before.get((each.name, each.pid))) for each in job]


def _memory(size: int) -> str:
    return f"{size / (1 << 30):.1f} G" if size >= 1 << 30 else f"{size / (1 << 20):.0f} M"


def _rate(rate: float) -> str:
    return "0" if rate == 0 else f"{rate:.1f}" if rate < 10 else f"{rate:,.0f}"


def _age(seconds: float) -> str:
    if seconds < 0.05:
        return "-"
    return (
        f"{seconds:.1f} s"
        if seconds < 60
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.0f} h"
    )


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its title, how it shows a row, what it is sorted by, and the key that sorts by it."""

    title: str
    show: Callable[[Row], str]
    by: Callable[[Row], Any]
    key: str
    right: bool = True


COLUMNS: Final = (
    Column("NAME", lambda row: row.name, lambda row: row.name, "n", right=False),
    Column("RANK", lambda row: str(row.rank) if row.rank >= 0 else "-", lambda row: row.rank, "r"),
    Column("HOST", lambda row: row.host, lambda row: row.host, "h", right=False),
    Column("PID", lambda row: str(row.pid), lambda row: row.pid, "p"),
    Column("STATE", lambda row: row.state, lambda row: row.state, "s", right=False),
    Column("CPU", lambda row: f"{100 * row.share:.0f}%", lambda row: -row.share, "c"),
    Column("MEM", lambda row: _memory(row.memory) if row.memory else "-", lambda row: -row.memory, "m"),
    Column("OUT/s", lambda row: _rate(row.calls), lambda row: -row.calls, "o"),
    Column("IN/s", lambda row: _rate(row.requests), lambda row: -row.requests, "i"),
    Column("WAITS", lambda row: _age(row.oldest), lambda row: -row.oldest, "w"),
)


def table(rows: Sequence[Row], width: int) -> list[str]:
    """Return the rows as lines of equal columns; long names are cut if the width is small."""
    cells = [
        [column.title for column in COLUMNS],
        *([column.show(row) for column in COLUMNS] for row in rows),
    ]
    widths = [max(len(line[n]) for line in cells) for n in range(len(COLUMNS))]
    excess = sum(widths) + 2 * (len(widths) - 1) - width
    for n in (2, 0):  # the host, then the name
        cut = min(max(0, excess), max(0, widths[n] - 6))
        widths[n] -= cut
        excess -= cut
    lines = []
    for line in cells:
        parts = []
        for text, size, column in zip(line, widths, COLUMNS, strict=True):
            shown = text if len(text) <= size else text[: size - 1] + "…"
            parts.append(shown.rjust(size) if column.right else shown.ljust(size))
        lines.append("  ".join(parts).rstrip())
    return lines


def job_lines(job: JobState, width: int) -> list[str]:
    """Return what names a job and its state, in lines of ``width`` columns at most."""
    living = len(job.living)
    program = next((str(each.fact("program")) for each in job if each.fact("program")), "")
    state = f"{living} of {len(job.workers)} workers live" if job.workers else "no worker"
    if job.workers and not living and (end := job.end_in_words()):
        state = end
    began = job.began
    texts = [f"job {job.id}", program or "a program", f"began {_clock(began)}" if began else "", state]
    line = " · ".join(filter(None, [*texts, elastic_in_words(job)]))
    return textwrap.wrap(line, width, subsequent_indent="  ", break_on_hyphens=False)


def elastic_in_words(job: JobState) -> str:
    """Describe the elastic job of the workers, by the one that is furthest: its view, step and losses; "" if
    there is none.
    """
    found = [each.snapshot.get("spmd.elastic") for each in job.living]
    states = [each for each in found if isinstance(each, Mapping) and whole(each.get("view"))]
    if not states:
        return ""
    last = max(states, key=lambda each: (whole(each.get("view")), whole(each.get("step"))))
    losses = whole(last.get("losses"))
    lost = f", {losses} lost" if losses else ""
    if lost and last.get("lost"):
        lost += f" (the last, {last['lost']}, for {number(last.get('took')):.2f} s)"
    count = len(items(last.get("members")))
    return f"step {whole(last.get('step'))}, view {whole(last.get('view'))} of {count}{lost}"


def _clock(at: float) -> str:
    from datetime import datetime

    try:
        return f"{datetime.fromtimestamp(at).astimezone():%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError, OSError):  # not a time of this calendar
        return "?"
