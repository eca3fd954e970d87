"""Runs an example: all of its workers with one command, or one worker where it is told which.

What each worker does is what `parameter_server.py` shows step by step: it joins the group, rank 0 directs
while the others answer calls, all meet at a barrier, and leave.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import torch

import rpc
from command_line import add_group_arguments, parse_arguments
from local_group import run_on_this_machine

__all__ = ["Miss", "run_example"]


class Miss(Exception):
    """The example did not reach what it is to show; says what is missing."""


def run_example(
    script: str,
    parser: argparse.ArgumentParser,
    names: Sequence[str],
    direct: Callable[[argparse.Namespace], None],
) -> None:
    """Runs the whole example, or the part of one worker, and ends the process if something went wrong.

    Args:
        script: the path of the example.
        parser: knows the example's own arguments; ``--seed`` and those of the group are added here.
        names: of the workers, by rank.
        direct: what rank 0 does. It raises ``Miss`` if the result is not as it should be.
    """
    parser.add_argument("--seed", type=int, default=0, help="for everything random (%(default)s)")
    parser.add_argument("--plain", action="store_true", help="lines of text instead of progress bars")
    add_group_arguments(parser)
    options = parse_arguments(parser)
    if options.rank is None:
        sys.exit(run_on_this_machine(script, names, sys.argv[1:]))
    if options.world_size != len(names):
        parser.error(f"--world-size is {len(names)} here: {', '.join(names)}")
    try:
        _run_worker(names[options.rank], options, direct)
    except KeyboardInterrupt:
        sys.exit(130)
    except (Miss, RuntimeError) as error:  # what the group reports, a lost worker for one
        sys.exit(f"{names[options.rank]}: {error}")


def _run_worker(name: str, options: argparse.Namespace, direct: Callable[[argparse.Namespace], None]) -> None:
    torch.set_num_threads(1)  # there are as many processes as this machine can feed
    torch.manual_seed(options.seed)
    rpc.init_rpc(
        name,
        rank=options.rank,
        world_size=options.world_size,
        rpc_backend_options=rpc.AgentOptions(init_method=options.init_method),
    )
    miss = None
    try:
        if options.rank == 0:
            try:
                direct(options)
            except Miss as missed:  # the others did their part: all leave in order
                miss = missed
        rpc.barrier()
    except BaseException:
        rpc.shutdown(graceful=False)  # the others notice at once
        raise
    rpc.shutdown()
    if miss is not None:
        raise miss
