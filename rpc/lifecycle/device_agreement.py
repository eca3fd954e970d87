"""Device maps of a group: how a worker describes its own, and how it checks those of all.

``rpc.devices`` is imported when the first worker with a device map is met, including this one, and not
before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from rpc.agent.agent import Agent
from rpc.device_maps import check_device_maps, check_targets
from rpc.group.peer import Peer
from rpc.group.workers import Member
from rpc.options import AgentOptions

if TYPE_CHECKING:
    from rpc.devices.installation import Devices

__all__ = ["agree", "check", "described"]

_NO_DEVICES: Final = ("cuda", 0, ())
"""What a worker has that says nothing of devices."""


def described(options: AgentOptions) -> tuple[Any, Any]:
    """Return what other workers must know: the last two attributes of a ``Member``."""
    maps, devices = options.device_maps, options.devices
    kind, count = accelerator()
    if not maps and not devices and not count:
        return (), None
    pairs = tuple(
        (callee, tuple((str(source), str(target)) for source, target in each.items()))
        for callee, each in maps.items()
    )
    return pairs, (kind, count, tuple(map(str, devices)))


def accelerator() -> tuple[str, int]:
    """Return the type of this process's accelerator and its number of devices; "cuda" and 0 if
    there is none.
    """
    device = torch.accelerator.current_accelerator()
    if device is None:
        return "cuda", 0
    try:
        return device.type, torch.accelerator.device_count()
    except RuntimeError:  # nothing in this process brings devices of this type
        return device.type, 0


def check(name: str, options: AgentOptions, members: Sequence[Member], *, static: bool) -> None:
    """Check the device maps of all members, as each of them does; raises ``ValueError``.

    Args:
        name: name of this worker, whose options are given.
        members: all members known so far.
        static: whether no worker can join later, so that maps may only name these.
    """
    names = [member.name for member in members] if static else None
    devices_of = {member.name: member.devices or _NO_DEVICES for member in members}
    kind, count = accelerator()
    devices_of[name] = (kind, count, tuple(map(str, options.devices)))
    for member in sorted(members, key=lambda member: member.id):
        if member.name == name:
            maps = options.device_maps
        else:
            maps = {callee: member.maps_for(callee) for callee, _ in member.device_maps}
        kind, count, used = devices_of[member.name]
        devices = [torch.device(device) for device in used]
        check_device_maps(member.name, maps, devices, count, names, kind)
        for callee, device_map in maps.items():
            if callee in devices_of:
                check_targets(member.name, callee, device_map, *devices_of[callee])


def agree(agent: Agent) -> Callable[[Peer], None]:
    """Agree on devices with each worker that is met from now on, if one of the two has a device map. Called
    before the agent joins its group; returns a function to be called then with the agent's peer for itself.
    """
    devices: Devices | None = None

    def met(peer: Peer) -> None:
        nonlocal devices
        theirs = any(callee == agent.info.name for callee, _ in peer.member.device_maps)
        if devices is None and not theirs and not agent.options.device_maps and not agent.options.devices:
            return
        if devices is None:
            from rpc.devices.installation import Devices

            control = agent.messages.control
            devices = Devices(agent.options, agent.executor, agent.serializer, control, agent.info.name)
            agent.lifecycle.hooks.gone.append(devices.gone)
            agent.lifecycle.hooks.closed.append(devices.closed)
            agent.calls.put_border(devices)
            if not peer.is_self:
                devices.met(agent.group.peers.own)
        devices.met(peer)

    agent.lifecycle.hooks.joined.append(met)
    return met
