"""Device maps of all workers are checked by each of them."""

from __future__ import annotations

import pytest
import torch

from rpc.group.workers import Member, WorkerInfo
from rpc.lifecycle.device_agreement import check, described
from rpc.options import AgentOptions


def member(rank: int, options: AgentOptions) -> Member:
    return Member(
        WorkerInfo(f"worker{rank}", rank), 7, "host", ("unix:@a",), "", 9, False, *described(options)
    )


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("target", ["cuda:2", "xpu:0", "meta"])
@pytest.mark.parametrize("checks", [0, 1])
def test_targets_are_checked_at_a_callee_without_options(target: str, checks: int) -> None:
    options = [AgentOptions(device_maps={"worker1": {"cuda:0": target}}), AgentOptions()]
    members = [member(rank, each) for rank, each in enumerate(options)]
    with pytest.raises(ValueError, match=r"worker0 has target devices with invalid indices .* for worker1"):
        check(f"worker{checks}", options[checks], members, static=True)


@pytest.mark.usefixtures("two_devices")
def test_devices_of_a_callee_without_options_are_targets() -> None:
    options = [AgentOptions(device_maps={"worker1": {"cuda:0": "cuda:1"}}), AgentOptions()]
    members = [member(rank, each) for rank, each in enumerate(options)]
    for rank, each in enumerate(options):
        check(f"worker{rank}", each, members, static=True)


def test_a_worker_without_an_accelerator_is_no_target_but_for_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    callee = member(1, AgentOptions())
    assert callee.devices is None
    right = AgentOptions(device_maps={"worker1": {"cpu": "cpu"}})
    check("worker0", right, [member(0, right), callee], static=True)
    wrong = AgentOptions(device_maps={"worker1": {"cpu": "cuda:0"}})
    with pytest.raises(ValueError, match="worker1 sees 0 devices"):
        check("worker0", wrong, [member(0, wrong), callee], static=True)
