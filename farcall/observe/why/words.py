"""A report as lines for a terminal: what waits for what, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from farcall.observe.why.analysis import STILL_SECONDS, Report
from farcall.observe.why.wait_nodes import Node

__all__ = ["in_words", "waiting_in_words"]

_MAX_ROWS: Final = 24
"""Maximum number of lines for waits, unless all are requested."""

_MAX_FINDINGS: Final = 6
_MAX_OTHERS: Final = 8
"""Maximum number of workers that are named beside one that has failed."""

_USUAL: Final = ("frozen out", "shutdown")
"""Kinds of waits that say nothing about a failure: a worker that serves is in shutdown all the time."""


def in_words(report: Report, width: int = 80, *, everything: bool = False) -> Iterator[str]:
    """Yield the lines of a report, none longer than ``width`` if that is possible."""
    job = report.job
    yield _headline(report)
    rows = _rows(report.nodes)
    shown = rows if everything else rows[:_MAX_ROWS]
    yield from _table(shown, width)
    if len(rows) > len(shown):
        yield f"... and {len(rows) - len(shown)} more (--all)"
    findings = report.findings if everything else report.findings[:_MAX_FINDINGS]
    for finding in findings:
        yield from _wrapped(f"{report.label(finding)}: {finding.text}", width)
    if len(report.findings) > len(findings):
        yield f"... and {len(report.findings) - len(findings)} more findings (--all)"
    if not report.findings and job.living:
        yield "nothing waits that the state files would show"
    for file, why in job.skipped:
        yield from _wrapped(f"skipped {file}: {why}", width)


def waiting_in_words(report: Report, without: Iterable[int], *, rendezvous: bool = True) -> Iterator[str]:
    """Yield what each worker waits for, one line each, except for the ranks in ``without`` and for waits in
    shutdown.

    Args:
        rendezvous: whether to show waits in rendezvous.
    """
    left_out = set(without)
    shown = 0
    seen: set[int] = set()
    for node in report.all_nodes:
        if node.rank in left_out or node.rank in seen or not node.edges or node.kind in _USUAL:
            continue
        if not rendezvous and node.kind == "rendezvous":
            continue
        seen.add(node.rank)
        shown += 1
        if shown > _MAX_OTHERS:
            yield "... and more"
            return
        place = "" if node.place is None else f", at {node.place}"
        text = node.text.replace("waits", f"waited {_time(node.seconds)}", 1)
        yield f"{node.worker}: {node.thread} {text}{place}"


def _headline(report: Report) -> str:
    job = report.job
    count = len(job.workers)
    if not count and not job.end:
        return f"job {job.id} · no worker has written its state yet"
    text = f"job {job.id} · {count} worker{'' if count == 1 else 's'}"
    gone = [each for each in job if each.is_dead and not each.error]
    failed = [each for each in job if each.error]
    left = [each for each in job if each.has_left and not each.error]
    if len(gone) == count and count:
        text += ", all dead"
    elif gone:
        text += f", {len(gone)} dead"
    if failed:
        text += f", {len(failed)} failed"
    if left:
        text += f", {len(left)} left"
    if not job.living and (end := job.end_in_words()):
        text += f" · {end}"
        if not gone:
            return text
    if job.still >= STILL_SECONDS:
        until = "" if job.living else " at its end"
        return f"{text} · nothing has moved for {job.still:.0f} s{until}"
    if not job.living:
        return text
    if job.quiet >= STILL_SECONDS:
        return f"{text} · it computes; no call has begun or ended for {job.quiet:.0f} s"
    return f"{text} · it is moving"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def _rows(nodes: Sequence[Node]) -> list[tuple[str, str, str, str, str]]:
    """Return worker, thread, text, place and remark of each line; workers that do the same share one."""
    rows: dict[tuple[str, str, str, str], list[Node]] = {}
    for node in nodes:
        place = "" if node.place is None else str(node.place)
        key = (node.thread, node.text, place, node.remark)
        rows.setdefault(key, []).append(node)
    found = []
    for (thread, _, place, remark), same in rows.items():
        longest = max(same, key=lambda node: node.seconds)
        text = longest.text
        if text.startswith("waits") and longest.seconds >= 1:
            text = f"waits {_time(longest.seconds)}{text.removeprefix('waits')}"
        elif longest.seconds >= 1 and longest.kind not in ("dead", "failed", "left", "unreachable"):
            text = f"{text}, {_time(longest.seconds)}"
        names = list(dict.fromkeys(node.worker for node in same))
        worker = names[0] if len(names) == 1 else f"{names[0]} +{len(names) - 1}"
        found.append((worker, thread, text, place, remark))
    return found


def _table(rows: Sequence[tuple[str, str, str, str, str]], width: int) -> Iterator[str]:
    if not rows:
        return
    first = min(max(len(row[0]) for row in rows), 20)
    second = min(max(len(row[1]) for row in rows), 18)
    for worker, thread, text, place, remark in rows:
        left = f"{worker:<{first}}  {thread:<{second}}  "
        indent = " " * min(len(left), 24)
        line = f"{left}{text}"
        tail = [part for part in (place, remark) if part]
        room = width - len(line) - 2
        if place and len(place) <= room:
            line += " " * (room - len(place)) + "  " + place if room - len(place) < 20 else f"  {place}"
            tail.remove(place)
        elif len(line) > width:
            yield from _wrapped(line, width, indent)
            line = ""
        if line:
            yield line.rstrip()
        for part in tail:
            yield from _wrapped(indent + part, width, indent)


def _wrapped(text: str, width: int, indent: str = "  ") -> Iterator[str]:
    """Return lines of at most ``width`` characters, broken at spaces."""
    begin = text[: len(text) - len(text.lstrip())]
    line = begin
    for word in text.split():
        if line.strip() and len(line) + 1 + len(word) > width:
            yield line
            line = indent + word
        else:
            line = f"{line} {word}" if line.strip() else line + word
    if line.strip():
        yield line
