"""``torch_xla.runtime``: one process, one logical device, and workers behind it."""

from __future__ import annotations

import os
from typing import Any

from farcall.compat.torch_xla import compiling, device_name, operators
from spmd.engine.start import global_device_count as _workers
from spmd.engine.start import is_spmd
from spmd.sharding.auto import choose
from spmd.sharding.devices import attributes
from spmd.sharding.mesh import Mesh
from spmd.sharding.mode import use_spmd as _use_spmd

__all__ = [
    "addressable_device_count",
    "addressable_runtime_device_count",
    "device_type",
    "global_device_count",
    "global_ordinal",
    "global_runtime_device_attributes",
    "global_runtime_device_count",
    "initialize_cache",
    "is_bf16_supported",
    "is_spmd",
    "local_device_count",
    "local_ordinal",
    "local_process_count",
    "process_count",
    "process_index",
    "use_spmd",
    "world_size",
]


def use_spmd(auto: bool = False) -> None:
    """Begin SPMD mode, in which ``"xla"`` is a name of the logical device; doing it twice is doing it once.

    ``auto``, or ``XLA_AUTO_SPMD=1``, has shardings chosen where the program says none, over a mesh of the
    shape in ``XLA_AUTO_SPMD_MESH`` (``"2,2"``) if that is set. A second call may ask for it.
    """
    if not is_spmd():
        _use_spmd()
    device_name.lend()
    operators.define()
    compiling.lend()
    if auto or os.environ.get("XLA_AUTO_SPMD", "0") == "1":
        shape = os.environ.get("XLA_AUTO_SPMD_MESH")
        sizes = [int(each) for each in shape.split(",")] if shape else None
        choose(None if sizes is None else Mesh(range(_workers()), sizes))


def global_runtime_device_count() -> int:
    """How many workers there are, or will be."""
    if is_spmd():
        return _workers()
    return int(os.environ.get("FARCALL_SPMD_WORKERS") or len(os.sched_getaffinity(0)))


def addressable_runtime_device_count() -> int:
    """How many workers this process drives: all."""
    return global_runtime_device_count()


def global_runtime_device_attributes() -> list[dict[str, Any]]:
    """Of each worker, what meshes need to know."""
    return attributes()


def device_type() -> str:
    """The kind of device."""
    return "CPU"


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
global_ordinal = local_ordinal = process_index = _zero
