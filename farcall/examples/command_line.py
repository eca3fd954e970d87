"""The command line that the examples share: which worker a process is, and where to meet.

Without ``--rank`` an example starts all of its workers on this machine.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import os
import shlex
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

__all__ = ["add_group_arguments", "example_parser", "parse_arguments", "positive", "rate"]


class _Paragraphs(argparse.HelpFormatter):
    """Fits the paragraphs of a docstring to the terminal, and leaves commands as they are written."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n\n".join(
            textwrap.indent(each, indent) if each.startswith(" ") else fill(each, width, indent)
            for each in text.split("\n\n")
        )


class _Parser(argparse.ArgumentParser):
    needs: Sequence[str] = ()

    def parse_args(self, *arguments: Any, **keywords: Any) -> Any:
        options = super().parse_args(*arguments, **keywords)
        for name in self.needs:
            try:
                importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                command = shlex.join([sys.executable, "-m", "pip", "install", name])
                self.exit(1, f"This example needs {name}: {command}\n")
        return options


def example_parser(description: str | None, needs: Sequence[str] = ()) -> argparse.ArgumentParser:
    """A parser whose help shows an example's docstring.

    Args:
        description: the docstring.
        needs: distributions that the example imports and farcall does not. If one is missing, parsing the
            command line ends the process with the command that installs it, before any worker starts.
    """
    head, _, rest = (description or "").partition("\n\n")
    parser = _Parser(description=head, epilog=rest, formatter_class=_Paragraphs)
    parser.needs = needs
    return parser


def add_group_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments for one worker's process; by default they come from the environment, as torchrun sets it."""
    group = parser.add_argument_group(
        "on several machines",
        "Run the same command on each, with the same secret in FARCALL_TOKEN: farcall launch -n WORKERS-HERE "
        "--nnodes MACHINES --rdzv HOST:29500 SCRIPT. Or one process per worker, by hand:",
    )
    group.add_argument(
        "--rank", type=int, default=os.environ.get("RANK"), help="this worker's rank; 0 directs"
    )
    group.add_argument(
        "--world-size", type=int, default=os.environ.get("WORLD_SIZE"), help="number of workers"
    )
    group.add_argument("--master-addr", metavar="HOST", help="where rank 0 runs")
    group.add_argument(
        "--master-port", metavar="PORT", type=int, default=29500, help="a free one there (29500)"
    )
    group.add_argument(
        "--init-method", metavar="URL", help="another way to meet, such as file:///shared/path"
    )


def parse_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Reads the command line and completes what it says about the group."""
    options = parser.parse_args()
    if options.rank is None:
        return options
    if options.world_size is None or not 0 <= options.rank < options.world_size or options.world_size < 2:
        parser.error("--rank needs a --world-size of 2 or more, and must be from 0 to that minus 1")
    if options.init_method is None:
        tcp = f"tcp://{options.master_addr}:{options.master_port}"
        options.init_method = tcp if options.master_addr else "env://"
    if options.init_method == "env://" and "MASTER_ADDR" not in os.environ:
        parser.error("--rank needs a --master-addr, where rank 0 runs")
    return options


def positive(text: str) -> int:
    """A whole number, 1 or more."""
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number


def rate(text: str) -> float:
    """A finite number, 0 or more."""
    if not 0 <= (number := float(text)) < math.inf:
        raise ValueError(text)
    return number
