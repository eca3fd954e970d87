"""Errors about optional parts whose packages are not installed."""

from __future__ import annotations

import sys
from importlib import metadata

import pytest

from farcall.extras import install_command, missing
from tests.support.fresh import RunFresh

REQUIRES = [
    "torch>=2.13",
    'uvloop>=0.19; sys_platform != "win32"',
    'grpcio>=1.80; extra == "grpc"',
    "prometheus-client>=0.20; extra == 'metrics'",
    'farcall[grpc,metrics]; extra == "serve"',
    'grpcio>=1.80; extra == "serve"',
]


@pytest.fixture
def requires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: REQUIRES)
    monkeypatch.setattr(sys, "executable", "/opt/my env/bin/python")


@pytest.mark.usefixtures("requires")
def test_the_command_names_each_package_once_and_the_interpreter() -> None:
    packages = "'grpcio>=1.80' 'prometheus-client>=0.20'"
    assert install_command("serve") == f"'/opt/my env/bin/python' -m pip install {packages}"


@pytest.mark.usefixtures("requires")
def test_the_text_names_the_distribution_that_is_missing() -> None:
    error = ModuleNotFoundError(name="grpc.aio")
    assert missing("the backend GRPC", "grpc", error).startswith(
        "the backend GRPC needs grpc, of farcall's extra 'grpc': "
    )


@pytest.mark.processes
def test_calls_and_the_command_line_need_none_of_the_extras(run_fresh: RunFresh) -> None:
    gone = ("grpc", "google", "ml_dtypes", "aiohttp", "prometheus_client", "opentelemetry", "sklearn")
    program = f"""
import sys
sys.modules |= dict.fromkeys({gone})
import farcall.cli
from farcall import rpc, spmd
rpc.init_rpc("worker0", rank=0, world_size=1)
assert rpc.rpc_sync("worker0", max, (1, 2)) == 2
rpc.shutdown()
try:
    import farcall.client
except ModuleNotFoundError as error:
    assert "of farcall's extra 'client'" in str(error), error
else:
    raise AssertionError
"""
    done = run_fresh(program, environment={"MASTER_ADDR": "localhost", "MASTER_PORT": "0"})
    assert done.returncode == 0, done.stderr
