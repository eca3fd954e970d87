"""The commands that look at jobs: ``why``, ``trace``, ``ps``, ``top``, ``stacks`` and ``logs``."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

__all__ = ["COMMANDS"]

F = TypeVar("F", bound=Callable[..., Any])

_JOB: Final = "The job: its name, or the beginning of it.  [the newest of this user]"


def _job_option(command: F) -> F:
    return click.option("--job", metavar="NAME", help=_JOB)(command)


def _width() -> int:
    return max(40, shutil.get_terminal_size((80, 24)).columns)


def _find(job: str | None) -> Any:
    from farcall.observe.jobs import find_job, jobs_folder

    try:
        return find_job(jobs_folder(os.environ), job)
    except LookupError as error:
        raise click.ClickException(str(error)) from error


@click.command(short_help="Say what a job that hangs waits for, and why.")
@_job_option
@click.option("--all", "everything", is_flag=True, help="All lines, however many.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def why(job: str | None, everything: bool, as_json: bool) -> int:
    """Say what waits for what in a job, and why: cycles, locks, dead or stopped workers, and more.

    Works while the job runs and after it is dead, also if the interpreter of a worker hangs.
    """
    from farcall.observe.analysis import analyze
    from farcall.observe.reader import read_job
    from farcall.observe.words import in_words

    report = analyze(read_job(_find(job)))
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
    from farcall.observe.trace_command import trace_job

    click.echo(trace_job(_find(job), seconds, output))
    return 0


COMMANDS: Final = (why, trace)
