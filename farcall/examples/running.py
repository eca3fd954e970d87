"""Runs an example: all of its workers with one command, or one worker where it is told which.

What each worker does is what `parameter_server.py` shows step by step: it joins the group, rank 0 directs
while the others answer calls, all meet at a barrier, and leave.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch

import farcall
import rpc
from farcall.examples.command_line import add_group_arguments, parse_arguments
from farcall.examples.progress import print_line

__all__ = [
    "Miss",
    "Preempted",
    "add_checkpoint_argument",
    "ending",
    "in_group",
    "preempted",
    "restored",
    "run_example",
    "run_workers",
    "save",
]

Work = Callable[[argparse.Namespace], None]
"""The main function of each worker, once it is in the group."""


class Miss(Exception):
    """The example did not reach its goal; the text says what is missing."""


class Preempted(Exception):
    """The engine takes this job's machines away, and the state is saved; says where."""


def add_checkpoint_argument(parser: argparse.ArgumentParser) -> None:
    """The file for the state of a job that is preempted."""
    parser.add_argument(
        "--checkpoint",
        metavar="FILE",
        help="save the state here when the job is preempted, and resume from it",
    )


def preempted(options: argparse.Namespace) -> bool:
    """Whether to save the state now: the job is preempted, and there is a file for it."""
    return getattr(options, "checkpoint", None) is not None and farcall.preempted()


def restored(options: argparse.Namespace) -> Any:
    """Return the state that an earlier run saved, if there is such a file; else None."""
    if options.checkpoint is None or not os.path.exists(options.checkpoint):
        return None
    return torch.load(options.checkpoint)


def save(state: object, options: argparse.Namespace) -> NoReturn:
    """Saves the state of a job that is preempted, whole or not at all.

    Raises:
        Preempted: it is saved.
    """
    torch.save(state, f"{options.checkpoint}.new")
    os.replace(f"{options.checkpoint}.new", options.checkpoint)
    raise Preempted(f"The job is preempted. Its state is in {options.checkpoint}; run it again to continue.")


def run_example(parser: argparse.ArgumentParser, names: Sequence[str], direct: Work) -> None:
    """Runs the whole example, or the part of one worker, and ends the process if something went wrong.

    Args:
        parser: knows the example's own arguments; ``--seed`` and those of the group are added here.
        names: of the workers, by rank.
        direct: what rank 0 does. It raises ``Miss`` if the result is not as it should be.
    """
    parser.add_argument("--seed", type=int, default=0, help="for everything random (%(default)s)")
    parser.add_argument("--plain", action="store_true", help="lines of text instead of progress bars")
    add_group_arguments(parser)
    options = parse_arguments(parser)
    if options.rank is not None and options.world_size != len(names):
        parser.error(f"--world-size is {len(names)} here: {', '.join(names)}")
    options.direct = direct
    run_workers(_take_part, options, names)


def run_workers(work: Work, options: argparse.Namespace, names: Sequence[str]) -> None:
    """Runs all workers on this machine, or the one that the command line tells, in a group."""
    with ending():
        if options.rank is not None:
            with in_group(names[options.rank], options):
                _work(work, options)
            return
        print_line(f"Starting {', '.join(names)} on this machine.")
        rpc.spawn(_work, work, options, workers=names)


@contextlib.contextmanager
def ending(name: str = "", clean_up: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Ends the process with what went wrong, if something did, and quietly by Ctrl-C.

    Args:
        name: stands before what went wrong.
        clean_up: is called in any case, and not disturbed by another Ctrl-C.
    """
    status: int | str | None = None
    try:
        yield
    except KeyboardInterrupt:
        status = 130
    except Preempted as error:
        print_line(str(error))
        status = farcall.REQUEUE_STATUS
    except (Miss, RuntimeError) as error:  # RuntimeError: what the group reports, a lost worker for one
        status = f"{name}: {error}" if name else str(error)
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        clean_up()
        if sys.stdout.isatty():  # a worker that was killed may have left the cursor hidden
            print("\x1b[?25h", end="", flush=True)
    if status is not None:
        sys.exit(status)


@contextlib.contextmanager
def in_group(name: str, options: argparse.Namespace) -> Iterator[None]:
    """Joins the group by hand, and leaves it."""
    meeting = rpc.AgentOptions(init_method=options.init_method)
    rpc.init_rpc(name, rank=options.rank, world_size=options.world_size, rpc_backend_options=meeting)
    try:
        yield
    except BaseException:
        rpc.shutdown(graceful=False)  # the others notice at once
        raise
    rpc.shutdown()


def _work(work: Work, options: argparse.Namespace) -> None:
    """The part of one worker; ends the process with what went wrong."""
    torch.set_num_threads(1)  # there are as many processes as this machine can feed
    # The others wait for rank 0 as long as it computes; to say so would tear the bars that it shows.
    logging.getLogger("rpc.agent.gather").setLevel(logging.ERROR)
    preempted(options)  # from now on the signals of preemption do not end this process
    try:
        work(options)
    except Preempted as error:
        print_line(str(error))
        sys.exit(farcall.REQUEUE_STATUS)
    except (Miss, RuntimeError) as error:  # what the group reports, a lost worker for one
        sys.exit(f"{rpc.get_worker_info().name}: {error}")


def _take_part(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    miss: Miss | Preempted | None = None
    if rpc.get_worker_info().id == 0:
        try:
            options.direct(options)
        except (Miss, Preempted) as missed:  # the others did their part: all leave in order
            miss = missed
    rpc.barrier()
    if miss is not None:
        raise miss
