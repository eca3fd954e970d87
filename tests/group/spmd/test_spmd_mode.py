"""SPMD mode on real workers."""

from __future__ import annotations

import traceback

import pytest
import torch

import spmd
from tests.support.serving import first_of
from tests.support.spmd_cases import CASES, MODELS, same, train
from tests.support.workers import RunWorkers, Worker


def run_all(worker: Worker) -> dict[str, str]:
    """What has gone wrong, by case."""
    spmd.use_spmd()
    device, wrong = spmd.device(), {}
    cpu = torch.device("cpu")
    for name, case in CASES.items():
        try:
            found = case(device)
            if not same(found, case(cpu)):
                wrong[name] = f"{found}"
        except Exception:
            wrong[name] = traceback.format_exc()
    for name in MODELS:
        try:
            found, expected = train(name, device), train(name, cpu)
            if not same(found, expected, 1e-5):
                wrong[name] = f"{found} {expected}"
        except Exception:
            wrong[name] = traceback.format_exc()
    spmd.shutdown()
    return wrong


@pytest.mark.parametrize("workers", [2, 4])
def test_programs_give_what_the_cpu_gives(run_workers: RunWorkers, workers: int) -> None:
    wrong = first_of(run_workers, run_all, world_size=workers + 1)
    assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())
