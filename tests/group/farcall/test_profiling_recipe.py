"""PyTorch's recipe on profiling RPC, as its readers type it in: a script that prints tables."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from tests.support.workers import RunWorkers, Worker

RECIPE = """
import sys

import torch
import torch.autograd.profiler as profiler
import torch.distributed.rpc as rpc


def some_work(x, y):
    with profiler.record_function("in_the_middle"):
        x = x.mul(y)
    return x.add(y).relu()


def run(rank, world_size, init_method):
    options = rpc.TensorPipeRpcBackendOptions(init_method=init_method)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    if rank == 0:
        x, y = torch.ones(3, 3), torch.ones(3, 3)
        with profiler.profile(record_shapes=True) as operators:
            futures = [
                rpc.rpc_async("worker1", torch.add, args=(x, y)),
                rpc.rpc_async("worker1", torch.mul, args=(x, y)),
            ]
            for future in futures:
                future.wait()
        print(operators.key_averages().table(max_name_column_width=100))

        with profiler.profile() as function:
            rpc.rpc_sync("worker1", some_work, args=(x, y))
        print(function.key_averages().table(max_name_column_width=100))
        function.export_chrome_trace(sys.argv[3])
    rpc.shutdown()


if __name__ == "__main__":
    run(int(sys.argv[1]), 2, sys.argv[2])
"""


def run_in_terminal(worker: Worker, script: str, trace: str) -> str:
    """``farcall run SCRIPT`` as each of the two workers; returns what it prints."""
    from farcall.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert not main(["run", script, str(worker.rank), worker.init_method, trace])
    return out.getvalue()


def test_the_recipe_prints_its_tables(run_workers: RunWorkers, tmp_path: Path) -> None:
    script, trace = tmp_path / "recipe.py", tmp_path / "trace.json"
    script.write_text(RECIPE)
    printed, nothing = run_workers(run_in_terminal, 2, [str(script), str(trace)])
    print(printed)
    assert not nothing
    call = "rpc_sync#some_work(worker0 -> worker1)"
    assert {line.strip().split("  ")[0] for line in printed.splitlines()} >= {
        "rpc_async#aten::add(worker0 -> worker1)",
        "rpc_async#aten::add(worker0 -> worker1)#remote_op: aten::add",
        "rpc_async#aten::mul(worker0 -> worker1)",
        "rpc_async#aten::mul(worker0 -> worker1)#remote_op: aten::mul",
        call,
        *(f"{call}#remote_op: {name}" for name in ("in_the_middle", "aten::mul", "aten::add", "aten::relu")),
    }
    assert call in trace.read_text()
