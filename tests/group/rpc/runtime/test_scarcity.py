"""A system that gives too little: the error says of what, where, and how much is needed."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import rpc
from farcall.launch.failures import record
from rpc.errors import RendezvousError, RpcError
from rpc.rendezvous.token import user_key
from spmd.checkpoint import manager
from tests.support.workers import RunWorkers, Worker


@contextmanager
def full_disk() -> Iterator[None]:
    """No file can grow: to a program, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def meet_on_a_full_disk(worker: Worker, path: str) -> None:
    options = rpc.AgentOptions(init_method=f"file://{path}")
    with pytest.raises(RendezvousError) as caught, full_disk():
        rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
    assert f"cannot use '{path}' as rendezvous file" in str(caught.value)


def keep_a_key_on_a_full_disk(worker: Worker, folder: str) -> None:
    with pytest.raises(RendezvousError) as caught, full_disk():
        user_key([folder])
    assert f"{folder}/farcall-{os.geteuid()}/" in str(caught.value)


def save_on_a_full_disk(worker: Worker, folder: str) -> None:
    # There is no SPMD mode here, nor tensors of it.
    vars(manager).update(sync=int, sharded_cpu_state_dict=dict)
    saver = manager.CheckpointManager(folder, save_interval=1)
    state = {"weight": torch.ones(10_000)}
    with pytest.raises(OSError, match=f"{folder}/0"), full_disk():
        saver.save(0, state)
    with full_disk():
        saver.save_async(0, state)
        with pytest.raises(OSError, match=f"{folder}/0"):
            saver.join()


def leave_a_failure_on_a_full_disk(worker: Worker, folder: str) -> None:
    os.environ |= {"FARCALL_ERROR_FILE": f"{folder}/error.json", "RANK": "0"}
    with contextlib.redirect_stderr(io.StringIO()) as said, full_disk():
        record(ValueError("what the user is to see"), "the traceback")
    assert f"cannot write {folder}/error.json" in said.getvalue()


@pytest.mark.parametrize(
    "write",
    [meet_on_a_full_disk, keep_a_key_on_a_full_disk, save_on_a_full_disk, leave_a_failure_on_a_full_disk],
)
def test_an_error_of_a_full_disk_names_the_path(
    run_workers: RunWorkers, write: object, tmp_path: Path
) -> None:
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        at = f"{folder}/store" if write is meet_on_a_full_disk else folder
        run_workers(write, 1, args=(at,))  # type: ignore[arg-type]


def join_with_few_files(worker: Worker) -> str:
    limit = len(os.listdir("/proc/self/fd")) + 40
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    with pytest.raises(RpcError) as caught:
        rpc.init_rpc("worker0", rank=0, world_size=8)  # and no store is asked
    return str(caught.value)


def test_who_may_open_too_few_files_is_told_at_once_how_many_are_needed(run_workers: RunWorkers) -> None:
    (told,) = run_workers(join_with_few_files, 1)
    assert told.startswith("a worker with 7 others needs at least ")
    assert "raise the limit (ulimit -Hn" in told
