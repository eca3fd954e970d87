"""``farcall launch`` on two hosts, which are network namespaces of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launchers import Launchers, launchers
from tests.support.network_namespaces import Hosts, hosts

__all__ = ["hosts", "launchers"]

pytestmark = [pytest.mark.processes, pytest.mark.nightly]

ROOT = Path(__file__).resolve().parent.parent.parent.parent

SCRIPT = """
import os
import rpc

rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}")
print("called", rpc.rpc_sync((rank + 1) % 2, rpc.get_worker_info).name)
rpc.shutdown()
"""


@pytest.mark.parametrize("ranked", [True, False])
def test_machines_meet_at_an_address_that_their_own_names_do_not_mean(
    hosts: Hosts, ranked: bool, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(SCRIPT)
    command = f"launch -n 1 --nnodes 2 --rdzv {hosts.addresses[0]}:29500"
    numbers = [["--node-rank", str(end)] if ranked else [] for end in (0, 1)]
    launchers = [
        subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                name,
                sys.executable,
                "-m",
                "farcall",
                *command.split(),
                *number,
                "program.py",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=os.environ
            | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "FARCALL_TOKEN": "a token of the test's"},
        )
        for name, number in zip(hosts.names, numbers, strict=True)
    ]
    ends = [launcher.communicate(timeout=80) for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], ends
    assert sorted(out for out, _ in ends) == ["[0] called worker1\n", "[1] called worker0\n"]


def test_a_network_that_cannot_be_reached_is_waited_for_and_no_taken_port(
    hosts: Hosts, launchers: Launchers
) -> None:
    hosts.block(1)
    place = f"{hosts.more_addresses[0]}:29500"
    within = ["ip", "netns", "exec", hosts.names[1]]
    token = {"FARCALL_TOKEN": "a token of the test's"}
    launcher = launchers(
        SCRIPT, f"-n 1 --nnodes 2 --node-rank 1 --rdzv {place} --timeout 5", within=within, **token
    )
    assert launcher.end() == 1
    assert f"the rendezvous at {place} has not been reachable for 5 s" in launcher.lines[-1]
    assert "is taken by" not in launcher.said


def test_a_name_that_means_loopback_on_one_host_is_named_there(
    hosts: Hosts, launchers: Launchers, tmp_path: Path
) -> None:
    def within(host: int, address: str) -> list[str]:
        names = tmp_path / f"hosts{host}"
        names.write_text(f"127.0.0.1 localhost\n{address} head.train\n")
        enter = ["nsenter", f"--net=/run/netns/{hosts.names[host]}", "unshare", "--mount"]
        return [*enter, "sh", "-c", f'mount --bind {names} /etc/hosts; exec "$@"', "sh"]

    options = "-n 1 --nnodes 2 --rdzv head.train:29500 --timeout 5 --node-rank"
    first, second = (
        launchers(
            SCRIPT, f"{options} {rank}", within=within(rank, address), FARCALL_TOKEN="a token of the test's"
        )
        for rank, address in enumerate((hosts.addresses[0], "127.0.1.1"))
    )
    assert [first.end(), second.end()] == [1, 1]
    assert "not all 2 launchers have come to head.train:29500 within 5 s" in first.lines[-1]
    assert "the rendezvous at head.train:29500 has not been reachable for 5 s" in second.lines[-1]
    assert "Here head.train means 127.0.1.1" in second.lines[-1]
