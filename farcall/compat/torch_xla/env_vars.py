"""``torch_xla.core.xla_env_vars``: names of environment variables.

Of these, ``PJRT_DEVICE`` and ``CPU_NUM_DEVICES`` have a meaning here.
"""

from __future__ import annotations

from typing import Final

__all__: list[str] = []

_OF_THEIR_NAME: Final = (
    *("ACCELERATOR_TYPE", "CLOUD_TPU_TASK_ID", "CPU_NUM_DEVICES", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("PJRT_CPU_ASYNC_CLIENT", "PJRT_DEVICE", "PJRT_DIST_SERVICE_ADDR", "PJRT_DYNAMIC_PLUGINS"),
    *("PJRT_LOCAL_PROCESS_COUNT", "PJRT_LOCAL_PROCESS_RANK", "PJRT_SELECT_DEFAULT_DEVICE", "RANK"),
    *("TPUVM_MODE", "TPU_ACCELERATOR_TYPE", "TPU_CHIPS_PER_HOST_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS"),
    *("TPU_HOST_BOUNDS", "TPU_NUM_DEVICES", "TPU_PROCESS_ADDRESSES", "TPU_PROCESS_BOUNDS"),
    *("TPU_PROCESS_PORT", "TPU_SKIP_MDS_QUERY", "TPU_VISIBLE_CHIPS", "TPU_WORKER_HOSTNAMES"),
    *("TPU_WORKER_ID", "WORKER_ID", "WORLD_SIZE"),
)
_NAMES: Final = {
    **{each: each for each in _OF_THEIR_NAME},
    "TPU_MESH_CTLER_ADDR": "TPU_MESH_CONTROLLER_ADDRESS",
    "TPU_MESH_CTLER_PORT": "TPU_MESH_CONTROLLER_PORT",
}
globals().update(_NAMES)
__all__ += list(_NAMES)
