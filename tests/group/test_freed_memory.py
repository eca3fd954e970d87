"""While an agent runs, memory that is freed stays with the process: who allocates anew has no page faults."""

from __future__ import annotations

import ctypes
import os
import resource

import pytest
import torch

import rpc
from tests.support.workers import RunWorkers, Worker

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="the allocator is not glibc's"
)

MIB = 1 << 20
ROUNDS = 10
UNTIL_SETTLED = 5
"""Rounds after which an arena has grown to what the rounds need, and lies in one piece."""

FEW = 8, 1 * MIB
MORE_THAN_GLIBC_KEEPS = 4, 30 * MIB


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


def look_at_faults(worker: Worker, kept_memory_bytes: int) -> tuple[int, int]:
    with worker.group(kept_memory_bytes=kept_memory_bytes):
        return faults_of_rounds(*FEW), rpc.rpc_sync("worker0", faults_of_rounds, args=FEW)


def test_memory_used_again_and_again_costs_no_faults_on_any_thread(run_workers: RunWorkers) -> None:
    ((on_main_thread, on_executor_thread),) = run_workers(look_at_faults, 1, args=(256 * MIB,))
    assert max(on_main_thread, on_executor_thread) < ROUNDS


def test_allocator_is_left_alone_with_0(run_workers: RunWorkers) -> None:
    ((on_main_thread, on_executor_thread),) = run_workers(look_at_faults, 1, args=(0,))
    assert min(on_main_thread, on_executor_thread) >= 4 * ROUNDS  # with huge pages; else 2048 * ROUNDS


def look_at_faults_of_more(worker: Worker) -> int:
    with worker.group(kept_memory_bytes=32 * MIB):
        return faults_of_rounds(*MORE_THAN_GLIBC_KEEPS)


def test_no_more_is_kept_than_the_option_says(run_workers: RunWorkers) -> None:
    (faults,) = run_workers(look_at_faults_of_more, 1)
    assert faults >= 15 * ROUNDS


def look_at_faults_in_and_after_group(worker: Worker) -> list[int]:
    seen: list[int] = []
    for _ in range(2):
        with worker.group(kept_memory_bytes=256 * MIB):
            seen.append(faults_of_rounds(*MORE_THAN_GLIBC_KEEPS))
        seen.append(faults_of_rounds(*MORE_THAN_GLIBC_KEEPS))
    return seen


def test_memory_goes_back_to_the_kernel_after_the_group(run_workers: RunWorkers) -> None:
    ((inside, after, inside_again, after_again),) = run_workers(look_at_faults_in_and_after_group, 1)
    assert max(inside, inside_again) < ROUNDS
    assert min(after, after_again) >= 15 * ROUNDS


def look_at_memory(worker: Worker) -> tuple[int, int]:
    with worker.group():
        torch.zeros(16 * MIB, dtype=torch.uint8)
        inside = resident_bytes()
    return inside, resident_bytes()


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def test_what_lies_free_is_given_back_at_the_end(run_workers: RunWorkers) -> None:
    ((inside, after),) = run_workers(look_at_memory, 1)
    assert after < inside - 8 * MIB


def look_at_faults_where_user_has_set(worker: Worker, variable: str, value: str) -> int:
    os.environ[variable] = value
    with worker.group():
        return faults_of_rounds(*FEW)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("MALLOC_MMAP_THRESHOLD_", "131072"),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072"),
    ],
)
def test_what_the_environment_says_wins(run_workers: RunWorkers, variable: str, value: str) -> None:
    (faults,) = run_workers(look_at_faults_where_user_has_set, 1, args=(variable, value))
    assert faults >= 4 * ROUNDS


def look_at_faults_of_child(worker: Worker) -> int:
    read, write = os.pipe()
    with worker.group():
        child = os.fork()
        if not child:
            os.write(write, str(faults_of_rounds(*MORE_THAN_GLIBC_KEEPS)).encode())
            os._exit(0)
        os.waitpid(child, 0)
    faults = int(os.read(read, 64))
    os.close(read)
    os.close(write)
    return faults


def test_forked_child_keeps_no_more_than_usual(run_workers: RunWorkers) -> None:
    (faults,) = run_workers(look_at_faults_of_child, 1)
    assert faults >= 15 * ROUNDS
