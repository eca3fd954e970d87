"""torchx and ``sshd``."""

from __future__ import annotations

import shutil
from importlib.util import find_spec

import pytest

from tests.engines.nodes import Nodes, document_programs, nodes

__all__ = ["nodes"]

pytestmark = pytest.mark.timeout(300)


@pytest.mark.skipif(find_spec("torchx") is None, reason="torchx is not installed")
def test_torchx_runs_the_component(nodes: Nodes) -> None:
    document_programs("torchx.md", nodes.folder)
    line = "torchx run --wait --log -s local_cwd component.py:group --script train.py -j 2x2 -- 3"
    said = nodes.run(1, *line.split(), CHECKPOINT="torchx")
    assert "from step 0 with 4 workers" in said
    assert "done" in said


@pytest.mark.skipif(shutil.which("sshd") is None, reason="no sshd is installed")
def test_launchers_are_started_by_ssh(nodes: Nodes) -> None:
    document_programs("ssh.md", nodes.folder)
    keys = nodes.folder / ".ssh"
    keys.mkdir(mode=0o700)
    nodes.run(1, "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / "id"))
    (keys / "config").write_text(
        f"Host *\n StrictHostKeyChecking no\n UserKnownHostsFile /dev/null\n LogLevel ERROR\n"
        " ConnectionAttempts 30\n"  # one per second: sshd is being started
        f" IdentityFile {keys}/id\n"
    )
    shown = " ".join(f"{name}={nodes.environment[name]}" for name in ("PATH", "PYTHONPATH"))
    options = {
        "HostKey": keys / "id",
        "AuthorizedKeysFile": keys / "id.pub",
        "StrictModes": "no",
        "PidFile": "none",
        "SetEnv": f"{shown} CHECKPOINT={nodes.folder}/ssh-step",
    }
    given = [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
    for node in (1, 2):
        nodes.start(node, "sh", "-c", 'mkdir -p /run/sshd; exec "$@"', "sh", "/usr/sbin/sshd", "-D", *given)
    ssh = nodes.wrapper("ssh", f'exec /usr/bin/ssh -F {keys}/config "$@"')
    said = nodes.run(
        1, "./everywhere.sh", "train.py", "3", PATH=f"{nodes.folder}:{nodes.environment['PATH']}"
    )
    assert ssh
    assert "from step 0 with 4 workers" in said
    assert "done" in said
