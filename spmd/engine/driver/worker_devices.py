"""Where the workers of SPMD mode compute: ``"worker1"``, ``"worker1/cuda:0"``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from spmd.engine.errors import SpmdError

__all__ = ["WorkerDevice", "on_device", "workers_and_devices"]


@dataclass(frozen=True, slots=True)
class WorkerDevice:
    """A worker of the RPC group, and the device on which it computes; None for the CPU."""

    worker: str
    device: str | None = None


def on_device(workers: Sequence[str], device: str | None) -> list[WorkerDevice]:
    """Return workers that compute on the same device, or on devices of the same type."""
    return [WorkerDevice(each, _not_cpu(device)) for each in workers]


def workers_and_devices(
    named: Sequence[str], members: Sequence[str], device: str | None
) -> list[WorkerDevice]:
    """Return what a program has named.

    Args:
        named: names of workers, possibly with devices.
        members: names of the workers that there are.
        device: device of workers that are named without one.

    Raises:
        SpmdError: a name is wrong, occurs twice, or has no index of a device where it needs one.
    """
    found = [_parsed(each, members, device) for each in named]
    wrong = [text for text, each in zip(named, found, strict=True) if each.worker not in members]
    if wrong or not found or len(set(found)) != len(found):
        raise SpmdError(
            "expected names of other workers of this RPC group, each once, or once for each of its devices, "
            f"such as 'worker1/cuda:0', got {list(named)}"
        )
    counts = Counter(each.worker for each in found)
    for text, each in zip(named, found, strict=True):
        if counts[each.worker] > 1 and not _split(each.device)[1]:
            raise SpmdError(
                f"worker '{each.worker}' is named {counts[each.worker]} times, so expected an index "
                f"of a device each time, as in '{each.worker}/cuda:0', got '{text}'"
            )
    types = {_split(each.device)[0] for each in found}
    if len(types) > 1:
        raise SpmdError(f"expected devices of one type, got {', '.join(sorted(types))}: {list(named)}")
    return found


def _parsed(text: str, members: Sequence[str], device: str | None) -> WorkerDevice:
    worker, slash, own = text.rpartition("/")
    if text in members or not slash:
        return WorkerDevice(text, _not_cpu(device))
    if device is not None:
        raise SpmdError(f"expected devices with the names of the workers or in device=, got both: '{text}'")
    return WorkerDevice(worker, _not_cpu(own))


def _not_cpu(device: str | None) -> str | None:
    return None if _split(device)[0] == "cpu" else device


def _split(device: str | None) -> tuple[str, str]:
    """Return type and index of a device; PyTorch need not know the type in this process."""
    kind, _, index = (device or "cpu").partition(":")
    return kind, index
