"""One process of ``farcall launch``: runs the program, and records the exception that it raises.

::

    python -m farcall.launch.worker_main [--spare=SOCKET] [--lend-names] [--xla] [-m] TARGET [ARGUMENTS ...]
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from pathlib import Path
from typing import Final

_ON_INTERRUPT: Final = signal.getsignal(signal.SIGINT)

if __name__ == "__main__":
    gc.disable()  # while packages are imported; main() turns it on
    if _ON_INTERRUPT is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the imports, without their traceback
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the launcher has blocked it

import farcall_guard

farcall_guard.prefer()  # before any import of packages that the program's folder may hide

from farcall.launch.failures import is_loss, is_of_pytorchs_rpc, record, shown_by
from farcall.launch.program import run_module, run_script
from farcall.launch.spare_process import FLAG, become_a_worker
from farcall.observe.installation import begin, failed
from rpc.runtime.tracebacks import folded, in_one_line, show_as
from rpc.serialization.failures import beginning_of

__all__ = ["main"]

_SHOWN: Final = 80
"""Maximum number of characters of an error whose traceback another process prints."""


def main() -> int:
    """Run the command line; returns the exit status."""
    flags = set()
    arguments = sys.argv[1:]
    spare = arguments.pop(0).removeprefix(FLAG) if arguments[0].startswith(FLAG) else ""
    while arguments and arguments[0] in ("--lend-names", "--xla", "-m"):
        flags.add(arguments.pop(0))
    target, *rest = arguments
    # Libraries that are imported before names are lent would find PyTorch's.
    if spare and not become_a_worker(int(spare), None if flags else Path(target)):
        return 0
    # Collections of the program, and the one at its end, need not visit what PyTorch has made at its import.
    gc.freeze()
    gc.enable()
    begin(os.environ, os.path.basename(target))
    run = run_module if "-m" in flags else run_script
    signal.signal(signal.SIGINT, _ON_INTERRUPT)
    _mark_answers()
    try:
        return run(target, rest, lend_names="--lend-names" in flags, xla="--xla" in flags, on_error=_record)
    except KeyboardInterrupt as error:  # Python prints it and ends the process by SIGINT
        show_as(error, f"{in_one_line(error)}\n")
        raise


def _mark_answers() -> None:
    """Have the program write a carriage return after each line that it reads from a terminal, as ``input()``
    and ``pdb`` do: the terminal has begun a new line, of which the launcher knows nothing otherwise. Output
    that the program has redirected has none.
    """
    output = sys.stdout
    if sys.stdin is None or output is None or not sys.stdin.isatty():
        return
    read = sys.stdin.readline

    def readline(size: int = -1, /) -> str:
        line = read(size)
        if line.endswith("\n") and sys.stdout is output:
            with contextlib.suppress(OSError, ValueError):  # it may be closed
                output.write("\r")
        return line

    sys.stdin.readline = readline  # type: ignore[method-assign]


def _record(error: Exception) -> str:
    """Leave a record for the launcher. The loss of another worker, which says why itself, is one line, and so
    is an error whose traceback another process prints.
    """
    if is_of_pytorchs_rpc(error):
        error.add_note(
            "PyTorch's own RPC raised this, and this process uses farcall's: import the name from farcall, "
            "as in farcall.rpc, or use `farcall launch --lend-names`"
        )
    trace = folded(error)
    record(error, trace)
    failed(error)
    if is_loss(error):
        return f"{in_one_line(error)}\n"
    rank = shown_by(error, trace)
    if rank is None:
        return trace
    return f"{beginning_of(in_one_line(error), _SHOWN)} (traceback: see rank {rank})\n"


if __name__ == "__main__":
    sys.exit(main())
