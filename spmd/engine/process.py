"""A worker that ``use_spmd`` starts: ``python -m spmd.engine.process INIT_METHOD NAME RANK WORLD_SIZE``."""

from __future__ import annotations

import signal
import sys

from spmd.engine.start import serve

__all__: list[str] = []

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's, which ends its workers
    init_method, name, rank, world_size = sys.argv[1:]
    serve(name, int(rank), int(world_size), init_method)
