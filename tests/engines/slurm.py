"""Real Slurm: a controller on node0, four slurmd, and the pages of the guide."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rpc.rendezvous.engines import engine_of
from tests.engines.nodes import Nodes, Run, document_programs, nodes
from tests.support.engine_environments import SRUN

__all__ = ["nodes"]

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("slurmctld") is None, reason="Slurm is not installed"),
]

CONFIGURATION = """
ClusterName=farcall
SlurmctldHost=node0
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=10
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/slurmd.%n.log
MpiDefault=none
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=2
NodeName=node[1-4] CPUs=4 RealMemory=1000 State=UNKNOWN
PartitionName=low Nodes=node[1-4] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=high Nodes=node[1-4] MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
SlurmdParameters=config_overrides
"""


class Slurm:
    """The cluster."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes, self.folder = nodes, nodes.folder / "slurm"
        nodes.environment["SLURM_CONF"] = str(self.folder / "slurm.conf")

    def set_up(self) -> None:
        for name in ("state", *(f"spool.node{node}" for node in range(1, 5))):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(folder=self.folder))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        munge = self.folder / "munge"
        munge.mkdir(mode=0o700)
        (munge / "key").write_bytes(os.urandom(128))
        (munge / "key").chmod(0o400)
        files = {"key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{name}={munge / file}" for name, file in files.items()]
        socket = f"--socket={self.folder}/munge.socket"
        self.nodes.start(0, "munged", "--foreground", "--force", socket, *options)
        until((self.folder / "munge.socket").exists)
        self.nodes.start(0, "slurmctld", "-D", "-c")
        for node in range(1, 5):
            self.nodes.start(node, "slurmd", "-D", "-c", "-N", f"node{node}")
        until(lambda: "4" in self("sinfo", "-h", "-t", "idle", "-p", "low", "-o", "%D", status=None))

    def __call__(self, *command: str, status: int | None = 0) -> str:
        """Run one of Slurm's commands on node0."""
        return self.nodes.run(0, *command, status=status)

    def state(self, job: str) -> str:
        return self("squeue", "-h", "-j", job, "-t", "all", "-o", "%T", status=None).strip()

    def do_not_delay(self, job: str) -> None:
        """Start a job that is requeued at once, and not two minutes later. Slurm delays it again when its
        last process has ended, which may be after it has become pending.
        """
        until(lambda: self.state(job) == "PENDING")

        def runs() -> bool:
            if self.state(job) == "PENDING":
                self("scontrol", "update", f"JobId={job}", "StartTime=now", status=None)
            return self.state(job) in {"RUNNING", "COMPLETED", ""}

        until(runs)


def until(holds: Callable[[], object], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.2)


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.fixture(scope="module")
def slurm(nodes: Nodes) -> Slurm:
    document_programs("slurm.md", nodes.folder)
    (nodes.folder / "token").write_text(nodes.environment["FARCALL_TOKEN"])
    made = Slurm(nodes)
    made.set_up()
    return made


def test_srun_sets_what_the_table_says(slurm: Slurm) -> None:
    said = slurm("srun", "-N2", "-n4", "--label", "env")
    tasks: dict[str, dict[str, str]] = {}
    for line in said.splitlines():
        task, _, setting = line.partition(": ")
        if "=" in setting and setting.startswith(("SLURM", "PMI")):
            name, _, value = setting.partition("=")
            tasks.setdefault(task.strip(), {})[name] = value
    assert set(SRUN) <= set(tasks["3"])
    found = [engine_of(tasks[str(task)]) for task in range(4)]
    assert [engine.rank for engine in found if engine is not None] == [0, 1, 2, 3]
    assert {engine.master for engine in found if engine is not None} == {found[0] and found[0].master}
    assert [engine.local_rank for engine in found if engine is not None] in ([0, 1, 0, 1], [0, 1, 2, 0])


def test_srun_starts_the_workers_itself(slurm: Slurm) -> None:
    said = slurm("srun", "-N2", "-n4", "env", "CHECKPOINT=a", "python", "train.py", "3")
    assert "from step 0 with 4 workers" in said
    assert "done" in said


def test_two_steps_of_a_job_run_at_once_on_nodes_of_their_own(slurm: Slurm) -> None:
    step = "srun --exact -N1 -n1 -w {} env CHECKPOINT=step-{} farcall launch -n 2 train.py 20"
    both = " & ".join(step.format(node, node) for node in ("node1", "node2"))
    said = slurm("salloc", "-N2", "--ntasks-per-node=1", "bash", "-c", f"{both} & wait")
    assert said.count("from step 0 with 2 workers") == 2
    assert said.count("done") == 2


def test_a_worker_that_is_killed_is_started_again_on_all_nodes(slurm: Slurm) -> None:
    line = "srun -N2 --ntasks-per-node=1 env CHECKPOINT=b farcall launch -n 1 --restart 3 train.py 40"
    run = slurm.nodes.start(0, *line.split())
    run.wait_for("from step 0 with 2 workers")
    until(lambda: text_of(slurm.nodes.folder / "b") not in ("", "1", "2"))
    (worker, *_) = slurm.nodes.processes(2, "launch.worker_main")
    os.kill(worker, signal.SIGKILL)
    assert run.end() == 0, run.said
    assert "was killed by SIGKILL" in run.said
    assert "from step 0 with 2 workers" not in run.said.split("restart 1")[1]
    assert "done" in run.said


def submit(slurm: Slurm, *options: str) -> tuple[str, Path]:
    output = slurm.nodes.folder / f"out-{time.monotonic_ns()}"
    said = slurm("sbatch", "--parsable", "-o", str(output), *options, "job.sh")
    return said.split()[-1], output


def test_a_job_that_is_preempted_is_requeued_and_resumes(slurm: Slurm) -> None:
    job, output = submit(slurm, "-p", "low", "-w", "node1,node2")
    until(lambda: "from step 0 with 4 workers" in text_of(output))
    urgent = slurm.nodes.start(0, "srun", "-p", "high", "-w", "node1", "--exclusive", "true")
    assert urgent.end() == 0
    slurm.do_not_delay(job)
    until(lambda: "done" in text_of(output))
    resumed = [line for line in text_of(output).splitlines() if "from step" in line]
    assert len(resumed) == 2
    assert "from step 0" not in resumed[1]


def test_a_job_that_is_told_of_its_time_limit_has_itself_requeued(slurm: Slurm) -> None:
    job, output = submit(slurm)
    until(lambda: "from step 0 with 4 workers" in text_of(output))
    slurm("scancel", "--signal=USR1", f"{job}.0")
    slurm.do_not_delay(job)
    until(lambda: "done" in text_of(output))
    assert "preempted: rank" in text_of(output)
    assert text_of(output).count("from step") == 2


def test_tasks_of_an_array_are_jobs_of_their_own(slurm: Slurm) -> None:
    outputs = [slurm.nodes.folder / f"array-{task}" for task in range(2)]
    slurm("sbatch", "--array=0-1", "-o", str(slurm.nodes.folder / "array-%a"), "job.sh")
    until(lambda: all("done" in text_of(output) for output in outputs))
    for output in outputs:
        assert "from step 0 with 4 workers" in text_of(output)


HALF = (
    "salloc -N1 -n1 : -N1 -n1 srun --het-group={0} "
    "farcall launch -n 1 --nnodes 2 --node-rank {0} --rdzv node1:29533 --timeout 5 train.py 1"
)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("srun -N2 -n4 farcall launch -n 1 train.py 1", "runs 4 launchers on 2 nodes"),
        ("salloc -N2 farcall launch -n 1 train.py 1", "in no step. Start it on all by"),
        (HALF.format(0), "not all 2 launchers have come to node1:29533 within 5 s"),
        (HALF.format(1), "the rendezvous at node1:29533 has not been reachable for 5 s"),
    ],
    ids=["two launchers on a node", "no step", "first half of a step", "second half of a step"],
)
def test_what_cannot_be_is_refused(slurm: Slurm, options: str, said: str) -> None:
    run: Run = slurm.nodes.start(0, *options.split())
    assert run.end() != 0
    assert said in run.said
