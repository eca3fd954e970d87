"""``farcall launch`` on several machines, here launchers on loopback: restarts, strangers, and the end."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.support.launchers import Launchers, launchers
from tests.support.ports import reserving_port

__all__ = ["launchers"]

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

TOKEN = {"FARCALL_TOKEN": "a token of the test's"}

ONE_SERVES = """
import os, signal, sys
import rpc

rank, starts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
rpc.init_rpc(f"worker{rank}")
rpc.barrier()
if rank == 1 and starts < int(os.environ["DEATHS"]):
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1:
    print("called", rpc.rpc_sync("worker0", rpc.get_worker_info).name, "in start", starts)
try:
    rpc.shutdown()
except rpc.errors.WorkerLostError:
    pass  # a worker that only serves has nothing to lose
"""

WAITS = """
import os, signal
print("ready", os.environ["RANK"])
while True:
    signal.pause()
"""


@pytest.fixture
def place() -> Iterator[str]:
    """A port where launchers meet, which is not given to others meanwhile."""
    with reserving_port() as port:
        yield f"127.0.0.1:{port}"


@pytest.mark.parametrize("deaths", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_all_is_started_again_though_the_others_workers_have_succeeded(
    launchers: Launchers, place: str, deaths: int
) -> None:
    options = f"-n 1 --nnodes 2 --rdzv {place} --restart {deaths}"
    both = [
        launchers(ONE_SERVES, f"{options} --node-rank {rank}", DEATHS=str(deaths), **TOKEN) for rank in (0, 1)
    ]
    assert [each.end() for each in both] == [0, 0], [each.said for each in both]
    assert f"[1] called worker0 in start {deaths}" in both[1].lines
    for rank, each in enumerate(both):
        assert f"farcall: rank {rank} of 2 runs here; they meet at {place} (restart {deaths})" in each.lines
        assert f"was killed by SIGKILL; all are started again ({deaths} of {deaths} restarts)" in each.said


@pytest.mark.nightly
@pytest.mark.parametrize("killed", [0, 1])
def test_a_launcher_that_is_killed_ends_the_job_on_all_machines(
    launchers: Launchers, place: str, killed: int
) -> None:
    both = [
        launchers(WAITS, f"-n 1 --nnodes 2 --rdzv {place} --node-rank {rank}", **TOKEN) for rank in (0, 1)
    ]
    for rank, each in enumerate(both):
        each.wait_for(f"ready {rank}")
    both[killed].send(signal.SIGKILL)
    assert both[1 - killed].end() == 1
    said = {0: f"the launcher that serves the store at {place} is gone", 1: "(node 1, process "}
    assert said[killed] in both[1 - killed].wait_for("is gone")
    assert "frame #" not in both[1 - killed].said
