"""What an agent sets for its whole process while it runs: how often threads switch, which memory is kept."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from typing import Any

import pytest

import rpc
from tests.support.workers import RunWorkers, Worker

with_glibc = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="the allocator is not glibc's"
)

MIB = 1 << 20
ROUNDS = 2
HARDLY_ANY = 10
"""Page faults in all these rounds; a block that is not kept has hundreds in each."""
UNTIL_SETTLED = 5
"""Rounds after which an arena has grown to what the rounds need, and lies in one piece."""

FEW = 8, 1 * MIB
MORE_THAN_GLIBC_KEEPS = 3, 30 * MIB


def look_at_switch_interval(worker: Worker) -> list[float]:
    seen = [sys.getswitchinterval()]
    for options in ({}, {"switch_interval": 0.001}, {"switch_interval": None}):
        with worker.group(**options):
            seen.append(sys.getswitchinterval())
        seen.append(sys.getswitchinterval())
    return seen


def test_threads_switch_often_while_an_agent_runs(run_workers: RunWorkers) -> None:
    (seen,) = run_workers(look_at_switch_interval, 1)
    usual = seen[0]
    assert seen == [pytest.approx(each) for each in (usual, 0.0005, usual, 0.001, usual, usual, usual)]


def faults_of_rounds(count: int, size: int) -> int:
    """Page faults of this thread while it allocates, fills and frees some blocks, round after round."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    before = 0
    for number in range(UNTIL_SETTLED + ROUNDS):
        if number == UNTIL_SETTLED:
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        blocks = [libc.malloc(size) for _ in range(count)]
        for block in blocks:
            libc.memset(block, 1, size)
        for block in blocks:
            libc.free(block)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def look_at_faults(worker: Worker, kept: int, environment: dict[str, str]) -> dict[str, int]:
    """Of a group, on two threads; of a child forked there; of the process after it."""
    os.environ.update(environment)
    read, write = os.pipe()
    seen: dict[str, Any] = {}
    with worker.group(kept_memory_bytes=kept):
        seen["few"] = faults_of_rounds(*FEW)
        seen["few, elsewhere"] = rpc.rpc_sync("worker0", faults_of_rounds, args=FEW)
        seen["many"] = faults_of_rounds(*MORE_THAN_GLIBC_KEEPS)
        child = os.fork()
        if not child:
            os.write(write, str(faults_of_rounds(*MORE_THAN_GLIBC_KEEPS)).encode())
            os._exit(0)
        os.waitpid(child, 0)
        seen["many, in a child"] = int(os.read(read, 64))
    seen["many, afterwards"] = faults_of_rounds(*MORE_THAN_GLIBC_KEEPS)
    return seen


@with_glibc
@pytest.mark.parametrize(
    ("kept", "environment", "without_faults"),
    [
        (256 * MIB, {}, {"few", "few, elsewhere", "many"}),
        (32 * MIB, {}, {"few", "few, elsewhere"}),
        (256 * MIB, {"MALLOC_TRIM_THRESHOLD_": "131072"}, set[str]()),
        *(
            pytest.param(kept, environment, set[str](), marks=pytest.mark.nightly)
            for kept, environment in (
                (0, {}),
                (256 * MIB, {"MALLOC_MMAP_THRESHOLD_": "131072"}),
                (256 * MIB, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}),
            )
        ),
    ],
)
def test_freed_memory_is_kept_while_an_agent_runs_up_to_a_limit_and_unless_the_environment_says_otherwise(
    run_workers: RunWorkers, kept: int, environment: dict[str, str], without_faults: set[str]
) -> None:
    (seen,) = run_workers(look_at_faults, 1, args=(kept, environment))
    assert {what for what, faults in seen.items() if faults < HARDLY_ANY} == without_faults, seen
