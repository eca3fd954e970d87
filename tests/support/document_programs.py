"""Programs of documents for torchrun, run by forked workers with the environment that torchrun gives."""

from __future__ import annotations

import contextlib
import io
import os
import runpy

from tests.support.ports import reserving_port
from tests.support.workers import RunWorkers, Worker

__all__ = ["printed_by_ranks"]


def printed_by_ranks(run_workers: RunWorkers, program: str, world_size: int = 2) -> str:
    """What a program prints, all lines of one rank after the other's.

    Args:
        run_workers: the fixture.
        program: its text.
        world_size: how many ranks run it.
    """
    with reserving_port() as port:
        return "".join(run_workers(_run, world_size, args=(program, port)))


def _run(worker: Worker, program: str, port: int) -> str:
    path = worker.folder / f"program{worker.rank}.py"
    path.write_text(program)
    os.environ |= {
        "RANK": str(worker.rank),
        "LOCAL_RANK": str(worker.rank),
        "WORLD_SIZE": str(worker.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()
