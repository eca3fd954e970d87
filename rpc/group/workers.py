"""Descriptions of workers: the name and id that users see, and what peers need to reach a worker."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from rpc.errors import InvalidNameError

__all__ = ["Member", "WorkerInfo", "check_name"]

_NAME: Final = re.compile("[A-Za-z0-9_:-]+")


@dataclass(frozen=True, slots=True, repr=False)
class WorkerInfo:
    """A worker's name and id (its rank), both unique in the group.

    Raises:
        InvalidNameError: the name is empty, has 128 or more characters, or others than ASCII letters,
            digits, ``-``, ``_`` and ``:``.

    Example::

        rpc.rpc_sync(rpc.get_worker_info("trainer1"), torch.add, args=(x, y))
    """

    name: str
    id: int

    def __post_init__(self) -> None:
        check_name(self.name)

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


def check_name(name: object) -> None:
    """Raise ``InvalidNameError`` unless ``name`` can be a worker's name."""
    if not isinstance(name, str) or len(name) >= 128 or not _NAME.fullmatch(name):
        shown = f"{name[:40]!r}..." if isinstance(name, str) and len(name) > 40 else repr(name)
        raise InvalidNameError(
            f"Worker name must match {_NAME.pattern}, must be non-empty and shorter than 128 characters; "
            f"got {shown}"
        )


@dataclass(frozen=True, slots=True)
class Member:
    """A worker as its peers see it.

    Attributes:
        info: name and id.
        incarnation: a random number chosen when the agent started; a worker that returns under its old name
            has another.
        host: identity of the host and network namespace; equal for workers that can connect by Unix sockets.
        addresses: addresses at which the worker listens, best first: ``unix:@NAME``, ``tcp:HOST:PORT``;
            and ``sign:@NAME``, see ``rpc.rendezvous.address.LifeSign``.
        main: the program that runs as ``__main__``, and the names that it defines: see ``main_identity``.
        max_message_bytes: maximum size in bytes of a message that it accepts.
        safe: whether it refuses to load pickles.
        device_maps: for each callee with a device map, pairs of its device and the callee's.
        devices: if it has devices, or device maps: the type of its accelerator, the number of its devices,
            and the names of those that it uses; no names for all.
    """

    info: WorkerInfo
    incarnation: int
    host: str
    addresses: tuple[str, ...]
    main: str = ""
    max_message_bytes: int = 1 << 36
    safe: bool = False
    device_maps: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()
    devices: tuple[str, int, tuple[str, ...]] | None = None

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def id(self) -> int:
        return self.info.id

    def maps_for(self, callee: str) -> dict[torch.device, torch.device]:
        """Return the device map that it has for a callee; empty if it has none."""
        pairs = dict(self.device_maps).get(callee, ())
        return {torch.device(source): torch.device(target) for source, target in pairs}

    def to_wire(self) -> list[Any]:
        """Encode it as a list that msgpack can encode."""
        fields: list[Any] = [
            self.info.name,
            self.info.id,
            self.incarnation,
            self.host,
            list(self.addresses),
            self.main,
            self.max_message_bytes,
            self.safe,
        ]
        if self.device_maps or self.devices is not None:
            fields += [self.device_maps, self.devices]
        return fields

    @classmethod
    def from_wire(cls, fields: Sequence[Any]) -> Member:
        """Decode the list of ``to_wire``; raises ``ValueError`` or ``TypeError`` for anything else."""
        name, worker_id, incarnation, host, addresses, main, max_message_bytes, safe, *devices = fields
        if not (
            isinstance(name, str)
            and isinstance(worker_id, int)
            and isinstance(incarnation, int)
            and isinstance(host, str)
            and isinstance(main, str)
            and isinstance(max_message_bytes, int)
            and isinstance(safe, bool)
            and all(isinstance(address, str) for address in addresses)
        ):
            raise TypeError(f"not a member description: {fields!r}")
        info = WorkerInfo(name, worker_id)
        described = (info, incarnation, host, tuple(addresses), main, max_message_bytes, safe)
        return cls(*described, *_devices_from_wire(name, devices))


def _devices_from_wire(worker: str, fields: Sequence[Any]) -> tuple[Any, ...]:
    """Decode the last two attributes of a member; those of a worker without devices are not sent."""
    match fields:
        case []:
            return ()
        case [maps, None | [str(), int(), _] as devices]:
            device_maps = tuple(
                (str(callee), tuple((str(source), str(target)) for source, target in pairs))
                for callee, pairs in maps
            )
            for callee, pairs in device_maps:
                for name in (name for pair in pairs for name in pair):
                    _check_device(name, f"the device map of worker '{worker}' for '{callee}'")
            return device_maps, devices and (devices[0], devices[1], tuple(map(str, devices[2])))
        case _:
            raise TypeError(f"not a description of devices: {str(fields)[:80]}")


def _check_device(name: str, where: str) -> None:
    try:
        torch.device(name)
    except RuntimeError as error:
        raise ValueError(
            f"{where} names the device {name[:40]!r}, which PyTorch does not know here; if a package brings "
            f"devices of this type, import it before init_rpc ({error})"
        ) from None
