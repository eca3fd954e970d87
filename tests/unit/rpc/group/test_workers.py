"""A worker's description, as it travels."""

from __future__ import annotations

import msgpack
import pytest
import torch

from rpc.group.workers import Member, WorkerInfo


def _member(**devices: object) -> Member:
    return Member(WorkerInfo("worker0", 0), 7, "host", ("unix:@a",), **devices)  # type: ignore[arg-type]


def _sent(member: Member) -> Member:
    return Member.from_wire(msgpack.unpackb(msgpack.packb(member.to_wire())))


def test_worker_without_devices_says_nothing_of_them() -> None:
    assert len(_member().to_wire()) == 8
    assert _sent(_member()) == _member()


def test_device_maps_arrive_as_they_were() -> None:
    maps = (("worker1", (("cuda:0", "cuda:1"), ("cpu", "cpu"))),)
    member = _member(device_maps=maps, devices=("cuda", 2, ("cuda:0",)))
    assert _sent(member) == member
    assert _sent(member).maps_for("worker1") == {
        torch.device("cuda:0"): torch.device("cuda:1"),
        torch.device("cpu"): torch.device("cpu"),
    }
    assert _sent(member).maps_for("worker2") == {}


@pytest.mark.parametrize(
    "devices", [[[], "cuda"], [[], ["cuda", "two", []]], [[["a", [["no device", "cpu"]]]], None], [1, 2, 3]]
)
def test_malformed_devices_are_refused(devices: list[object]) -> None:
    with pytest.raises((TypeError, ValueError)):
        Member.from_wire([*_member().to_wire(), *devices])


def test_a_device_that_pytorch_does_not_know_here_is_named_with_its_map() -> None:
    maps = (("worker1", (("npu:0", "cpu"),)),)
    with pytest.raises(
        ValueError, match=r"of worker 'worker0' for 'worker1' names the device 'npu:0'.*import"
    ):
        _sent(_member(device_maps=maps))
