"""Tensors on a device between two processes of one host, beside TensorPipe: ``python -m benchmarks.devices``.

Each row is a call with one tensor, in milliseconds (the median), for farcall and ``torch.distributed.rpc``,
and their ratio. ``sink``: the callee waits until its device has the tensor. ``echo``: the tensor comes back,
and the caller's device has it. ``to host``: the caller's device is mapped to the callee's CPU. Both processes
use one device, the first.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["main"]

SIDES: Final = {"farcall": "rpc", "TensorPipe": "torch.distributed.rpc"}

_MIB: Final = 1 << 20
SIZES: Final = {"1 MB": _MIB, "256 MB": 256 * _MIB}

_WARM_UP: Final = 3


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.current_stream().synchronize()


def _sink(tensor: Tensor) -> None:
    _synchronize()


def _echo(tensor: Tensor) -> Tensor:
    return tensor


def _nothing() -> None:
    pass


def _use(device: str) -> None:
    if device == "sim":
        importlib.import_module("tests.accelerator.device")


def _worker(arguments: argparse.Namespace) -> None:
    """One of the two processes; the first one prints what it has measured."""
    _use(arguments.device)
    rpc: Any = importlib.import_module(SIDES[arguments.side])
    device = f"{arguments.device}:0"
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{arguments.file}", rpc_timeout=120)
    target = "cpu" if arguments.to_host else device
    if arguments.rank == 0:
        options.set_device_map("worker1", {device: target})
    rpc.init_rpc(f"worker{arguments.rank}", rank=arguments.rank, world_size=2, rpc_backend_options=options)
    if arguments.rank == 0:
        found: dict[str, float] = {}
        for name, size in SIZES.items():
            if size <= arguments.largest:
                found |= _rows(rpc, name, torch.rand(size // 4, device=device), arguments)
        if not arguments.to_host:
            found["a call without tensors"] = _median(lambda: rpc.rpc_sync("worker1", _nothing), 1.0)
        print(json.dumps(found), flush=True)
    rpc.shutdown()


def _rows(rpc: Any, name: str, tensor: Tensor, arguments: argparse.Namespace) -> dict[str, float]:
    """The rows of one size."""

    def sink() -> None:
        rpc.rpc_sync("worker1", _sink, (tensor,))

    def echo() -> None:
        rpc.rpc_sync("worker1", _echo, (tensor,))
        _synchronize()

    seconds = arguments.seconds
    if arguments.to_host:
        return {f"to host, {name}": _median(sink, seconds)}
    return {f"sink, {name}": _median(sink, seconds), f"echo, {name}": _median(echo, seconds)}


def _median(call: Callable[[], object], seconds: float) -> float:
    """The median time of a call, in milliseconds."""
    for _ in range(_WARM_UP):
        call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or (time.perf_counter() < end and len(times) < 1000):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1000


def _measured(side: str, arguments: argparse.Namespace, *, to_host: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "benchmarks.devices", "--side", side, "--device", arguments.device),
            *("--file", str(Path(folder) / "rendezvous"), "--seconds", str(arguments.seconds)),
            *("--largest", str(arguments.largest), *(["--to-host"] if to_host else [])),
        ]
        workers = [
            subprocess.Popen(
                [*command, "--rank", str(rank)],
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=None if arguments.verbose else subprocess.DEVNULL,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            said = workers[0].communicate(timeout=300)[0]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    found: dict[str, float] = json.loads(said) if workers[0].returncode == 0 or said else {}
    return found


def main(argv: list[str] | None = None) -> int:
    """Measure and print; returns the exit status: 1 if farcall could not be measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.devices", description=__doc__)
    parser.add_argument("--device", default="cuda", help="type of the device (default cuda)")
    parser.add_argument("--seconds", type=float, default=1.5, help="seconds that a row may take one side")
    parser.add_argument(
        "--largest", type=int, default=256 * _MIB, help="size of the largest tensor, in bytes"
    )
    parser.add_argument("--verbose", action="store_true", help="show what the processes say")
    for name in ("--side", "--file"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--to-host", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.side is not None:
        _worker(arguments)
        return 0
    found: dict[str, dict[str, float]] = {side: {} for side in SIDES}
    for side in SIDES:
        for to_host in (False, True):
            try:
                found[side] |= _measured(side, arguments, to_host=to_host)
            except (subprocess.SubprocessError, ValueError) as error:
                print(f"{side} could not be measured: {error!r}", file=sys.stderr)
    name = (
        torch.get_device_module(arguments.device).get_device_name()
        if arguments.device == "cuda"
        else "simulated"
    )
    print(f"two processes on one device ({name}), torch {torch.__version__}; milliseconds a call, median")
    print(f"{'':24}{'farcall':>12}{'TensorPipe':>12}{'ratio':>8}")
    for row, ours in found["farcall"].items():
        theirs = found["TensorPipe"].get(row)
        ratio = "" if theirs is None else f"{ours / theirs:.2f}"
        print(f"{row:24}{ours:12.3f}{'-' if theirs is None else format(theirs, '.3f'):>12}{ratio:>8}")
    return 0 if found["farcall"] else 1


if __name__ == "__main__":
    sys.exit(main())
