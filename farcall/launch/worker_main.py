"""One process of ``farcall launch``: runs the program, and records the exception that it raises.

::

    python -m farcall.launch.worker_main [--lend-names] [--xla] [-m] TARGET [ARGUMENTS ...]
"""

from __future__ import annotations

import gc
import os
import sys
import traceback

if __name__ == "__main__":
    gc.disable()  # while packages are imported; main() turns it on

import farcall_guard

farcall_guard.prefer()  # before any import of packages that the program's folder may hide

from farcall.launch.failures import record
from farcall.launch.program import run_module, run_script
from farcall.observe.installation import begin, failed

__all__ = ["main"]


def main() -> int:
    """Run the command line; returns the exit status."""
    flags = set()
    arguments = sys.argv[1:]
    while arguments and arguments[0] in ("--lend-names", "--xla", "-m"):
        flags.add(arguments.pop(0))
    target, *rest = arguments
    # Collections of the program, and the one at its end, need not visit what PyTorch has made at its import.
    gc.freeze()
    gc.enable()
    begin(os.environ, os.path.basename(target))
    run = run_module if "-m" in flags else run_script
    return run(target, rest, lend_names="--lend-names" in flags, xla="--xla" in flags, on_error=_record)


def _record(error: Exception) -> None:
    record(error, "".join(traceback.format_exception(error)))
    failed(error)


if __name__ == "__main__":
    sys.exit(main())
