"""Files of tests dealt out to the shares of a run, which run side by side: the slowest first, each to the
share with the least to do, so that all end at about the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

# Seconds that the slowest files take by default on two cores, three shares side by side, relative to tests/.
# Only the balance depends on them.
SECONDS = {
    "group/farcall/test_observing.py": 69,
    "group/farcall/test_launch_signals.py": 65,
    "group/rpc/lifecycle/test_scripts.py": 56,
    "group/examples/test_examples.py": 55,
    "group/examples/test_example_parameter_server.py": 44,
    "group/examples/test_guide.py": 31,
    "group/spmd/engine/test_spmd_start.py": 26,
    "group/farcall/test_xla_names.py": 22,
    "group/farcall/test_launch_machines.py": 20,
    "group/farcall/test_launch.py": 20,
    "group/farcall/test_trace_failures.py": 18,
    "group/rpc/lifecycle/test_local_processes.py": 17,
    "group/spmd/engine/test_six_models.py": 17,
    "group/rpc/runtime/test_process_tuning.py": 15,
    "unit/test_guard.py": 15,
    "group/farcall/test_trace.py": 14,
    "unit/benchmarks/test_benchmarks.py": 13,
    "unit/rpc/rendezvous/test_init_method.py": 12,
    "group/farcall/test_lending.py": 12,
    "group/farcall/test_serving_command.py": 12,
    "group/spmd/engine/test_spmd_mode.py": 12,
    "group/spmd/tensor_parallel/test_tensor_parallel.py": 11,
    "group/farcall/test_page.py": 11,
    "group/rpc/agent/test_slow_calls.py": 10,
    "group/spmd/collectives/test_faults_in_each_collective.py": 9,
    "unit/test_names.py": 9,
    "group/farcall/test_serving_hostile.py": 8,
    "group/farcall/test_program.py": 8,
    "group/dist_autograd/test_stopped_in_training.py": 7,
    "unit/test_dependency_rule.py": 7,
    "unit/dist_autograd/test_modes.py": 7,
    "unit/farcall/test_cli.py": 7,
    "group/examples/test_example_recipes.py": 6,
    "group/rpc/group/test_silence.py": 6,
}
_SECONDS_OF_OTHERS = 0.8  # mean of the files that SECONDS lacks


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
