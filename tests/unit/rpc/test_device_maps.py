from __future__ import annotations

import pytest
import torch

from rpc.device_maps import (
    DeviceLike,
    DeviceMap,
    check_device_maps,
    check_targets,
    to_device_list,
    to_device_map,
)

CPU = torch.device("cpu")
CUDA = [torch.device("cuda", index) for index in range(4)]


def check(
    maps: dict[str, DeviceMap] | None = None,
    devices: list[torch.device] | None = None,
    count: int = 2,
    group: list[str] | None = None,
) -> None:
    check_device_maps("worker0", maps or {}, devices or [], count, group or ["worker0", "worker1"])


def test_devices_are_normalized() -> None:
    assert to_device_map({"cuda:0": CUDA[1], "cpu": "cpu"}) == {CUDA[0]: CUDA[1], CPU: CPU}


@pytest.mark.parametrize(
    ("device_map", "said"),
    [
        ({"cuda:0": "cuda:1", "cuda:2": "cuda:1"}, ": cuda:0 and cuda:2 are both mapped to cuda:1"),
        ({"cuda:0": "cuda", "cuda:1": "cuda:0"}, ""),
        ({"cuda": "cuda:0", "cuda:0": "cuda:1"}, ""),
    ],
)
def test_map_is_one_to_one(device_map: dict[DeviceLike, DeviceLike], said: str) -> None:
    with pytest.raises(ValueError, match=f"1-to-1 mapping{said}"):
        to_device_map(device_map)


def test_device_must_be_named_right() -> None:
    with pytest.raises(RuntimeError, match="nonsense"):
        to_device_map({"nonsense:0": "cpu"})


def test_good_maps_pass() -> None:
    check({"worker1": {CUDA[0]: CUDA[3], CPU: CPU}}, [])
    check({"worker1": {CUDA[0]: CUDA[3]}}, CUDA[:2])
    check({}, [], count=0)


def test_callee_of_a_dynamic_group_may_join_later() -> None:
    check_device_maps("worker0", {"later": {CUDA[0]: CUDA[0]}}, [], 1, None)


@pytest.mark.parametrize(
    ("maps", "devices", "text"),
    [
        ({"nobody": {}}, [], "Node worker0 has invalid target node names in its device maps: nobody"),
        ({}, [CUDA[0], CUDA[0]], "Node worker0 has duplicated devices: cuda:0, cuda:0"),
        ({}, [CUDA[2]], "Node worker0 has devices with invalid indices: cuda:2"),
        (
            {"worker1": {CUDA[2]: CUDA[0]}},
            [],
            "Node worker0 has source devices with invalid indices in its device map for worker1",
        ),
        (
            {"worker1": {CUDA[0]: CUDA[1], CUDA[1]: CUDA[1]}},
            [],
            "Node worker0 has duplicated target devices in its device map for worker1",
        ),
        (
            {"worker1": {CUDA[1]: CUDA[0]}},
            [CUDA[0]],
            "Node worker0 has unexpected source devices in its device map for worker1",
        ),
    ],
)
def test_bad_maps_are_named(maps: dict[str, DeviceMap], devices: list[torch.device], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check(maps, devices)


def test_devices_of_other_accelerators_can_be_used() -> None:
    assert to_device_list(["xpu:1"]) == [torch.device("xpu:1")]


def test_targets_that_the_callee_has_pass() -> None:
    check_targets("worker0", "worker1", {CUDA[0]: CUDA[1], CPU: CPU}, "cuda", 2, ())
    check_targets("worker0", "worker1", {CUDA[0]: CUDA[1]}, "cuda", 2, ("cuda:1",))


@pytest.mark.parametrize(
    ("target", "devices", "text"),
    [
        (CUDA[2], (), "Node worker0 has target devices with invalid indices in its device map for worker1"),
        (CUDA[0], ("cuda:1",), "Node worker0 has unexpected target devices in its device map for worker1"),
    ],
)
def test_targets_that_the_callee_does_not_have_are_refused(
    target: torch.device, devices: tuple[str, ...], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        check_targets("worker0", "worker1", {CUDA[0]: target}, "cuda", 2, devices)


def test_a_name_without_an_index_is_the_first_device() -> None:
    assert to_device_map({"cuda": "xpu", "cuda:1": "cpu"}) == {CUDA[0]: torch.device("xpu:0"), CUDA[1]: CPU}
    assert to_device_list(["cuda"]) == [CUDA[0]]


def test_a_number_of_a_device_without_an_accelerator_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    with pytest.raises(RuntimeError, match=r"device 0 of a device map .* without any: leave the"):
        to_device_map({0: "cpu"})
