"""Sharded execution: collectives on farcall's agent, tensor parallelism, and SPMD mode.

Importing it registers the backend ``farcall`` with PyTorch. Its names are imported on first use.

Example::

    from farcall import rpc, spmd
    from farcall.spmd.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    rpc.init_rpc("worker0", rank=0, world_size=4)
    spmd.init_process_group()
    mesh = init_device_mesh("cpu", (4,))
    parallelize_module(mlp, mesh, {"w1": ColwiseParallel(), "w2": RowwiseParallel()})
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import farcall_guard

farcall_guard.check("rpc", "rref", "dist_autograd")

from spmd import backend

if TYPE_CHECKING:
    from spmd.collectives.start import dump_flight_recorder, init_process_group
    from spmd.engine.driver.start import (
        device,
        global_device_count,
        is_spmd,
        report,
        shutdown,
        strict,
        sync,
    )
    from spmd.sharding.auto import AutoPlan, auto_plan, auto_policy
    from spmd.sharding.distribute import distribute_module, distribute_tensor
    from spmd.sharding.hybrid_mesh import HybridMesh
    from spmd.sharding.loader import DeviceLoader
    from spmd.sharding.manual import disable_manual_sharding, enable_manual_sharding
    from spmd.sharding.marks import (
        ShardingSpec,
        annotate_custom_sharding,
        clear_sharding,
        mark_sharding,
        mark_sharding_with_gradients,
        wrap_if_sharded,
    )
    from spmd.sharding.mesh import Mesh, get_1d_mesh, get_global_mesh, set_global_mesh
    from spmd.sharding.mode import use_spmd
    from spmd.sharding.op_sharding import OpSharding, ShardingType
    from spmd.sharding.sharded_tensor import Shard, ShardedTensor
    from spmd.sharding.visualize import visualize_sharding, visualize_tensor_sharding
    from spmd.tensor_parallel import explain

__all__ = [
    "AutoPlan",
    "DeviceLoader",
    "HybridMesh",
    "Mesh",
    "OpSharding",
    "Shard",
    "ShardedTensor",
    "ShardingSpec",
    "ShardingType",
    "annotate_custom_sharding",
    "auto_plan",
    "auto_policy",
    "clear_sharding",
    "device",
    "disable_manual_sharding",
    "distribute_module",
    "distribute_tensor",
    "dump_flight_recorder",
    "enable_manual_sharding",
    "explain",
    "get_1d_mesh",
    "get_global_mesh",
    "global_device_count",
    "init_process_group",
    "is_spmd",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "report",
    "set_global_mesh",
    "shutdown",
    "strict",
    "sync",
    "use_spmd",
    "visualize_sharding",
    "visualize_tensor_sharding",
    "wrap_if_sharded",
]

_PLACES: Final = {
    "explain": "spmd.tensor_parallel",
    **dict.fromkeys(("dump_flight_recorder", "init_process_group"), "spmd.collectives.start"),
    **dict.fromkeys(
        ("device", "global_device_count", "is_spmd", "report", "shutdown", "strict", "sync"),
        "spmd.engine.driver.start",
    ),
    **dict.fromkeys(("distribute_module", "distribute_tensor"), "spmd.sharding.distribute"),
    **dict.fromkeys(("AutoPlan", "auto_plan", "auto_policy"), "spmd.sharding.auto"),
    "HybridMesh": "spmd.sharding.hybrid_mesh",
    "DeviceLoader": "spmd.sharding.loader",
    **dict.fromkeys(("disable_manual_sharding", "enable_manual_sharding"), "spmd.sharding.manual"),
    **dict.fromkeys(
        (
            "ShardingSpec",
            "annotate_custom_sharding",
            "clear_sharding",
            "mark_sharding",
            "mark_sharding_with_gradients",
            "wrap_if_sharded",
        ),
        "spmd.sharding.marks",
    ),
    **dict.fromkeys(("Mesh", "get_1d_mesh", "get_global_mesh", "set_global_mesh"), "spmd.sharding.mesh"),
    "use_spmd": "spmd.sharding.mode",
    **dict.fromkeys(("OpSharding", "ShardingType"), "spmd.sharding.op_sharding"),
    **dict.fromkeys(("Shard", "ShardedTensor"), "spmd.sharding.sharded_tensor"),
    **dict.fromkeys(("visualize_sharding", "visualize_tensor_sharding"), "spmd.sharding.visualize"),
}

backend.register()


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'spmd' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_PLACES[name]), name)
