"""The default dtype of programs on several threads of a process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from spmd.engine.worker.default_dtype import DefaultDtype

SOON = 20.0


def test_programs_with_one_default_dtype_run_together_and_another_waits_for_them() -> None:
    before = torch.get_default_dtype()
    inside, may_end = threading.Barrier(3), threading.Event()

    def run_with_others() -> torch.dtype:
        with DefaultDtype(torch.float64):
            inside.wait(SOON)
            assert may_end.wait(SOON)
            return torch.get_default_dtype()

    def run_later() -> torch.dtype:
        with DefaultDtype(torch.bfloat16):
            return torch.get_default_dtype()

    with ThreadPoolExecutor(3) as threads:
        together = [threads.submit(run_with_others) for _ in range(2)]
        inside.wait(SOON)
        later = threads.submit(run_later)
        assert torch.get_default_dtype() == torch.float64
        may_end.set()
        assert [each.result(SOON) for each in together] == [torch.float64, torch.float64]
        assert later.result(SOON) == torch.bfloat16
    assert torch.get_default_dtype() == before
