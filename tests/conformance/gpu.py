"""PyTorch's own tests of RPC with GPUs, on any accelerator: ``pytest tests/conformance/gpu.py``.

They say "cuda" in their sources. Where the device is another one, as the simulated accelerator, each worker
runs them from these sources with its name in that place, as modules under the names of the originals, so that
what is pickled by name is found. See ``tests.support.devices`` for the choice of the device.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import types
import unittest
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

import farcall.compat

if os.environ.get("CONFORMANCE_BACKEND") != "torch":
    farcall.compat.install()  # before the suites are imported, which bind names of torch.distributed.rpc

from torch.testing._internal import common_distributed, dist_utils  # noqa: F401  # before workers are forked
from torch.testing._internal.common_utils import TestCase, set_rng_seed
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (
    TensorPipeRpcAgentTestFixture,
)

from tests.conformance.expected import CANNOT_HOLD_ON_DEVICES, FEWEST_ON_DEVICES
from tests.support.devices import COUNT, KIND, device_kind, use_device
from tests.support.workers import RunWorkers, Worker

__all__ = ["device_kind"]

_ROOT: Final = "torch.testing._internal.distributed"
_MODULES: Final = {
    f"{_ROOT}.rpc.rpc_test": ("CudaRpcTest", "TensorPipeAgentRpcTest", "TensorPipeAgentCudaRpcTest"),
    f"{_ROOT}.rpc.dist_autograd_test": ("CudaDistAutogradTest", "TensorPipeCudaDistAutogradTest"),
    f"{_ROOT}.nn.api.remote_module_test": ("CudaRemoteModuleTest",),
    f"{_ROOT}.ddp_under_dist_autograd_test": ("CudaDdpComparisonTest",),
}
"""Modules, and their classes that have tests with GPUs."""

_NEEDED: Final = re.compile(r"@skip_if_lt_x_gpu\((\d)\)\s+(?:@[^\n]+\s+)*def (test_\w+)")
_MODE: Final = os.environ.get("CONFORMANCE_MODE", "eager")
"""How the simulated accelerator runs its streams."""


@cache
def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text()


def _tests() -> list[tuple[str, str, int]]:
    """Class, test, and how many devices it needs."""
    found: list[tuple[str, str, int]] = []
    for module, classes in _MODULES.items():
        source = _source(module)
        for name in classes:
            body = re.split(rf"^class {name}\b", source, flags=re.MULTILINE)[1]
            body = re.split(r"^class ", body, flags=re.MULTILINE)[0]
            needed = {test: int(count) for count, test in _NEEDED.findall(body)}
            if name in ("TensorPipeAgentCudaRpcTest", "CudaDdpComparisonTest"):
                needed |= {test: 0 for test in re.findall(r"def (test_\w+)\(", body) if test not in needed}
            found += [(name, test, count) for test, count in needed.items()]
    return found


TESTS: Final = _tests()


def _rewritten(module: str) -> str:
    """The source of a module, which says this device's name where it said "cuda"."""
    source = _source(module)
    source = source.replace("torch.cuda.", f"torch.{KIND}.").replace(".cuda(", f".{KIND}(")
    source = re.sub(r"(?<=[\"'{])cuda(?=[\"':}])", KIND, source)
    source = source.replace("cuda:", f"{KIND}:")
    source = re.sub(r"(\w+)\.is_cuda", rf"(\1.device.type == '{KIND}')", source)
    # The simulated device sleeps microseconds, not cycles.
    source = source.replace("get_cycles_per_ms()", "20")
    source = re.sub(r"^FIFTY_MIL_CYCLES = \d+", "FIFTY_MIL_CYCLES = 2000", source, flags=re.MULTILINE)
    # It computes on the CPU: so small layers, of which thirty passes end in time.
    source = source.replace("(2048, 20000)", "(64, 200)").replace(
        "torch.rand(2048, 2048)", "torch.rand(64, 64)"
    )
    source = source.replace("CUDA error", f"{KIND.upper()} error")
    return re.sub(r"@skip_if_lt_x_gpu\(\d\)", "", source)


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory, device_kind: str) -> Path | None:
    """A folder with the modules for this device; None if they are right as they are."""
    if device_kind == "cuda":
        return None
    folder = tmp_path_factory.mktemp("sources")
    for module in _MODULES:
        (folder / f"{module}.py").write_text(_rewritten(module))
    return folder


def _module(name: str, folder: Path | None) -> types.ModuleType:
    """A module, from the folder where there is one."""
    if folder is not None and name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
    return importlib.import_module(name)


def run_rank(worker: Worker, suite: str, name: str, folder: Path | None) -> str:
    """One worker's part of a test; why it is skipped, or an empty string."""
    use_device(_MODE, worker.rank)
    of_suite = next(module for module, classes in _MODULES.items() if suite in classes)
    for module in (f"{_ROOT}.rpc.rpc_test", of_suite):
        base: Any = getattr(_module(module, folder), suite, None)
    set_rng_seed(1234)  # type: ignore[no-untyped-call]  # untyped in torch
    case: Any = type(suite, (base, TensorPipeRpcAgentTestFixture, TestCase), {})(name)
    case.rank = worker.rank
    case.file_name = str(worker.folder / "store")
    try:
        getattr(case, name)()
    except unittest.SkipTest as skip:
        return str(skip)
    return ""


def _marks(name: str, needed: int) -> list[pytest.MarkDecorator]:
    if name in CANNOT_HOLD_ON_DEVICES and KIND != "cuda":
        return [pytest.mark.xfail(reason=CANNOT_HOLD_ON_DEVICES[name], run=False)]
    if needed > COUNT:
        return [pytest.mark.skip(reason=f"needs {needed} devices")]
    return []


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("suite", "name"),
    [
        pytest.param(suite, name, id=f"{suite}.{name}", marks=_marks(name, needed))
        for suite, name, needed in TESTS
    ],
)
def test_of_pytorch_on_devices(run_workers: RunWorkers, sources: Path | None, suite: str, name: str) -> None:
    count = 2 if suite == "CudaRemoteModuleTest" else 4
    if any(skips := run_workers(run_rank, count, [suite, name, sources], time_limit=60)):
        pytest.skip(max(skips))


def test_the_list_of_what_cannot_hold_is_short() -> None:
    assert CANNOT_HOLD_ON_DEVICES.keys() <= {name for _, name, _ in TESTS}
    assert sum(name not in CANNOT_HOLD_ON_DEVICES for _, name, _ in TESTS) >= FEWEST_ON_DEVICES
