"""Interpreters whose lock is held by C code."""

from __future__ import annotations

import ctypes

from tests.support.hangs.hang import LONG, from_worker0, hang
from tests.support.workers import Worker


def hold_interpreter() -> None:
    ctypes.PyDLL(None).sleep(int(LONG))  # culprit: interpreter_held_by_a_sleep_in_c


@hang("frozen", quick=True)
def interpreter_held_by_a_sleep_in_c(worker: Worker) -> None:
    from_worker0(worker, hold_interpreter)
