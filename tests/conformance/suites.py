"""PyTorch's own test suites, run against farcall: ``python -m pytest tests/conformance/suites.py``.

The torch wheel carries the suites of ``torch.distributed.rpc`` and of process groups. With
``farcall.compat`` installed, and farcall's groups in place of gloo's, they test farcall instead. With
``CONFORMANCE_BACKEND=torch`` the very same tests run against PyTorch: the baseline, and the proof that the
harness changes nothing. ``--runxfail`` runs those too that are listed as impossible.
"""

from __future__ import annotations

import contextlib
import os
import unittest
from typing import Any
from unittest import mock

import pytest

import farcall.compat

if os.environ.get("CONFORMANCE_BACKEND") != "torch":
    farcall.compat.install()  # before the suites are imported, which bind names of torch.distributed.rpc

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import TEST_SKIPS
from torch.testing._internal.common_utils import TestCase, set_rng_seed
from torch.testing._internal.distributed.ddp_under_dist_autograd_test import (
    DdpComparisonTest,
    DdpUnderDistAutogradTest,
)
from torch.testing._internal.distributed.nn.api.remote_module_test import (
    RemoteModuleTest,
    ThreeWorkersRemoteModuleTest,
)
from torch.testing._internal.distributed.rpc.dist_autograd_test import (
    DistAutogradTest,
    FaultyAgentDistAutogradTest,
    TensorPipeAgentDistAutogradTest,
)
from torch.testing._internal.distributed.rpc.dist_optimizer_test import DistOptimizerTest
from torch.testing._internal.distributed.rpc.examples.parameter_server_test import ParameterServerTest
from torch.testing._internal.distributed.rpc.examples.reinforcement_learning_rpc_test import (
    ReinforcementLearningRpcTest,
)
from torch.testing._internal.distributed.rpc.faulty_agent_rpc_test import FaultyAgentRpcTest
from torch.testing._internal.distributed.rpc.faulty_rpc_agent_test_fixture import FaultyRpcAgentTestFixture
from torch.testing._internal.distributed.rpc.rpc_test import RpcTest, TensorPipeAgentRpcTest
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (
    TensorPipeRpcAgentTestFixture,
)

from tests.conformance.collectives import GroupsTest, in_place_of_gloo
from tests.conformance.expected import CANNOT_HOLD, FEWEST
from tests.support.workers import RunWorkers, Worker

_FAULTY = (FaultyAgentRpcTest, FaultyAgentDistAutogradTest)
"""Of an agent some of whose messages fail."""

SUITES: dict[str, Any] = {
    suite.__name__: type(
        suite.__name__,
        (suite, FaultyRpcAgentTestFixture if suite in _FAULTY else TensorPipeRpcAgentTestFixture, TestCase),
        {},
    )
    for suite in (
        RpcTest,  # what every backend must do
        TensorPipeAgentRpcTest,  # what PyTorch's default backend does besides
        RemoteModuleTest,
        ThreeWorkersRemoteModuleTest,
        DistAutogradTest,
        TensorPipeAgentDistAutogradTest,
        DdpUnderDistAutogradTest,
        DdpComparisonTest,
        DistOptimizerTest,
        ParameterServerTest,
        ReinforcementLearningRpcTest,
        *_FAULTY,
    )
} | {GroupsTest.__name__: GroupsTest}
"""By name, over PyTorch's default backends or what stands in for them."""

IS_FARCALL = os.environ.get("CONFORMANCE_BACKEND") != "torch"

TESTS = [
    (suite, name) for suite, cls in SUITES.items() for name in unittest.TestLoader().getTestCaseNames(cls)
]

TIME_LIMIT = 60.0

_destroy_process_group = dist.destroy_process_group
_never_freed: list[Any] = []


def _destroy_and_keep(*group: Any) -> None:
    """Destroys process groups, but never frees them.

    Whoever frees one waits, interpreter in hand, for gloo's threads, and these need the interpreter to let go
    of the last collective: on a busy machine PyTorch's own RPC hangs there too.
    """
    _never_freed.extend(dist.distributed_c10d._world.pg_map)
    _destroy_process_group(*group)


def run_rank(worker: Worker, suite: str, name: str) -> str:
    """One worker's part of a test; why PyTorch skips it on this machine, or an empty string."""
    set_rng_seed(1234)  # type: ignore[no-untyped-call]
    case = SUITES[suite](name)
    case.rank = worker.rank
    case.file_name = str(worker.folder / "store")
    try:
        if isinstance(case, GroupsTest):
            with in_place_of_gloo() if IS_FARCALL else contextlib.nullcontext():
                case.run_rank(worker.folder)
            return ""
        with mock.patch.object(dist, "destroy_process_group", _destroy_and_keep):
            getattr(case, name)()
    except unittest.SkipTest as skip:
        return str(skip)
    except SystemExit as end:
        if not end.code:
            return ""
        for known in TEST_SKIPS.values():
            if known.exit_code == end.code:
                return str(known.message)
        raise
    finally:
        if dist.is_initialized():
            _destroy_and_keep()
    return ""


def _marks(suite: str, name: str) -> list[pytest.MarkDecorator]:
    if name in CANNOT_HOLD:
        return [pytest.mark.xfail(reason=CANNOT_HOLD[name], run=False)]
    if getattr(SUITES[suite](name), "needs_gpus", False) and not torch.cuda.is_available():
        return [pytest.mark.skip(reason="needs GPUs")]
    return []


@pytest.mark.timeout(TIME_LIMIT + 30)
@pytest.mark.parametrize(
    ("suite", "name"),
    [
        pytest.param(
            suite,
            name,
            id=f"{suite}.{name}",
            marks=_marks(suite, name),
        )
        for suite, name in TESTS
    ],
)
def test_of_pytorch(run_workers: RunWorkers, suite: str, name: str) -> None:
    count: int = SUITES[suite](name).world_size
    if any(skips := run_workers(run_rank, count, [suite, name], time_limit=TIME_LIMIT)):
        pytest.skip(max(skips))


def test_the_list_of_what_cannot_hold_names_tests_and_is_short() -> None:
    assert CANNOT_HOLD.keys() <= {name for _, name in TESTS}
    assert sum(name not in CANNOT_HOLD for _, name in TESTS) >= FEWEST
