"""Interpreters whose lock is held by C code."""

from __future__ import annotations

import ctypes
import re

import rpc
from tests.support.hangs.hang import LONG, from_worker0, hang
from tests.support.workers import Worker


def hold_interpreter() -> None:
    ctypes.PyDLL(None).sleep(int(LONG))  # culprit: interpreter_held_by_a_sleep_in_c


@hang("frozen", quick=True)
def interpreter_held_by_a_sleep_in_c(worker: Worker) -> None:
    from_worker0(worker, hold_interpreter)


def sum_for_ever() -> None:
    sum(range(1 << 62))  # culprit: interpreter_held_by_a_loop_in_c


@hang("frozen")
def interpreter_held_by_a_loop_in_c(worker: Worker) -> None:
    from_worker0(worker, sum_for_ever)


def match_for_ever() -> None:
    re.match(r"(a+)+$", "a" * 64 + "b")  # culprit: interpreter_held_by_a_regular_expression


@hang("frozen")
def interpreter_held_by_a_regular_expression(worker: Worker) -> None:
    from_worker0(worker, match_for_ever)


@hang("frozen")
def interpreter_held_in_the_main_thread(worker: Worker) -> None:
    if worker.rank == 1:
        ctypes.PyDLL(None).sleep(int(LONG))  # culprit: interpreter_held_in_the_main_thread
    rpc.barrier()
