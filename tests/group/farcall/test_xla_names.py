"""Programs written for PyTorch/XLA's SPMD mode, which say its names."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spmd
from farcall import cli, compat
from tests.support.serving import in_processes
from tests.support.workers import RunWorkers, Worker

EVERY_NAME = {
    "torch_xla": "sync device step compile device_count devices real_devices manual_seed launch",
    "torch_xla._internal.tpu": "num_available_devices version get_worker_ips",
    "torch_xla.amp.syncfree": "SGD Adam AdamW",
    "torch_xla.core.xla_env_vars": "PJRT_DEVICE CPU_NUM_DEVICES TPU_MESH_CTLER_ADDR",
    "torch_xla.core.xla_builder": "Op create_computation",
    "torch_xla.distributed.xla_multiprocessing": "spawn MpModelWrapper MpSerialExecutor",
    "torch_xla.experimental": "eager_mode",
    "torch_xla.experimental.custom_kernel": "flash_attention paged_attention FlashAttention",
    "torch_xla.experimental.eager": "eager_mode eager_mode_context is_eager_mode",
    "torch_xla.experimental.gradient_accumulation": "gradient_accumulation",
    "torch_xla.experimental.scan": "scan",
    "torch_xla.experimental.scan_layers": "scan_layers",
    "torch_xla.stablehlo": "save_as_stablehlo",
    "torch_xla.test.test_utils": "print_training_update write_to_summary",
    "torch_xla.core.xla_model": "reduce_gradients broadcast_master_param get_memory_info is_xla_tensor "
    "reduce_scatter all_to_all collective_permute fork_rng optimization_barrier_ "
    "xla_device mark_step wait_device_ops send_cpu_data_to_device master_print "
    "add_step_closure RateTracker optimizer_step save get_ordinal is_master_ordinal xrt_world_size",
    "torch_xla.runtime": "use_spmd is_spmd global_runtime_device_count addressable_runtime_device_count "
    "global_runtime_device_attributes world_size global_ordinal local_ordinal global_device_count "
    "process_index process_count device_type get_master_ip host_index set_device_type",
    "torch_xla.amp": "autocast GradScaler",
    "torch_xla.debug.metrics": "counter_names counter_value metric_names metric_data metrics_report "
    "clear_all clear_counters",
    "torch_xla.debug.profiler": "StepTrace Trace start_server trace trace_detached",
    "torch_xla.distributed.spmd.api": "auto_policy xla_distribute_module convert_to_xla_mesh",
    "torch_xla.distributed.spmd": "auto_policy Mesh HybridMesh ShardingType ShardingSpec XLAShard "
    "XLAShardedTensor mark_sharding mark_sharding_with_gradients annotate_custom_sharding clear_sharding "
    "wrap_if_sharded wrap_as_sharded_tensor set_global_mesh get_global_mesh get_1d_mesh "
    "enable_manual_sharding disable_manual_sharding xla_distribute_tensor xla_distribute_module xla_sharding "
    "shard_as "
    "MarkShardingFunction EinsumLinear "
    "XLAPatchedLinear apply_xla_patch_to_nn_linear xla_patched_nn_linear_forward unwrap_sharded_tensor "
    "apply_backward_optimization_barrier convert_to_xla_mesh convert_to_xla_partition_spec "
    "_mark_manual_sharding",
    "torch_xla.distributed.spmd.debugging": "visualize_sharding visualize_tensor_sharding "
    "construct_v1_sharding_str",
    "torch_xla.distributed.fsdp": "checkpoint_module XlaFullyShardedDataParallel",
    "torch_xla.distributed.fsdp.wrap": "always_wrap_policy lambda_auto_wrap_policy recursive_wrap "
    "size_based_auto_wrap_policy transformer_auto_wrap_policy",
    "torch_xla.distributed.parallel_loader": "MpDeviceLoader",
    "torch_xla.experimental.spmd_fully_sharded_data_parallel": "SpmdFullyShardedDataParallel",
    "torch_xla.experimental.distributed_checkpoint": "SPMDSavePlanner SPMDLoadPlanner CheckpointManager "
    "prime_optimizer",
    "torch_xla.utils.checkpoint": "checkpoint",
    "torch_xla.utils.utils": "SampleGenerator getenv_as check_env_flag",
    "torch_xla._XLAC": "OpSharding _get_xla_sharding_spec _get_xla_sharding_specs _get_xla_sharding_type "
    "_get_xla_op_sharding _global_tensor_from_cpu_shards _mark_manual_sharding _spmd_full_to_shard_shape "
    "_spmd_shard_to_full_shape _xla_get_auto_sharding _get_xla_tensors_hlo _get_xla_tensor_debug_info "
    "_sync_point_reached",
}


@in_processes(1)
def test_names_are_lent_as_long_as_the_layer_is_installed(worker: Worker) -> None:
    assert importlib.util.find_spec("torch_xla") is None
    compat.install()
    for module, names in EVERY_NAME.items():
        lent = importlib.import_module(module)
        assert not [name for name in names.split() if not hasattr(lent, name)], module
    with pytest.raises(AttributeError, match="without 'no_such_name'"):
        importlib.import_module("torch_xla.runtime").no_such_name  # noqa: B018
    compat.uninstall()
    assert importlib.util.find_spec("torch_xla") is None
    assert not [name for name in sys.modules if name.startswith("torch_xla")]
    with pytest.raises(RuntimeError, match="xla"):
        torch.ones(1).to("xla")


@in_processes(1)
def test_a_torch_xla_that_is_installed_stays(worker: Worker) -> None:
    package = worker.folder / "torch_xla"
    package.mkdir()
    (package / "__init__.py").write_text("its_own = True\n")
    sys.path.insert(0, str(worker.folder))
    importlib.invalidate_caches()
    compat.install()
    assert importlib.import_module("torch_xla").its_own
    with pytest.raises(ImportError):
        importlib.import_module("torch_xla.runtime")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.fc2(torch.relu(self.fc1(x)))
        return result


def policy(worker: Worker) -> None:
    """A module that their policy distributes, after the mode has begun."""
    with worker.group():
        if worker.rank:
            return
        compat.install()
        torch_xla: Any = importlib.import_module("torch_xla")
        xr: Any = importlib.import_module("torch_xla.runtime")
        xs: Any = importlib.import_module("torch_xla.distributed.spmd")
        tensor: Any = importlib.import_module("torch.distributed.tensor")
        xr.use_spmd()
        assert not torch_xla._XLAC._xla_get_auto_sharding()
        mesh = tensor.DeviceMesh("xla", list(range(xr.global_runtime_device_count())))
        model = tensor.distribute_module(Net(), mesh, xs.auto_policy)
        assert torch_xla._XLAC._xla_get_auto_sharding()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.ones(8, 16, device="xla")).square().mean()
            torch.autograd.backward(loss)
            optimizer.step()
            torch_xla.sync()
            losses.append(loss.item())
        assert losses[0] > losses[1] > losses[2]
        plan = sys.modules["spmd"].auto_plan()
        assert plan.held_after < plan.held_before
        assert "devices" in model.fc1.weight.sharding_spec
        sys.modules["spmd"].shutdown()


def test_their_policy_leaves_the_choice_to_the_cost_model(run_workers: RunWorkers) -> None:
    run_workers(policy, 3)


_WITHOUT_SPMD = """
import os
import torch, torch_xla
import torch_xla.runtime as xr

assert os.environ["PJRT_DEVICE"] == "CPU"
made = torch.ones(2, device="xla").tolist()
print(made, torch_xla.device(), xr.is_spmd(), xr.global_runtime_device_count())
xr.use_spmd()
made = torch.ones(2, device="xla").tolist()
print(os.environ["XLA_USE_SPMD"], xr.is_spmd(), xr.global_runtime_device_count(), made)
"""


def run_program(worker: Worker, program: str) -> str:
    """What a program prints under ``farcall run`` on a machine with two devices."""
    os.environ.pop("FARCALL_SPMD_WORKERS", None)
    os.environ["CPU_NUM_DEVICES"] = "2"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert cli.main(["run", program]) == 0
        spmd.shutdown()
    return printed.getvalue()


def test_without_use_spmd_the_device_is_one_of_one_worker(run_workers: RunWorkers, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_WITHOUT_SPMD)
    (printed,) = run_workers(run_program, 1, args=(str(program),), time_limit=60)
    assert printed == "[1.0, 1.0] spmd:0 False 2\n1 True 2 [1.0, 1.0]\n"
