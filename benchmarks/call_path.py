"""The command ``python -m benchmarks.call_path``: the files of ours that one warm ``rpc_sync`` enters."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any, Final

_ROOT: Final = Path(__file__).resolve().parent.parent
_WARM_CALLS: Final = 300
_SAMPLES: Final = 50


def _work(rank: int, folder: str) -> None:
    import rpc

    options = rpc.AgentOptions(init_method=f"file://{folder}/store")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        for _ in range(_WARM_CALLS):
            rpc.rpc_sync("worker1", os.getpid)
        paths = min((_entered(rpc) for _ in range(_SAMPLES)), key=len)
        print(*sorted(paths), f"{len(paths)} files", sep="\n")
    rpc.shutdown()


def _entered(rpc: Any) -> set[str]:
    """The files in which functions are entered during one call."""
    names: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(_ROOT) and path != Path(__file__):
            names.add(str(path.relative_to(_ROOT)))

    sys.setprofile(note)
    rpc.rpc_sync("worker1", os.getpid)
    sys.setprofile(None)
    return {name for name in names if not name.startswith(".venv")}


def main() -> int:
    """Count and print; returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="farcall-path-") as folder:
        workers = [multiprocessing.Process(target=_work, args=(rank, folder)) for rank in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    return max(worker.exitcode or 0 for worker in workers)


if __name__ == "__main__":
    sys.exit(main())
