"""torchx, ``sshd``, and simulated pods of Kubernetes."""

from __future__ import annotations

import os
import re
import shutil
import signal
from importlib.util import find_spec

import pytest

from tests.engines.nodes import ROOT, Nodes, Run, document_programs, nodes

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


def test_pods_of_an_indexed_job_resume_after_an_eviction(nodes: Nodes) -> None:
    """Simulated: namespaces with the host names of pods, and the command of the manifest as process 1."""
    text = (ROOT / "docs" / "engines" / "kubernetes.md").read_text()
    found = re.search(r"args:\n\s+- (exec farcall launch .*)", text)
    assert found is not None
    line = found[1].replace("train.py 40", "train.py 60")
    hosts = nodes.folder / "hosts"
    names = "".join(f"10.77.0.1{3 + index} train-{index} train-{index}.train\n" for index in (0, 1))
    hosts.write_text(hosts.read_text() + names)

    def pod(index: int) -> list[str]:
        contained = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", line]
        return nodes.on(3 + index, *contained, name=f"train-{index}")

    def start(index: int) -> Run:
        variables = {"JOB_COMPLETION_INDEX": str(index), "CHECKPOINT": str(nodes.folder / "pods")}
        run = Run(pod(index), nodes.folder, nodes.environment | variables)
        nodes._runs.append(run)
        return run

    pods = [start(0), start(1)]
    pods[0].wait_for("from step 0 with 4 workers")
    launcher = process_one_of(pods[1].process.pid)
    os.kill(launcher, signal.SIGTERM)
    statuses = [run.end() for run in pods]
    assert 0 not in statuses, [run.said for run in pods]
    pods = [start(0), start(1)]
    assert [run.end() for run in pods] == [0, 0], [run.said for run in pods]
    assert "with 4 workers" in pods[0].said
    assert "from step 0 " not in pods[0].said


def process_one_of(unshare: int) -> int:
    """The process that is 1 in the namespace that ``unshare --fork`` has made."""
    with open(f"/proc/{unshare}/task/{unshare}/children") as children:
        return int(children.read().split()[0])
