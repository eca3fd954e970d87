"""``farcall.compat``: ``torch.distributed.rpc`` means farcall, and can be given back."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
import threading
import warnings
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch

import dist_optim
import rpc as ours
import rref
from tests.support.serving import in_processes
from tests.support.workers import RunWorkers, Worker


def torch_rpc() -> Any:
    """What a program gets that imports it now; typed as anything, since it is not what PyTorch declares."""
    import torch.distributed.rpc

    return torch.distributed.rpc


@in_processes(1)
def test_modules_mean_ours_until_it_is_uninstalled() -> None:
    import rpc as ours
    from farcall import compat

    before = {name for name in sys.modules if name.startswith("torch.distributed.rpc")}
    data_parallel: Any = torch.nn.parallel.distributed
    compat.install()
    compat.install()

    rpc = torch_rpc()
    from torch.distributed.rpc.api import _all_gather, _use_rpc_pickler, _wait_all
    from torch.distributed.rpc.functions import async_execution
    from torch.distributed.rpc.internal import PythonUDF, RPCExecMode, _internal_rpc_pickler

    assert rpc is sys.modules["torch.distributed.rpc"]
    assert (rpc.RRef, rpc.rpc_async, rpc.init_rpc) == (ours.RRef, ours.rpc_async, ours.init_rpc)
    assert (rpc.api._all_gather, rpc.api._wait_all) == (_all_gather, _wait_all)
    assert rpc.functions.async_execution is async_execution
    assert all((_use_rpc_pickler, PythonUDF, RPCExecMode, _internal_rpc_pickler))
    assert importlib.import_module("torch.distributed.rpc.options") is rpc.options
    assert "torch.distributed.rpc._utils" not in sys.modules
    assert data_parallel.RRef is ours.RRef

    compat.uninstall()
    assert {name for name in sys.modules if name.startswith("torch.distributed.rpc")} == before
    assert torch_rpc() is not rpc
    assert data_parallel.RRef is not ours.RRef
    assert torch.futures.wait_all.__module__ == "torch.futures"
    compat.uninstall()


@pytest.mark.parametrize("imported_before", [True, False])
@pytest.mark.parametrize(
    ("package", "module", "name", "ours"),
    [
        ("torch.distributed.nn", ".api.remote_module", "RemoteModule", rref.RemoteModule),
        ("torch.distributed.optim", ".optimizer", "DistributedOptimizer", dist_optim.DistributedOptimizer),
    ],
    ids=["RemoteModule", "DistributedOptimizer"],
)
@in_processes(1)
def test_what_other_packages_show_means_ours(
    imported_before: bool, package: str, module: str, name: str, ours: type
) -> None:
    from farcall import compat

    before = getattr(importlib.import_module(package), name) if imported_before else None
    compat.install()
    shown = getattr(importlib.import_module(package), name)
    assert issubclass(shown, ours)
    assert getattr(importlib.import_module(package + module), name) is shown
    compat.uninstall()
    after = getattr(importlib.import_module(package), name)
    assert after.__module__ == package + module
    assert before in (None, after)


@in_processes(1)
def test_pytorch_need_not_have_imported_its_own() -> None:
    """As with a PyTorch that has dropped its RPC."""
    for name in list(sys.modules):
        if name.startswith("torch.distributed.rpc"):
            del sys.modules[name]
    del torch.distributed.rpc
    from farcall import compat

    compat.install()
    rpc = torch_rpc()

    assert rpc.__name__ == "farcall.compat.torch_rpc"
    compat.uninstall()
    assert "torch.distributed.rpc" not in sys.modules
    assert not hasattr(torch.distributed, "rpc")


@in_processes(1)
def test_references_are_told_apart_by_the_extensions_class(worker: Worker) -> None:
    from farcall import compat

    compat.install()
    from torch._C._distributed_rpc import PyRRef

    with worker.group():
        assert isinstance(torch_rpc().remote("worker0", dict), PyRRef)
    compat.uninstall()
    assert sys.modules["torch._C._distributed_rpc"].PyRRef is not PyRRef


@in_processes(1)
def test_install_refuses_beside_a_running_agent_of_pytorchs() -> None:
    from farcall import compat

    sys.modules["torch.distributed.rpc"]._is_current_rpc_agent_set = lambda: True  # type: ignore[attr-defined]
    with pytest.raises(compat.CompatError, match="is running in this process"):
        compat.install()
    assert not compat.is_installed()


@in_processes(1)
def test_uninstall_refuses_while_an_agent_runs(worker: Worker) -> None:
    from farcall import compat

    compat.install()
    with worker.group(), pytest.raises(compat.CompatError, match="shutdown"):
        compat.uninstall()
    compat.uninstall()


@in_processes(1)
def test_modules_that_imported_it_before_are_named() -> None:
    from farcall import compat

    early = ModuleType("users_program")
    early.rpc_sync = torch.distributed.rpc.rpc_sync  # type: ignore[attr-defined]
    sys.modules["users_program"] = early
    with pytest.warns(UserWarning, match="users_program"):
        compat.install()


@in_processes(1)
def test_nobody_is_named_without_need() -> None:
    import torch.distributed.nn  # noqa: F401  brings generated modules along, which hold PyTorch's own RPC

    from farcall import compat

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compat.install()


@in_processes(1)
def test_wait_all_and_collect_all_end_with_the_first_error() -> None:
    import rpc
    from farcall import compat

    compat.install()
    blocked: rpc.Future[int] = rpc.Future()
    failing: rpc.Future[int] = rpc.Future()
    collected = torch.futures.collect_all([blocked, failing])
    assert not collected.done()
    failing.set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        torch.futures.wait_all([blocked, failing])
    with pytest.raises(ValueError, match="no"):
        collected.wait()
    blocked.set_result(1)

    done: list[torch.futures.Future[int]] = [rpc.Future(), torch.futures.Future()]
    collected = torch.futures.collect_all(done)
    for number, future in enumerate(done):
        future.set_result(number)
    assert [future.wait() for future in collected.wait()] == torch.futures.wait_all(done) == [0, 1]


def calls_through_torchs_names(worker: Worker) -> list[object]:
    from farcall import compat

    compat.install()
    rpc = torch_rpc()

    options = rpc.TensorPipeRpcBackendOptions(init_method=worker.init_method)
    rpc.init_rpc(worker.name, rank=worker.rank, world_size=worker.world_size, rpc_backend_options=options)
    other = f"worker{1 - worker.rank}"
    results = [
        rpc.rpc_sync(other, max, args=(1, 2)),
        rpc.remote(other, min, args=(1, 2)).to_here(),
        rpc.api._all_gather(worker.rank),
    ]
    rpc.api._barrier([worker.name, other])
    assert rpc._is_current_rpc_agent_set()
    assert rpc._get_debug_info().keys() > rpc._rref_context_get_debug_info().keys()
    rpc.shutdown()
    return results


def test_a_program_written_for_pytorch_runs(run_workers: RunWorkers) -> None:
    assert run_workers(calls_through_torchs_names, 2) == [[2, 1, {"worker0": 0, "worker1": 1}]] * 2


def is_in_shutdown() -> bool:
    """Whether this worker's program has come to its end."""
    frame: FrameType | None = sys._current_frames()[threading.main_thread().ident or 0]
    while frame is not None:
        if frame.f_code is ours.shutdown.__code__:
            return True
        frame = frame.f_back
    return False


def work_in_pool(rank: int, world_size: int, init_method: str) -> int:
    rpc = torch_rpc()
    options = rpc.TensorPipeRpcBackendOptions(init_method=init_method)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    answers = 0
    if rank == 0:
        for other in range(1, world_size):
            while not rpc.rpc_sync(other, is_in_shutdown):
                pass
            answers += rpc.rpc_sync(other, max, args=(1, 0)) + rpc.remote(other, max, args=(1, 0)).to_here()
    rpc.shutdown()
    return answers


@in_processes(1)
def test_workers_in_a_pool_serve_in_shutdown_until_all_are_there(worker: Worker) -> None:
    """A pool's processes run one function after another: each round is a group."""
    from farcall import compat

    compat.install()
    with multiprocessing.get_context("fork").Pool(3) as pool:
        for number in range(2):
            store = f"file://{worker.folder / f'store{number}'}"
            places = [(rank, 3, store) for rank in range(3)]
            assert pool.starmap(work_in_pool, places, chunksize=1) == [4, 0, 0]
