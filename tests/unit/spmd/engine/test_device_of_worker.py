"""Which device of its host a worker computes on."""

from __future__ import annotations

import pytest
import torch

from spmd.engine.errors import SpmdError
from spmd.engine.worker.accelerated import device_of_worker


@pytest.fixture(autouse=True)
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has two."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)


@pytest.mark.parametrize(
    ("hosts", "indices"),
    [
        ("aaaa", [0, 1, 0, 1]),
        ("abab", [0, 0, 1, 1]),
        ("aab", [0, 1, 0]),
    ],
)
def test_the_workers_of_a_host_use_its_devices_in_turn(hosts: str, indices: list[int]) -> None:
    found = [device_of_worker("cuda", hosts, rank, "worker") for rank in range(len(hosts))]
    assert found == [torch.device("cuda", index) for index in indices]


def test_an_index_is_taken_as_it_is() -> None:
    assert device_of_worker("cuda:1", "a", 0, "worker") == torch.device("cuda:1")


@pytest.mark.parametrize("asked", ["cuda:2", "xpu", "xpu:0", "cuda:", "cuda:x"])
def test_a_device_that_is_not_there_is_refused(asked: str) -> None:
    with pytest.raises(SpmdError, match=f"worker 'worker1' was asked to compute on '{asked}'"):
        device_of_worker(asked, "a", 0, "worker1")
