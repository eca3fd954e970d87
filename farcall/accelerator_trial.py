"""``farcall doctor``: which accelerators there are, and how fast two workers exchange tensors on them."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

import rpc
from farcall.doctor import Finding
from rpc.runtime.current import current_agent

__all__ = ["WHAT", "accelerators", "between_workers", "exchange"]

WHAT: Final = "device tensors between two workers"

_BYTES: Final = 64 << 20
"""Size of the tensor that is exchanged, in bytes."""

_CALLS: Final = 5
_SECONDS: Final = 60.0
"""Maximum time that the two workers may take, in seconds."""

_WORKER: Final = (
    "import farcall_guard; farcall_guard.prefer(); from farcall.accelerator_trial import main; main()"
)


def accelerators() -> Finding:
    """What PyTorch has found."""
    if not torch.accelerator.is_available():
        return Finding("accelerators", "none, so tensors stay on the CPU")
    mine: Any = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    name = getattr(torch.get_device_module(mine), "get_device_name", None)
    named = "" if name is None else f" ({name(0)})"
    return Finding("accelerators", f"{count} of type '{mine.type}'{named}")


def between_workers() -> Finding:
    """Start two workers that exchange a tensor on the first device."""
    with tempfile.TemporaryDirectory(prefix="farcall-doctor-") as folder:
        command = [sys.executable, "-c", _WORKER, f"file://{Path(folder, 'store')}"]
        workers = [
            subprocess.Popen(
                [*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            for rank in range(2)
        ]
        try:
            said = workers[0].communicate(timeout=_SECONDS)[0].strip()
        except subprocess.TimeoutExpired:
            said = f"they have not ended in {_SECONDS:g} s"
        finally:
            for worker in workers:
                worker.kill()
                worker.communicate()
    lines = said.splitlines() or ["nothing was said"]
    if workers[0].returncode == 0:
        return Finding(WHAT, lines[-1])
    return Finding(WHAT, f"no: {lines[-1]}", "Run `FARCALL_LOG=debug farcall doctor` for more.")


def exchange(init_method: str, rank: int) -> str:
    """Be one of the two workers. Rank 0 returns what it has measured."""
    mine: Any = torch.accelerator.current_accelerator()
    device = torch.device(mine.type, 0)
    names = ("doctor0", "doctor1")
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=init_method, rpc_timeout=_SECONDS, device_maps={names[1 - rank]: {device: device}}
    )
    rpc.init_rpc(names[rank], rank=rank, world_size=2, rpc_backend_options=options)
    try:
        found = _measured(names[1], device) if rank == 0 else ""
    finally:
        rpc.shutdown()
    return found


def _measured(other: str, device: torch.device) -> str:
    agent: Any = current_agent()
    tensor = torch.arange(_BYTES // 4, dtype=torch.int32, device=device)
    times = []
    for _ in range(1 + _CALLS):
        begin = time.perf_counter()
        back: Tensor = rpc.rpc_sync(other, torch.bitwise_not, args=(tensor,))
        torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - begin)
    if not torch.equal(back.cpu(), torch.arange(_BYTES // 4, dtype=torch.int32).bitwise_not()):
        raise RuntimeError("a tensor came back with other elements")
    seconds = statistics.median(times[1:])
    in_place = agent.calls.requests.border.reads(other, tensor)
    way = "read in place" if in_place else "copied through pinned memory"
    return f"{way}, {2 * _BYTES / seconds / 1e9:.2f} GB/s there and back"


def main() -> None:
    """One of the two processes. Arguments: INIT_METHOD RANK."""
    print(exchange(sys.argv[1], int(sys.argv[2])), flush=True)
