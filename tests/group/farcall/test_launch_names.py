"""``farcall launch`` and name servers: a host that gets its name late, and slow reverse look-ups."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support import name_server
from tests.support.launchers import Launchers, launchers
from tests.support.network_namespaces import Hosts, hosts

__all__ = ["hosts", "launchers"]

pytestmark = [pytest.mark.processes, pytest.mark.nightly, pytest.mark.timeout(240)]

PROGRAM = """
import os
import rpc

rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}")
print("called", rpc.rpc_sync((rank + 1) % 2, rpc.get_worker_info).name)
rpc.shutdown()
"""


class Named:
    """The first of two hosts, with a name server that a test feeds."""

    def __init__(self, hosts: Hosts, folder: Path, seconds: float) -> None:
        self.zone = folder / "zone"
        self.zone.write_text("")
        self.address = hosts.addresses[0]
        (folder / "resolv.conf").write_text(f"nameserver {self.address}\noptions timeout:10\n")
        (folder / "hosts").write_text("127.0.0.1 localhost\n")
        mounts = f"mount --bind {folder}/resolv.conf /etc/resolv.conf; mount --bind {folder}/hosts /etc/hosts"
        enter = ["nsenter", f"--net=/run/netns/{hosts.names[0]}", "unshare", "--mount"]
        self.within: Sequence[str] = (*enter, "sh", "-c", f'{mounts}; exec "$@"', "sh")
        command = [sys.executable, name_server.__file__, self.address, str(self.zone), str(seconds)]
        self.server = subprocess.Popen([*enter[:2], *command], stdout=subprocess.PIPE, text=True)
        assert self.server.stdout is not None
        assert self.server.stdout.readline() == "serves\n"


@pytest.fixture
def named(request: pytest.FixtureRequest, hosts: Hosts, tmp_path: Path) -> Iterator[Named]:
    """A host whose name server takes the seconds that the parameter says for reverse look-ups."""
    if (
        shutil.which("nsenter") is None
        or subprocess.run(["unshare", "--mount", "true"], check=False).returncode
    ):
        pytest.skip("mount namespaces cannot be made here")
    made = Named(hosts, tmp_path, request.param)
    try:
        yield made
    finally:
        made.server.kill()
        made.server.communicate()


@pytest.mark.parametrize("named", [0.0], indirect=True)
def test_a_host_that_gets_its_name_late_is_waited_for_and_told(named: Named, launchers: Launchers) -> None:
    launcher = launchers(PROGRAM, "-n 2 --rdzv head.train:29500", within=named.within)
    launcher.wait_for("the host 'head.train' of the rendezvous at head.train:29500 cannot be found")
    named.zone.write_text(f"{named.address} head.train\n")
    assert launcher.end() == 0, launcher.said
    assert "[0] called worker1" in launcher.lines


@pytest.mark.parametrize("named", [3.0], indirect=True)
def test_slow_reverse_look_ups_are_waited_for_and_told(named: Named, launchers: Launchers) -> None:
    named.zone.write_text(f"{named.address} head.train\n")
    launcher = launchers(PROGRAM, "-n 2 --rdzv head.train:29500", within=named.within)
    assert launcher.end() == 0, launcher.said
    assert {"[0] called worker1", "[1] called worker0"} <= {*launcher.lines}
    assert "the name server takes 3 s to say which host has an address" in launcher.said
    assert "is taken by" not in launcher.said
    assert "frame #" not in launcher.said
