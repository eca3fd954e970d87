"""Files of tests dealt out to the shares of a run, which run side by side: the slowest first, each to the
share with the least to do, so that all end at about the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

# Seconds that the slowest files take by default on two cores, three shares side by side, relative to tests/.
# Only the balance depends on them.
SECONDS = {
    "group/examples/test_examples.py": 55,
    "group/examples/test_example_parameter_server.py": 40,
    "group/spmd/tensor_parallel/test_tensor_parallel_llama.py": 32,
    "group/examples/test_guide.py": 29,
    "group/spmd/engine/test_six_models.py": 29,
    "group/farcall/test_launch_signals.py": 28,
    "group/rpc/lifecycle/test_scripts.py": 24,
    "group/spmd/tensor_parallel/test_tensor_parallel.py": 21,
    "unit/test_guard.py": 18,
    "group/spmd/tensor_parallel/test_served.py": 15,
    "group/farcall/test_launch.py": 14,
    "group/farcall/test_observing.py": 14,
    "group/spmd/engine/test_spmd_mode.py": 14,
    "group/spmd/engine/test_spmd_start.py": 14,
    "group/rpc/bulk/test_bulk.py": 13,
    "group/rpc/lifecycle/test_local_processes.py": 13,
    "unit/benchmarks/test_benchmarks.py": 13,
    "group/farcall/test_lending.py": 12,
    "group/farcall/test_serving_command.py": 12,
    "group/farcall/test_xla_names.py": 12,
    "unit/rpc/rendezvous/test_init_method.py": 12,
    "group/farcall/test_page.py": 11,
    "group/spmd/collectives/test_collective_faults.py": 11,
    "group/spmd/engine/test_spmd_memory.py": 11,
    "simulation/test_simulation.py": 11,
    "unit/rref/protocol/test_exhaustive.py": 11,
    "group/farcall/test_launch_machines.py": 10,
    "group/rpc/agent/test_slow_calls.py": 10,
    "unit/spmd/engine/test_rules.py": 10,
    "group/rpc/runtime/test_process_tuning.py": 9,
    "group/spmd/collectives/test_collectives.py": 9,
    "group/spmd/collectives/test_dtypes.py": 9,
    "group/spmd/collectives/test_faults_in_each_collective.py": 9,
    "unit/farcall/test_cli.py": 9,
    "unit/spmd/engine/test_cases.py": 9,
    "unit/test_dependency_rule.py": 9,
    "group/farcall/test_program.py": 8,
    "group/farcall/test_serving_hostile.py": 8,
    "group/rpc/transport/test_grpc.py": 8,
    "group/spmd/engine/test_spmd_failures.py": 8,
    "group/spmd/fsdp/test_fsdp.py": 8,
    "unit/spmd/engine/test_cost.py": 8,
    "unit/spmd/engine/test_memory.py": 8,
    "fuzz/autograd/test_program_faults.py": 7,
    "group/dist_autograd/test_sent_leaves.py": 7,
    "group/dist_autograd/test_stopped_in_training.py": 7,
    "group/rpc/bulk/test_large_messages.py": 7,
    "group/rpc/bulk/test_segment_faults.py": 7,
    "group/rpc/runtime/test_fork.py": 7,
    "unit/dist_autograd/test_modes.py": 7,
    "unit/rpc/bulk/test_stream_ends.py": 7,
    "unit/spmd/engine/test_aliases.py": 7,
    "unit/spmd/engine/test_auto.py": 7,
    "group/examples/test_example_recipes.py": 6,
    "group/farcall/test_trace_failures.py": 6,
    "group/farcall/xla/test_vision.py": 6,
    "group/rpc/bulk/test_bulk_streams.py": 6,
    "group/rpc/group/test_reconnection.py": 6,
    "group/rpc/group/test_silence.py": 6,
    "group/spmd/collectives/test_pytorch_on_top.py": 6,
    "group/spmd/engine/test_placements.py": 6,
    "unit/rpc/wire/test_chunking.py": 6,
    "unit/rpc/wire/test_header_check.py": 6,
    "fuzz/autograd/test_programs.py": 5,
    "group/farcall/test_trace.py": 5,
    "group/spmd/tensor_parallel/test_tensor_parallel_loss.py": 5,
}
_SECONDS_OF_OTHERS = 1.0  # mean of the files that SECONDS lacks


def share_of(files: Sequence[Path], root: Path, number: int, shares: int) -> frozenset[Path]:
    """Files of share ``number`` (from 1) of ``shares``, whatever the order of ``files``."""
    seconds = {file: SECONDS.get(file.relative_to(root).as_posix(), _SECONDS_OF_OTHERS) for file in files}
    dealt: list[list[Path]] = [[] for _ in range(shares)]
    loads = [0.0] * shares
    for file in sorted(files, key=lambda file: (-seconds[file], file)):
        least = loads.index(min(loads))
        dealt[least].append(file)
        loads[least] += seconds[file]
    return frozenset(dealt[number - 1])
