"""The command ``farcall``: run a program with farcall in place of PyTorch's RPC, and say what is installed.

::

    farcall run train.py --epochs 3         # as `python train.py --epochs 3`
    farcall run -m package.train            # as `python -m package.train`
    torchrun --nproc-per-node 4 -m farcall run train.py
    farcall env                             # what a bug report needs
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import farcall

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line's entry.

    Args:
        arguments: default: those of the process.

    Returns:
        The exit status.
    """
    options = _parser().parse_args(arguments)
    if options.command == "env":
        from farcall.environment import show

        show(as_json=options.json)
        return 0
    from farcall.program import run_module, run_script

    if options.module:
        return run_module(options.target, options.arguments)
    return run_script(options.target, options.arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="farcall", description="Distributed RPC and remote objects for PyTorch.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"farcall {farcall.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="run a Python program in which torch.distributed.rpc means farcall",
        description="Run a Python program, unmodified, in which torch.distributed.rpc means farcall.",
        usage="farcall run [-m] TARGET [ARGUMENTS ...]",
        allow_abbrev=False,
    )
    run.add_argument(
        "-m", dest="module", action="store_true", help="TARGET is the name of a module, not a file"
    )
    run.add_argument("target", metavar="TARGET", help="a script, or a folder or zip file with a __main__.py")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="the program's own")
    env = commands.add_parser("env", help="show versions and what this machine offers, for bug reports")
    env.add_argument("--json", action="store_true", help="as JSON")
    return parser
