"""``torch_xla.runtime``: one process, one logical device, and workers behind it."""

from __future__ import annotations

import os
from typing import Any

from farcall.compat.torch_xla.mode import begin_spmd, expected_workers, is_spmd
from spmd.sharding.auto import choose
from spmd.sharding.devices import attributes
from spmd.sharding.mesh import Mesh

__all__ = [
    "addressable_device_count",
    "addressable_runtime_device_count",
    "device_type",
    "get_master_ip",
    "get_num_cached_compilation_graph",
    "global_device_count",
    "global_ordinal",
    "global_runtime_device_attributes",
    "global_runtime_device_count",
    "host_index",
    "initialize_cache",
    "is_bf16_supported",
    "is_spmd",
    "local_device_count",
    "local_ordinal",
    "local_process_count",
    "process_count",
    "process_index",
    "runtime_device_attributes",
    "set_device_type",
    "use_spmd",
    "world_size",
]


def use_spmd(auto: bool = False) -> None:
    """Begin SPMD mode, in which ``"xla"`` is a name of the logical device; doing it twice is doing it once.

    ``auto``, or ``XLA_AUTO_SPMD=1``, has shardings chosen where the program says none, over a mesh of the
    shape in ``XLA_AUTO_SPMD_MESH`` (``"2,2"``) if that is set. A second call may ask for it.
    """
    begin_spmd()
    if auto or os.environ.get("XLA_AUTO_SPMD", "0") == "1":
        shape = os.environ.get("XLA_AUTO_SPMD_MESH")
        sizes = [int(each) for each in shape.split(",")] if shape else None
        choose(None if sizes is None else Mesh(range(expected_workers()), sizes))


def global_runtime_device_count() -> int:
    """How many workers there are, or will be."""
    return expected_workers()


def addressable_runtime_device_count() -> int:
    """How many workers this process drives: all."""
    return global_runtime_device_count()


def global_runtime_device_attributes() -> list[dict[str, Any]]:
    """Of each worker, what meshes need to know."""
    return attributes()


def device_type() -> str:
    """The kind of device."""
    return "CPU"


def set_device_type(pjrt_device: str) -> None:
    """Set the type of the device.

    Raises:
        ValueError: it is another kind than ``"CPU"``.
    """
    if pjrt_device != device_type():
        raise ValueError(f"workers compute on CPUs, and {pjrt_device!r} is asked for: leave it out")


def get_master_ip() -> str:
    """Raises, as theirs does on CPUs."""
    raise RuntimeError(
        "IP discovery not supported for device: CPU. Workers meet as docs/spmd.md says; the address of the "
        "machine that this program runs on is socket.gethostbyname(socket.gethostname())"
    )


def runtime_device_attributes(device: str) -> dict[str, Any]:
    """Of one worker, by its name, ``"CPU:0"``."""
    return next(each for each in attributes() if each["name"] == device)


def get_num_cached_compilation_graph() -> int:
    """None: programs are not compiled."""
    return 0


def is_bf16_supported() -> bool:
    """Whether workers compute with bfloat16."""
    return True


def initialize_cache(path: str, readonly: bool = False) -> None:
    """Nothing: programs are not compiled."""


def _one() -> int:
    """One: there is one process, with one logical device."""
    return 1


def _zero() -> int:
    """The first, of one."""
    return 0


world_size = global_device_count = local_device_count = addressable_device_count = _one
process_count = local_process_count = _one
global_ordinal = local_ordinal = process_index = host_index = _zero
