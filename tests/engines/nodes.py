"""Nodes on one machine: network namespaces with host names of their own, on one bridge."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.commands import Command

__all__ = ["ROOT", "Nodes", "Run", "document_programs", "nodes"]

ROOT = Path(__file__).resolve().parent.parent.parent
COUNT = 4
SECONDS = 120.0


class Run(Command):
    """A command that runs on a node, and what it has printed so far."""

    def __init__(self, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        super().__init__(command, folder, environment, SECONDS, own_session=True)


class Nodes:
    """node0 to node4, at 10.77.0.10 to 10.77.0.14.

    Attributes:
        folder: that all see.
        environment: of what runs on them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tag = secrets.token_hex(3)
        self._spaces = [f"fe-{self.tag}-{node}" for node in range(COUNT + 1)]
        self._switch = f"fe-{self.tag}-sw"
        self._runs: list[Run] = []
        self.environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": str(ROOT),
            "HOME": str(folder),
            "FARCALL_TOKEN": secrets.token_urlsafe(),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }

    def set_up(self) -> None:
        """Make the namespaces."""
        hosts = [f"10.77.0.1{node} node{node}" for node in range(COUNT + 1)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        for node, space in enumerate(self._spaces):
            port = f"p{node}"
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
            ends = ("eth0", "netns", space, "type", "veth", "peer", "name", port, "netns", self._switch)
            _ip("link", "add", *ends)
            _ip("-n", self._switch, "link", "set", port, "master", "br0", "up")
            _ip("-n", space, "addr", "add", f"10.77.0.1{node}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")

    def on(self, node: int, *command: str, hosts: Path | None = None, name: str | None = None) -> list[str]:
        """A command line that runs a command on a node."""
        setting = (
            f"hostname {name or f'node{node}'}; mount --bind {hosts or self.folder / 'hosts'} /etc/hosts; "
            'exec "$@"'
        )
        inside = ["unshare", "--uts", "--mount", "sh", "-c", setting, "sh"]
        return ["nsenter", f"--net=/run/netns/{self._spaces[node]}", *inside, *command]

    def start(self, node: int, *command: str, **variables: str) -> Run:
        """Start a command on a node."""
        return self.start_command(self.on(node, *command), **variables)

    def start_command(self, command: Sequence[str], **variables: str) -> Run:
        """Start a command line that ``on`` has made."""
        run = Run(command, self.folder, self.environment | variables)
        self._runs.append(run)
        return run

    def run(self, node: int, *command: str, status: int | None = 0, **variables: str) -> str:
        """Run a command on a node; returns what it has printed."""
        run = self.start(node, *command, **variables)
        found = run.end()
        assert status is None or found == status, f"{command} has ended with {found}:\n{run.said}"
        return run.said

    def wrapper(self, name: str, text: str) -> str:
        """A program of the test's own; returns its path."""
        path = self.folder / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
        return str(path)

    def processes(self, node: int, command: str = "") -> list[int]:
        """The processes of a node whose command line has a text."""
        listed = ["ip", "netns", "pids", self._spaces[node]]
        found = subprocess.run(listed, capture_output=True, check=False, text=True)
        return [pid for pid in map(int, found.stdout.split()) if command in _command(pid)]

    def tear_down(self) -> None:
        """End what runs on the nodes, and remove them."""
        for node in range(len(self._spaces)):
            for pid in self.processes(node):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for run in self._runs:
            run.process.wait(SECONDS)
        for space in (*self._spaces, self._switch):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, check=True, timeout=20)


def document_programs(page: str, folder: Path) -> None:
    """Write the programs of a page of ``docs/engines`` as files: those whose first lines name one."""
    text = (ROOT / "docs" / "engines" / page).read_text()
    for block in re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        named = re.match(r"(?:#!.*\n)?# ([\w-]+\.\w+)\n", block)
        if named:
            (folder / named[1]).write_text(block)
            (folder / named[1]).chmod(0o755)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """The nodes, with the programs of the guide in their folder."""
    made = Nodes(tmp_path_factory.mktemp("nodes"))
    document_programs("README.md", made.folder)
    try:
        made.set_up()
        yield made
    finally:
        made.tear_down()
