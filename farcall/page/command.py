"""``farcall page``: serves a job's page until it is interrupted."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING

import click

from farcall.extras import missing
from farcall.observe.format.jobs import jobs_folder
from farcall.observe.why.choosing import choose_job

if TYPE_CHECKING:
    from farcall.page.server import Server

__all__ = ["page", "serve_page"]


def serve_page(job: str | None, port: int, *, launched_by: int = 0) -> int:
    """Serve the page of a job, until SIGINT or SIGTERM.

    Args:
        job: the job: its name, or the beginning of it; None: the one that all commands show.
        port: port of 127.0.0.1; 0: a free one.
        launched_by: the process that has started this one; the page ends with it. 0: nobody.

    Returns:
        The exit status.

    Raises:
        click.ClickException: there is no such job, aiohttp is missing, or the port is taken.
    """
    try:
        from farcall.page.server import Server
    except ModuleNotFoundError as error:
        raise click.ClickException(missing("the page", "page", error)) from error
    from farcall.page.token_file import page_token

    folder = jobs_folder(os.environ)
    try:
        choice = choose_job(folder, job)
        choice.tell(lambda text: click.echo(text, err=True))
        found = choice.job
        server = Server(folder, found, page_token(found.path))
        asyncio.run(_run(server, port, found.id, launched_by))
    except LookupError as error:
        raise click.ClickException(str(error.args[0])) from error
    except OSError as error:
        raise click.ClickException(f"the page cannot be served: {error.strerror or error}") from error
    return 0


async def _run(server: Server, port: int, job: str, launched_by: int) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if launched_by:
        _end_with(launched_by, loop, stop)

    def ready(address: str) -> None:
        click.echo(f"farcall: page of job {job}: {address}")
        if not launched_by and sys.stdout.isatty():
            click.echo("Ctrl-C ends the page; the job goes on")

    await server.run(port, ready, stop)


def _end_with(process: int, loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Have ``stop`` set when a process has ended."""
    try:
        descriptor = os.pidfd_open(process)
    except OSError:
        stop.set()
        return

    def ended() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        stop.set()

    loop.add_reader(descriptor, ended)


@click.command(short_help="Show a job in a browser.")
@click.option(
    "--job",
    metavar="NAME",
    help="The job: its name, or the beginning of it.  [one of this user that runs, or the last one]",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default=True,
    help="0: a free one.",
)
@click.option("--launched-by", type=click.IntRange(0), default=0, hidden=True)
def page(job: str | None, port: int, launched_by: int) -> int:
    """Serve a page that shows a job: its workers, calls, tasks, memory, and what waits for what.

    It listens on this machine alone. Open the address that is printed: it holds the token without which the
    page answers nothing. For a job on another machine:
    ssh -L PORT:127.0.0.1:PORT HOST farcall page --port PORT
    """
    return serve_page(job, port, launched_by=launched_by)
