"""The commands that look at jobs: ``why``, ``ps``, ``top``, ``stacks``, ``logs``, ``trace``, ``metrics``."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from farcall.extras import missing

__all__ = ["COMMANDS"]

F = TypeVar("F", bound=Callable[..., Any])

_JOB: Final = "The job: its name, or the beginning of it.  [one of this user that runs, or the last one]"

_FOLLOW_SECONDS: Final = 0.25
"""Time in seconds between two looks of ``farcall logs --follow``."""


def _job_option(command: F) -> F:
    return click.option("--job", metavar="NAME", help=_JOB)(command)


def _width() -> int:
    return max(40, shutil.get_terminal_size((80, 24)).columns)


def _read(folder: Any, *, native: bool = False) -> Any:
    """Return the state of a job, with its workers on other hosts if a worker here can ask them."""
    from farcall.observe.reading.gathered import gather
    from farcall.observe.reading.reader import read_job

    found = read_job(folder, gathered=False)
    is_gathered = gather(folder.path, found)
    return read_job(folder, native=native) if native or is_gathered else found


def _find(job: str | None) -> Any:
    from farcall.observe.format.jobs import jobs_folder
    from farcall.observe.why.choosing import choose_job

    try:
        found = choose_job(jobs_folder(os.environ), job)
    except LookupError as error:
        raise click.ClickException(str(error)) from error
    found.tell(lambda text: click.echo(text, err=True))
    return found.job


@click.command(short_help="Say what a job that hangs waits for, and why.")
@_job_option
@click.option("--all", "everything", is_flag=True, help="All lines, however many.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def why(job: str | None, everything: bool, as_json: bool) -> int:
    """Say what waits for what in a job, and why: cycles, locks, dead or stopped workers, and more.

    Works while the job runs and after it is dead, also if the interpreter of a worker hangs.
    """
    from farcall.observe.why.analysis import analyze
    from farcall.observe.why.words import in_words

    report = analyze(_read(_find(job), native=True))
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        for line in in_words(report, _width(), everything=everything):
            click.echo(line)
    return 0


@click.command(short_help="Trace all workers of a job on this host, into a file for Perfetto.")
@_job_option
@click.option(
    "--seconds", default=10.0, show_default=True, type=click.FloatRange(0.1, 3600), help="How long."
)
@click.option("-o", "--output", default="trace.json", show_default=True, help="The file.")
def trace(job: str | None, seconds: float, output: str) -> int:
    """Trace all workers of a job on this host, into one file: open it in https://ui.perfetto.dev.

    For workers on several hosts, use rpc.trace in the program.
    """
    from farcall.observe.trace.command import trace_job

    click.echo("\n".join(trace_job(_find(job), seconds, output)))
    return 0


@click.command(short_help="List the workers of jobs.")
@click.option("--job", metavar="NAME", help="The job: its name, or the beginning of it.  [those that run]")
@click.option("--all", "everything", is_flag=True, help="Jobs that are over, too.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def ps(job: str | None, everything: bool, as_json: bool) -> int:
    """List the workers of this user's jobs on this host.

    OUT/s and IN/s count calls made and requests received; STATE is that of the busiest thread; WAITS is the
    age of the oldest call or wait, except for that in shutdown.
    """
    from farcall.observe.format.jobs import jobs, jobs_folder
    from farcall.observe.reading.figures import job_lines, rows_of, table
    from farcall.observe.reading.stores import lines_of, stores_of

    folders = jobs(jobs_folder(os.environ)) if job is None else [_find(job)]
    found = [_read(each) for each in folders]
    shown = [each for each in found if each.workers and (everything or job is not None or each.living)]
    if as_json:
        jobs_as_json = [
            {
                "job": each.id,
                "workers": [row.to_json() for row in rows_of(each)],
                "weights": [store.to_json() for store in stores_of(each)],
            }
            for each in shown
        ]
        click.echo(json.dumps(jobs_as_json, indent=2))
        return 0
    for number, each in enumerate(shown):
        if number:
            click.echo()
        for line in (*job_lines(each, _width()), *table(rows_of(each), _width()), *lines_of(each)):
            click.echo(line)
    if not shown:
        click.echo("no job of this user runs here" + (" (--all shows those that are over)" if found else ""))
    return 0


@click.command(short_help="Watch the workers of a job.")
@_job_option
def top(job: str | None) -> int:
    """Watch the workers of a job, sorted by the column whose letter is pressed.

    If the output is not a terminal, the table is printed once.
    """
    from farcall.observe.reading.figures import job_lines, rows_of, table
    from farcall.observe.reading.reader import read_job

    folder = _find(job)
    if sys.stdout.isatty() and sys.stdin.isatty():
        from farcall.observe.reading.top import top as show

        with contextlib.suppress(KeyboardInterrupt):
            show(lambda: read_job(folder), _width)
        return 0
    found = _read(folder)
    click.echo("\n".join([*job_lines(found, _width()), *table(rows_of(found), _width())]))
    return 0


@click.command(short_help="Show the stacks of the threads of workers.")
@_job_option
@click.option("--all", "everything", is_flag=True, help="Idle threads and farcall's own frames, too.")
@click.option("--native", is_flag=True, help="With frames of C and C++: needs the extra `stacks`.")
@click.argument("workers", nargs=-1)
def stacks(job: str | None, everything: bool, native: bool, workers: tuple[str, ...]) -> int:
    """Show the stacks of the threads of WORKERS, by name or rank; of all by default.

    The stacks of a dead worker are from the last look at it. A worker whose interpreter does not run writes
    its stacks without it.
    """
    from farcall.observe.reading.stacks import chosen, lines_of_all

    found = _read(_find(job), native=True)
    try:
        picked = chosen(found, workers)
    except LookupError as error:
        raise click.ClickException(str(error)) from error
    try:
        for line in lines_of_all(picked, native=native, everything=everything):
            click.echo(line)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        raise
    except OSError as error:
        raise click.ClickException(str(error)) from error
    return 0


@click.command(short_help="Show the output of workers that `farcall launch --log-dir` has kept.")
@_job_option
@click.option(
    "-n", "lines", type=click.IntRange(1), default=20, show_default=True, help="Last lines of each."
)
@click.option("--by-time", is_flag=True, help="The last lines of all together, in the order of printing.")
@click.option("-f", "--follow", is_flag=True, help="The same, and then new lines, until the job is over.")
@click.argument("workers", nargs=-1)
def logs(job: str | None, lines: int, by_time: bool, follow: bool, workers: tuple[str, ...]) -> int:
    """Show the end of the output of WORKERS, by name or rank; of all by default."""
    from farcall.observe.reading.kept_output import KeptOutput
    from farcall.observe.reading.launches import is_over
    from farcall.observe.reading.reader import read_job
    from farcall.observe.reading.stacks import chosen

    folder = _find(job)
    try:
        output = KeptOutput(folder.path)
        found = chosen(read_job(folder), workers)
    except LookupError as error:
        raise click.ClickException(str(error)) from error
    last = output.last_by_time if by_time or follow else output.last_of_each
    for line in last(found, lines):
        click.echo(line)
    with contextlib.suppress(KeyboardInterrupt):
        while follow:
            state = read_job(folder)
            follow = not is_over(folder.path, state)
            for line in output.new(chosen(state, workers)):
                click.echo(line)
            if follow:
                time.sleep(_FOLLOW_SECONDS)
    return 0


@click.command(short_help="Serve the metrics of a job's workers to Prometheus.")
@_job_option
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port on the loopback interface.  [one that is free]",
)
def metrics(job: str | None, port: int) -> int:
    """Serve the metrics of all workers of a job at one address of this host, for Prometheus; Ctrl-C ends it.

    Readers need the token in the file that is named: `authorization: {credentials_file: FILE}` in a scrape
    configuration of Prometheus. Needs the extra `metrics`.
    """
    try:
        from farcall.observe.metrics.endpoint import serve_metrics
    except ModuleNotFoundError as error:
        raise click.ClickException(missing("farcall metrics", "metrics", error)) from error
    from rpc.errors import InvalidOptionError, RendezvousError

    try:
        serve_metrics(_find(job), port, click.echo)
    except (InvalidOptionError, RendezvousError, OSError) as error:
        raise click.ClickException(f"metrics cannot be served: {error}") from error
    return 0


COMMANDS: Final = (why, ps, top, stacks, logs, trace, metrics)
