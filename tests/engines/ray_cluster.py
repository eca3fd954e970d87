"""Real Ray: one node, and two of which one is lost."""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec

import pytest

from tests.engines.nodes import ROOT, Nodes, Run, document_programs, nodes

__all__ = ["nodes"]

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]

RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
    "RAY_health_check_failure_threshold": "2",
    "RAY_health_check_period_ms": "1000",
}
LIMITS = ["--num-cpus", "4", "--object-store-memory", "200000000"]


def start_node(nodes: Nodes, node: int) -> Run:
    """Start a node of Ray; the first is the head."""
    address = f"10.77.0.1{node}"
    kind = (
        ["--head", "--port=6379", "--include-dashboard=false"] if node == 1 else ["--address=10.77.0.11:6379"]
    )
    line = ["ray", "start", *kind, "--node-ip-address", address, *LIMITS, "--block"]
    run = (
        nodes.start(node, *line, f"--temp-dir=/tmp/ray-{nodes.tag}", **RAY)
        if node == 1
        else nodes.start(node, *line, **RAY)
    )
    run.wait_for("Ray runtime started")
    return run


def end_node(nodes: Nodes, node: int) -> None:
    """Kill all processes of a node, as when its machine is lost."""
    for pid in nodes.processes(node):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def ray_nodes(nodes: Nodes) -> Nodes:
    document_programs("ray.md", nodes.folder)
    start_node(nodes, 1)
    return nodes


def run(nodes: Nodes, *command: str) -> Run:
    return nodes.start(1, *command, **RAY, RAY_ADDRESS="10.77.0.11:6379")


def test_a_group_of_actors(ray_nodes: Nodes) -> None:
    program = run(ray_nodes, "python", "ray_train.py", f"{ray_nodes.folder}/ray-step")
    assert program.end() == 0, program.said
    assert "from step 0 to 100, after 0 restarts" in program.said


def test_tensors_between_actors(ray_nodes: Nodes) -> None:
    program = run(ray_nodes, "python", "ray_tensors.py")
    assert program.end() == 0, program.said
    assert "1048576.0" in program.said


FAILS = """
import os, signal, sys, time
import ray
import farcall.ray
from farcall import rpc

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def raises():
    if rpc.get_worker_info().id == 1:
        raise LookupError("bad luck")

def calls_the_dead():
    if rpc.get_worker_info().id == 0:
        try:
            rpc.rpc_sync("worker1", die)
        except rpc.errors.WorkerLostError as error:
            print("LOST", error.worker, flush=True)

ray.init()
for main in (raises, calls_the_dead):
    try:
        farcall.ray.run_group(main, workers=2)
    except rpc.errors.RpcError as error:
        said = str(error)[:60].replace(chr(10), " ")
        print("ENDED", type(error).__name__, type(error.__cause__).__name__, said)
try:
    farcall.ray.run_group(raises, workers=64, timeout=2)
except rpc.errors.RendezvousTimeoutError as error:
    print("ENDED", str(error)[:60])
print("FREE", ray.available_resources().get("CPU"))
"""


def test_failures_are_named_and_nothing_stays(ray_nodes: Nodes) -> None:
    (ray_nodes.folder / "fails.py").write_text(FAILS)
    program = run(ray_nodes, "python", "fails.py")
    assert program.end() == 0, program.said
    assert "ENDED RpcError LookupError worker1 raised LookupError: bad luck" in program.said
    assert "LOST worker1" in program.said
    assert "ENDED WorkerLostError" in program.said
    assert "ENDED Ray has not placed 64 bundles" in program.said
    assert "FREE 4.0" in program.said


SURVIVES = """
import os, sys, time
import ray
import farcall.ray
from farcall import rpc

def main():
    print("NODE", ray.util.get_node_ip_address(), flush=True)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rpc.get_worker_info().id == 0:
        rpc.rpc_sync("worker1", time.sleep, (300,), timeout=0)
    return ray.util.get_node_ip_address()

ray.init()
print("RESULT", farcall.ray.run_group(main, workers=2, bundle={"CPU": 2}, strategy="SPREAD", restarts=1))
"""


def test_a_lost_node_leads_to_a_new_placement_group(ray_nodes: Nodes) -> None:
    start_node(ray_nodes, 2)
    (ray_nodes.folder / "survives.py").write_text(SURVIVES)
    program = run(ray_nodes, "python", "survives.py")
    program.wait_for("NODE 10.77.0.12")
    end_node(ray_nodes, 2)
    assert program.end() == 0, program.said
    assert "RESULT ['10.77.0.11', '10.77.0.11']" in program.said


def test_transfers_under_kills_leave_nothing(ray_nodes: Nodes) -> None:
    transfers = os.environ.get("FARCALL_TEST_TRANSFERS", "200")
    kills = str(int(transfers) // 50)
    kill = str(ROOT / "tests" / "engines" / "ray_kills.py")
    program = ray_nodes.start(3, "python", kill, "--transfers", transfers, "--kills", kills, **RAY)
    assert program.end() == 0, program.said
    assert "mapped by the driver 0" in program.said
