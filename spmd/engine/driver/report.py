"""The report of redistributions that operations required: ``spmd.report()``."""

from __future__ import annotations

from dataclasses import dataclass

from spmd.engine.driver.recorder import Recorder
from spmd.engine.driver.source_positions import described

__all__ = ["LayoutReport", "ReportLine", "costliest", "report_of"]


@dataclass(frozen=True, slots=True)
class ReportLine:
    """One operation at one line of the program.

    Attributes:
        operator: its name, such as ``aten::cat``.
        where: ``path:line in function``; for a gradient the line that called ``backward``.
        note: what was redistributed, and why.
        count: number of times.
        bytes: total size of the redistributed tensors, each counted as a whole, in all of these times.
    """

    operator: str
    where: str
    note: str
    count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class LayoutReport:
    """The result of ``spmd.report()``: its lines, the costliest first. Printed, it is a table."""

    lines: tuple[ReportLine, ...]

    def __str__(self) -> str:
        if not self.lines:
            return "nothing was replicated or laid out otherwise"
        return "\n".join(
            f"{each.where}: {each.operator}, {each.count} times, {each.bytes / 1e6:.3f} MB: {each.note}"
            for each in self.lines
        )


def report_of(recorder: Recorder) -> LayoutReport:
    """Return the report of what has been recorded so far."""
    with recorder.lock:
        lines = costliest(recorder, None)
    return LayoutReport(tuple(sorted(lines, key=lambda line: (-line.bytes, line.where))))


def costliest(recorder: Recorder, limit: int | None) -> list[ReportLine]:
    """Return the lines with the most bytes, at most ``limit``. Does not wait for a lock."""
    counted = sorted(recorder.notes.contents().items(), key=lambda item: -item[1][1])
    return [
        ReportLine(operator, described((code, offset)), note, count, moved)
        for (operator, note, code, offset), (count, moved) in counted[:limit]
    ]
