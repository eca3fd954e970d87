"""Two launchers of one job: again and again a process of theirs is killed, at any moment.

::

    python -m tests.soak.restarts --kills 50 --seed 1                # both on loopback
    python -m tests.soak.restarts --kills 50 --seed 1 --namespaces   # each in a network namespace; needs root

Each time a job of two launchers with two workers each is started, with restarts allowed, and one launcher or
worker is killed by SIGKILL, from the start of the launchers to the end of the program. Then the job must go
on (all is started again, and both launchers end with success), or both launchers end, each with a reason, and
no process is left. In namespaces the link between the two is cut as well (and counted as a kill), as when a
machine is lost. It prints what was killed, when, and how long the end took, and fails if it took longer than
the bound, if a process is left, if a reason is missing, or if a launcher prints stacks of C++.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.network_namespaces import Hosts

ROOT = Path(__file__).resolve().parent.parent.parent

PROGRAM = """
import os, time
import rpc

rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}")
if rank == 0:
    for step in range(20):
        for other in (1, 2, 3):
            rpc.rpc_sync(f"worker{other}", os.getpid)
        time.sleep(0.1)
    print("finished after restart", os.environ["TORCHELASTIC_RESTART_COUNT"])
rpc.shutdown()
"""

GRACE = 5.0
STACKS = ("frame #", "terminate called", "Received ")
"""What no launcher is to print."""


class Job:
    """One job: its two launchers, and what they print."""

    def __init__(self, folder: Path, number: int, hosts: Hosts | None) -> None:
        self.mark = secrets.token_hex(8)
        self.hosts = hosts
        if hosts is None:
            with socket.create_server(("127.0.0.1", 0)) as free:
                place = f"127.0.0.1:{free.getsockname()[1]}"
        else:
            place = f"{hosts.addresses[0]}:29500"
        options = (
            f"-m farcall launch -n 2 --nnodes 2 --rdzv {place} --restart 3 --grace {GRACE:g} --timeout 20"
        )
        environment = {
            "PYTHONPATH": str(ROOT),
            "FARCALL_TOKEN": secrets.token_hex(16),
            "FARCALL_SOAK": self.mark,
        }
        self.files = [folder / f"job{number}-launcher{index}.log" for index in (0, 1)]
        self.launchers = []
        for index, file in enumerate(self.files):
            with open(file, "wb") as log:
                within = [] if hosts is None else ["ip", "netns", "exec", hosts.names[index]]
                command = [*within, sys.executable, *options.split(), "program.py"]
                environ = os.environ | environment
                self.launchers.append(
                    subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=environ)
                )

    def said(self, index: int) -> str:
        """What a launcher and its workers have printed."""
        return self.files[index].read_text(errors="replace")

    def processes(self) -> dict[int, tuple[int, str]]:
        """All processes of the job: their parents and commands."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if f"FARCALL_SOAK={self.mark}".encode() not in (entry / "environ").read_bytes():
                    continue
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if state not in "ZX":
                found[int(entry.name)] = (int(parent), command)
        return found

    def victim(self, chance: random.Random) -> tuple[str, int] | None:
        """A launcher or a worker that runs, or the link, as 0; None if all have ended."""
        alive = [each for each in self.launchers if each.poll() is None]
        if not alive:
            return None
        launcher = chance.choice(alive)
        index = self.launchers.index(launcher)
        workers = [
            pid
            for pid, (parent, command) in self.processes().items()
            if parent == launcher.pid and "worker_main" in command
        ]
        if self.hosts is not None and len(alive) == 2 and chance.random() < 0.15:
            return "the link", 0
        if workers and chance.random() < 0.6:
            return f"worker of launcher {index}", chance.choice(workers)
        return f"launcher {index}", launcher.pid

    def wait(self, seconds: float) -> bool:
        """Whether all processes of the job end in time; else those are killed, and shown."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if all(each.poll() is not None for each in self.launchers) and not self.processes():
                return True
            time.sleep(0.1)
        for pid, (_, command) in self.processes().items():
            print(f"    still there: {pid} {command}")
            os.kill(pid, signal.SIGKILL)
        for each in self.launchers:
            each.wait()
        return False


def own_lines(said: str) -> list[str]:
    """A launcher's own lines: those of its workers begin with a rank."""
    return [line for line in said.splitlines() if not re.match(r"\[\d+\] ", line)]


def reason(said: str) -> str:
    """Why a launcher has ended, as it says itself."""
    lines = [line for line in own_lines(said) if line.startswith("farcall: ")]
    last = [line for line in lines if " here; they meet at " not in line]
    return last[-1] if last else ""


def try_once(
    folder: Path, number: int, chance: random.Random, bound: float, hosts: Hosts | None
) -> tuple[bool, str, float]:
    """Run a job and kill a process of it; whether it ended as it should, what was killed, and the seconds."""
    job = Job(folder, number, hosts)
    began = time.monotonic()
    mark = chance.choice(["", "here; they meet at", "here; they meet at"])
    while mark and mark not in job.said(0) and time.monotonic() - began < bound:
        time.sleep(0.05)
    time.sleep(chance.uniform(0, 12))
    victim = job.victim(chance)
    if victim is None:
        return True, "nothing: it had ended", 0.0
    what, pid = victim
    killed_at = time.monotonic()
    if pid:
        os.kill(pid, signal.SIGKILL)
    else:
        assert hosts is not None
        hosts.set_link(1, "down")
    in_time = job.wait(bound)
    if not pid and hosts is not None:
        hosts.set_link(1, "up")
    seconds = time.monotonic() - killed_at
    statuses = [each.returncode for each in job.launchers]
    survivors = [index for index in (0, 1) if statuses[index] != -signal.SIGKILL]
    # A launcher that is killed when all ranks had succeeded everywhere does not make the job fail.
    went_on = all(statuses[each] == 0 for each in survivors) and "finished after restart" in job.said(0)
    reasons = all(statuses[each] > 0 and reason(job.said(each)) for each in survivors)
    stacks = any(mark in line for each in (0, 1) for line in own_lines(job.said(each)) for mark in STACKS)
    good = in_time and (went_on or reasons) and not stacks
    again = max(map(int, re.findall(r"\(restart (\d+)\)", job.said(0))), default=0)
    print(
        f"{number:3} {time.monotonic() - began:5.1f} s  killed {what} after {killed_at - began:4.1f} s: "
        f"statuses {statuses}, restarts {again}, over {seconds:.1f} s later{'' if good else '  WRONG'}",
        flush=True,
    )
    if not went_on or not good:
        for index in survivors:
            print(f"      {index} says: {reason(job.said(index))[:160]}", flush=True)
    if not good:
        for index in (0, 1):
            print(f"---- launcher {index}\n{job.said(index)}")
    return good, what, seconds


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument(
        "--bound", type=float, default=120.0, help="seconds from a kill to the end of the job"
    )
    parser.add_argument("--namespaces", action="store_true", help="a network namespace for each launcher")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    wrong, kills, longest = 0, 0, 0.0
    print(f"seed {options.seed}")
    with contextlib.ExitStack() as ending:
        folder = ending.enter_context(tempfile.TemporaryDirectory(prefix="farcall-soak-"))
        hosts = Hosts() if options.namespaces else None
        if hosts is not None:
            ending.callback(hosts.tear_down)
            hosts.set_up()
        (Path(folder) / "program.py").write_text(PROGRAM)
        number = 0
        while kills < options.kills:
            number += 1
            good, what, seconds = try_once(Path(folder), number, chance, options.bound, hosts)
            wrong += not good
            kills += not what.startswith("nothing")
            longest = max(longest, seconds)
    print(f"{kills} kills, {wrong} of them wrong; the longest end took {longest:.1f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
