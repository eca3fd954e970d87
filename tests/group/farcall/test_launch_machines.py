"""``farcall launch`` on several machines, here launchers on loopback: restarts, strangers, and the end."""

from __future__ import annotations

import signal
import socket
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
        assert f"farcall: rank {rank} of 2 run here; they meet at {place} (restart {deaths})" in each.lines
        assert f"was killed by SIGKILL; all are started again ({deaths} of {deaths} restarts)" in each.said


@pytest.mark.nightly
def test_all_launchers_end_with_the_one_reason_when_no_restart_is_left(
    launchers: Launchers, place: str
) -> None:
    options = f"-n 1 --nnodes 2 --rdzv {place} --restart 1"
    both = [launchers(ONE_SERVES, f"{options} --node-rank {rank}", DEATHS="2", **TOKEN) for rank in (0, 1)]
    assert [each.end() for each in both] == [128 + 9, 128 + 9]
    reasons = {line for each in both for line in each.lines if "failed first" in line}
    assert len(reasons) == 1
    assert "failed first, and no restart of 1 is left: it was killed by SIGKILL" in reasons.pop()


@pytest.mark.nightly
@pytest.mark.parametrize("ended", [0, 1])
def test_a_launcher_that_is_ended_ends_the_job_on_all_machines(
    launchers: Launchers, place: str, ended: int
) -> None:
    both = [
        launchers(WAITS, f"-n 1 --nnodes 2 --rdzv {place} --node-rank {rank}", **TOKEN) for rank in (0, 1)
    ]
    for rank, each in enumerate(both):
        each.wait_for(f"ready {rank}")
    both[ended].send(signal.SIGTERM)
    assert [each.end() for each in both] == [143, 143]
    assert f"(node {ended}, process {both[ended].process.pid}) was ended by SIGTERM" in both[1 - ended].said


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


# ---- who does not belong


@pytest.mark.nightly
def test_machines_that_never_come_are_named_when_the_time_is_over(launchers: Launchers, place: str) -> None:
    launcher = launchers(WAITS, f"-n 1 --nnodes 2 --rdzv {place} --node-rank 0 --timeout 4", **TOKEN)
    assert launcher.end() == 1
    assert f"waiting at {place} for 2 launchers for 3 s; so far there is the launcher on" in launcher.said
    assert "Other machines cannot come to 127.0.0.1, which is on each machine itself" in launcher.said
    assert f"not all 2 launchers have come to {place} within 4 s" in launcher.lines[-1]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "environment", "said"),
    [
        ("--node-rank 1 --job other", TOKEN, "of the job 'other'. Each needs a port of its own"),
        ("--node-rank 1 --nnodes 3", TOKEN, "was started with --nnodes 2"),
        ("--node-rank 0", TOKEN, "have the same --node-rank 0"),
        (
            "--node-rank 1",
            {"FARCALL_TOKEN": "another token than that"},
            "has another token than the launcher on",
        ),
    ],
)
def test_a_launcher_that_does_not_belong_is_refused_with_the_reason(
    launchers: Launchers, place: str, options: str, environment: dict[str, str], said: str
) -> None:
    first = launchers(WAITS, f"-n 1 --nnodes 2 --rdzv {place} --node-rank 0 --timeout 60", **TOKEN)
    first.wait_for(f"waiting at {place}")
    other = launchers(WAITS, f"-n 1 --nnodes 2 --rdzv {place} --timeout 60 {options}", **environment)
    assert other.end() == 1
    assert said in other.said
    if said.startswith("have the same"):
        assert first.end() == 1
        assert said in first.lines[-1]
    else:
        first.wait_for("was refused: ")
        first.send(signal.SIGTERM)
        first.end()


@pytest.mark.nightly
def test_one_launcher_too_many_is_refused_and_the_job_goes_on(launchers: Launchers, place: str) -> None:
    both = [launchers(WAITS, f"-n 1 --nnodes 2 --rdzv {place}", **TOKEN) for _ in (0, 1)]
    for each in both:
        each.wait_for("ready")
    third = launchers(WAITS, f"-n 1 --nnodes 2 --rdzv {place}", **TOKEN)
    assert third.end() == 1
    assert "the job has its 2 launchers, the launcher on" in third.lines[-1]
    assert "is one too many" in third.lines[-1]
    (coordinator,) = (each for each in both if "farcall: rank 0 of 2" in each.said)
    coordinator.wait_for("was refused: the job has its 2 launchers")
    both[0].send(signal.SIGTERM)
    assert [each.end() for each in both] == [143, 143]


@pytest.mark.nightly
def test_a_store_that_does_not_answer_is_named_when_the_time_is_over(launchers: Launchers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        launcher = launchers(
            WAITS, f"-n 1 --nnodes 2 --node-rank 1 --rdzv 127.0.0.1:{port} --timeout 4", **TOKEN
        )
        assert launcher.end() == 1
    assert f"the rendezvous at 127.0.0.1:{port} has not been reachable" in launcher.lines[-1]
    assert "it accepts connections and does not answer" in launcher.lines[-1]
