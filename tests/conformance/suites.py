"""The suites themselves, as classes that the harness can run.

Importing this module imports PyTorch's test code, which binds names of ``torch.distributed.rpc`` as it is
at that moment: install ``farcall.compat`` first.
"""

from __future__ import annotations

import contextlib
import time
import unittest
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

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
    TensorPipeAgentDistAutogradTest,
)
from torch.testing._internal.distributed.rpc.dist_optimizer_test import DistOptimizerTest
from torch.testing._internal.distributed.rpc.examples.parameter_server_test import ParameterServerTest
from torch.testing._internal.distributed.rpc.examples.reinforcement_learning_rpc_test import (
    ReinforcementLearningRpcTest,
)
from torch.testing._internal.distributed.rpc.rpc_test import RpcTest, TensorPipeAgentRpcTest
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (
    TensorPipeRpcAgentTestFixture,
)

from tests.conformance.collectives import GroupsTest, in_place_of_gloo

__all__ = ["SUITES", "Test", "run_rank", "tests", "workers_of"]


SUITES: dict[str, Any] = {
    suite.__name__: type(suite.__name__, (suite, TensorPipeRpcAgentTestFixture, TestCase), {})
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
    )
} | {GroupsTest.__name__: GroupsTest}
"""The suites by name, over PyTorch's default backends or what stands in for them."""


_SECONDS_TO_LET_GO = 0.1

_destroy_process_group = dist.destroy_process_group


def _destroy_what_is_at_rest(*group: Any) -> None:
    """Destroys process groups when gloo's threads have let go of the tensors of the last collective.

    For that they need the interpreter's lock, which PyTorch holds while it waits for these threads to end:
    on a busy machine its own RPC hangs there too. Nothing tells when they are done.
    """
    time.sleep(_SECONDS_TO_LET_GO)
    _destroy_process_group(*group)


class Test(NamedTuple):
    """One test of one suite."""

    suite: str
    name: str

    def __str__(self) -> str:
        return f"{self.suite}.{self.name}"


def tests() -> list[Test]:
    """All tests of all suites, in the order of their names."""
    return [
        Test(suite, name)
        for suite, cls in SUITES.items()
        for name in unittest.TestLoader().getTestCaseNames(cls)
    ]


def workers_of(test: Test) -> int:
    """How many processes a test takes: one for each worker."""
    workers: int = SUITES[test.suite](test.name).world_size
    return workers


def run_rank(test: Test, rank: int, folder: Path, *, farcall: bool = True) -> None:
    """Runs one worker's part of a test, in a process of its own.

    Args:
        test: which one.
        rank: which worker this is.
        folder: the test's own, shared by its workers.
        farcall: whether process groups are farcall's, where those of gloo would be.

    Raises:
        unittest.SkipTest: PyTorch skips the test on this machine.
        Exception: what the test raises.
    """
    set_rng_seed(1234)  # type: ignore[no-untyped-call]
    case = SUITES[test.suite](test.name)
    case.rank = rank
    case.file_name = str(folder / "store")
    try:
        if isinstance(case, GroupsTest):
            with in_place_of_gloo() if farcall else contextlib.nullcontext():
                case.run_rank(folder)
            return
        with mock.patch.object(dist, "destroy_process_group", _destroy_what_is_at_rest):
            getattr(case, test.name)()
    except SystemExit as end:
        for skip in TEST_SKIPS.values():
            if skip.exit_code == end.code:
                raise unittest.SkipTest(skip.message) from None
        raise
    finally:
        if dist.is_initialized():
            _destroy_what_is_at_rest()
