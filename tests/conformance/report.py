"""What a run shows: a progress bar on a terminal, one line a test elsewhere, and tables at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.conformance.processes import Ending, Outcome
from tests.conformance.suites import Test

__all__ = ["Report"]

_STYLES = {
    Ending.PASSED: "green",
    Ending.FAILED: "red",
    Ending.SKIPPED: "yellow",
    Ending.TIMED_OUT: "bold red",
}


class Report:
    """Shows outcomes as they come, then a summary. No threads: it refreshes when told to.

    Args:
        console: where to.
        total: how many tests there will be.
        log_lines: for each test that fails, so many lines of each worker's log are shown.
    """

    def __init__(self, console: Console, total: int, log_lines: int = 0) -> None:
        self._console = console
        self._log_lines = log_lines
        self._outcomes: list[Outcome[Test]] = []
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            auto_refresh=False,
            disable=not console.is_terminal,
        )
        self._bar = self._progress.add_task("starting", total=total)

    def __enter__(self) -> Self:
        self._progress.start()
        self._progress.refresh()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def add(self, outcome: Outcome[Test], expected: bool) -> None:
        """Shows one more test.

        Args:
            outcome: how it went.
            expected: whether it was to pass.
        """
        self._outcomes.append(outcome)
        style = _STYLES[outcome.ending]
        line = f"[{style}]{outcome.ending.value:9}[/] {outcome.seconds:6.2f} s  {outcome.task}"
        bad = outcome.ending in (Ending.FAILED, Ending.TIMED_OUT)
        if bad and expected:
            line += f"\n    {escape(outcome.complaint())}"
        elif bad:
            line += "  (as expected)"
        if bad or not self._console.is_terminal:
            self._console.print(line, soft_wrap=True, highlight=False)
        if bad and expected:
            self._print_logs(outcome)
        counts = self.counts()
        self._progress.update(
            self._bar,
            advance=1,
            description=f"[green]{counts[Ending.PASSED]} passed[/] "
            f"[red]{counts[Ending.FAILED] + counts[Ending.TIMED_OUT]} failed[/]",
            refresh=True,
        )

    def counts(self) -> Counter[Ending]:
        """How many tests ended in which way."""
        return Counter(outcome.ending for outcome in self._outcomes)

    def _print_logs(self, outcome: Outcome[Test]) -> None:
        if not self._log_lines:
            return
        for rank, log in enumerate(outcome.logs):
            self._console.rule(f"worker {rank}, ended with {outcome.exits[rank]}", align="left")
            for line in log.splitlines()[-self._log_lines :]:
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def summarize(
        self, unexpected: Sequence[Test], surprises: Sequence[Test], reasons: Mapping[Test, str]
    ) -> None:
        """Prints the tables.

        Args:
            unexpected: tests that should have passed and did not.
            surprises: tests that passed although they are listed as impossible.
            reasons: the tests that cannot hold, and why.
        """
        totals = Table("suite", "passed", "failed", "skipped", "cannot hold", title="conformance")
        for column in totals.columns[1:]:
            column.justify = "right"
        for suite in sorted(
            {outcome.task.suite for outcome in self._outcomes} | {test.suite for test in reasons}
        ):
            counts = Counter(
                outcome.ending
                for outcome in self._outcomes
                if outcome.task.suite == suite and outcome.task not in reasons
            )
            impossible = sum(test.suite == suite for test in reasons)
            failed = counts[Ending.FAILED] + counts[Ending.TIMED_OUT]
            totals.add_row(
                suite, str(counts[Ending.PASSED]), str(failed), str(counts[Ending.SKIPPED]), str(impossible)
            )
        self._console.print(totals)
        if reasons:
            why = Table("cannot hold", "because", show_lines=False)
            for test, reason in reasons.items():
                why.add_row(test.name, reason)
            self._console.print(why)
        for title, listed in (("failed", unexpected), ("pass now, unlist them", surprises)):
            if listed:
                self._console.print(f"{title}:", *(f"  {test}" for test in listed), sep="\n", highlight=False)
