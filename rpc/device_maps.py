"""Device maps: for each of the caller's devices one of the callee's, one to one, so that results can be sent
back. Everything here only checks and normalizes; no tensors are moved.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch

DeviceLike = int | str | torch.device
DeviceMap = dict[torch.device, torch.device]


def to_device_map(device_map: Mapping[DeviceLike, DeviceLike]) -> DeviceMap:
    """Turn a map between anything that names a device into a map between ``torch.device`` objects, which have
    indices, except the CPU.

    Raises:
        ValueError: two devices are mapped to one, or one to two.
        RuntimeError: from ``torch.device``, for something that names no device.
    """
    source_of: DeviceMap = {}
    target_of: DeviceMap = {}
    for source, target in ((_indexed(a), _indexed(b)) for a, b in device_map.items()):
        if target_of.setdefault(source, target) != target:
            raise ValueError(
                f"`device_map` only supports 1-to-1 mapping: "
                f"{source} is mapped to both {target_of[source]} and {target}"
            )
        if source_of.setdefault(target, source) != source:
            raise ValueError(
                f"`device_map` only supports 1-to-1 mapping: "
                f"{source_of[target]} and {source} are both mapped to {target}"
            )
    return target_of


def to_device_list(devices: Iterable[DeviceLike]) -> list[torch.device]:
    """Turn names of accelerators into ``torch.device`` objects, which have indices.

    Raises:
        ValueError: another kind of device.
    """
    normalized = [_indexed(device) for device in devices]
    for device in normalized:
        if device.type in ("cpu", "meta"):
            raise ValueError(
                f"`set_devices` expects accelerators such as CUDA devices only, got a device of type "
                f"{device.type!r}"
            )
    return normalized


def check_device_maps(
    name: str,
    device_maps: Mapping[str, DeviceMap],
    devices: Collection[torch.device],
    device_count: int,
    group: Collection[str] | None = None,
    kind: str = "cuda",
) -> None:
    """Check one worker's device maps against the devices it has and the workers there are; ``ValueError``
    says what is wrong.

    Args:
        name: the worker whose options these are.
        device_maps: its maps, by callee.
        devices: the devices it asked to use; empty for all that its maps name.
        device_count: how many devices its process sees.
        group: names of all workers of a static group; ``None`` for a dynamic one, where a callee may join
            later.
        kind: the type of these devices.
    """
    sees = f"this process sees {device_count} {'CUDA' if kind == 'cuda' else kind} devices"
    if len(set(devices)) != len(devices):
        raise ValueError(f"Node {name} has duplicated devices: {_listed(devices)}")
    if not _all_exist(devices, device_count, kind):
        raise ValueError(f"Node {name} has devices with invalid indices: {_listed(devices)}; {sees}")
    if group is not None and not set(device_maps) <= set(group):
        unknown = ", ".join(sorted(set(device_maps) - set(group)))
        raise ValueError(
            f"Node {name} has invalid target node names in its device maps: {unknown}; "
            f"the group's workers are {', '.join(sorted(group))}"
        )
    for callee, device_map in device_maps.items():
        where = f"in its device map for {callee}"
        if len(set(device_map.values())) != len(device_map):
            raise ValueError(f"Node {name} has duplicated target devices {where}: {device_map}")
        if devices and not set(device_map) <= set(devices):
            raise ValueError(
                f"Node {name} has unexpected source devices {where}: {_listed(device_map)}; "
                f"its devices are {_listed(devices)}"
            )
        if not _all_exist(device_map, device_count, kind):
            raise ValueError(
                f"Node {name} has source devices with invalid indices {where}: {_listed(device_map)}; {sees}"
            )


def check_targets(
    name: str, callee: str, device_map: DeviceMap, kind: str, device_count: int, devices: Collection[str]
) -> None:
    """Check a device map against the devices that the callee has; ``ValueError`` says what is wrong.

    Args:
        name, callee: the two workers.
        device_map: from the one to the other.
        kind: type of the callee's devices.
        device_count: how many its process sees.
        devices: those that it asked to use; empty for all.
    """
    where, targets = f"in its device map for {callee}", device_map.values()
    used = {torch.device(device) for device in devices} | {torch.device("cpu")}
    if devices and not used.issuperset(targets):
        raise ValueError(
            f"Node {name} has unexpected target devices {where}: {_listed(targets)}; the devices of {callee} "
            f"are {', '.join(devices)}"
        )
    if not _all_exist(targets, device_count, kind):
        raise ValueError(
            f"Node {name} has target devices with invalid indices {where}: {_listed(targets)}; {callee} sees "
            f"{device_count} devices of type '{kind}'"
        )


def _indexed(name: DeviceLike) -> torch.device:
    """The device of a name; without an index, it is the first one of its type."""
    if isinstance(name, int) and torch.accelerator.current_accelerator() is None:
        raise RuntimeError(
            f"device {name} of a device map is an accelerator, and the PyTorch of this process is built "
            f"without any: leave the device map out if tensors stay on the CPU; of another worker's device, "
            f"give the type too, such as 'cuda:{name}'"
        )
    device = torch.device(name)
    index: int | None = device.index
    return torch.device(device.type, 0) if index is None and device.type not in ("cpu", "meta") else device


def _all_exist(devices: Iterable[torch.device], device_count: int, kind: str) -> bool:
    return all(
        device.type == "cpu" or (device.type == kind and 0 <= (device.index or 0) < device_count)
        for device in devices
    )


def _listed(devices: Iterable[torch.device]) -> str:
    return ", ".join(map(str, devices))
