"""``farcall launch``: what it prints, how it ends, and what is left."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.programs import run_program
from tests.support.terminal import Terminal

pytestmark = pytest.mark.processes

SCRIPT = """
import os, signal, sys, threading
import rpc

rank = int(os.environ["RANK"])

def wait():
    threading.Event().wait()

def fail():
    raise LookupError("bad luck")

rpc.init_rpc(f"worker{rank}")
if rank == 1:
    rpc.barrier()
    fail()
rpc.barrier()
rpc.rpc_sync("worker1", wait)
"""


def test_the_first_failure_is_summed_up_and_the_others_are_ended(tmp_path: Path) -> None:
    done = run_program(tmp_path, SCRIPT, "-m", "farcall", "launch", "-n", "2", "program.py")
    assert done.returncode == 1
    summary = done.stderr.partition("farcall: rank 1 (process ")[2]
    assert "failed first: it raised LookupError: bad luck (program.py:" in summary
    assert done.stderr.count("in fail\n") == 1, "one traceback, of the process itself"


IN_A_PROCESS_GROUP = """
import os, signal, torch.distributed as dist
from farcall import rpc, spmd

rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}")
spmd.init_process_group()
dist.barrier()
if rank == 0:
    raise LookupError("bad luck")
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends it, perhaps before it has noticed the loss
dist.barrier()
"""


def test_the_loss_of_a_rank_of_a_process_group_is_told_in_one_line(tmp_path: Path) -> None:
    done = run_program(tmp_path, IN_A_PROCESS_GROUP, "-m", "farcall", "launch", "-n", "2", "program.py")
    assert "RankLostError at program.py:12: rank 0 (worker 'worker0') is gone" in done.stderr
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert "farcall: rank 0 (process " in done.stderr


def test_what_follows_an_answer_to_a_prompt_has_its_prefix(tmp_path: Path) -> None:
    program = tmp_path / "asks.py"
    program.write_text('print("hello", input("name? "))')
    command = [sys.executable, "-m", "farcall", "launch", "-n", "1", str(program)]
    with Terminal(command, 80, os.environ) as terminal:
        terminal.read_until(r"name\? $", 60.0)
        terminal.type("Ann\n")
        assert terminal.end(60.0) == 0
    assert terminal.lines[-3:] == ["[0] name? Ann", "[0] hello Ann", ""]


REDIRECTS = """
import contextlib, io, sys

file, closed = io.StringIO(), io.StringIO()
closed.close()
with contextlib.redirect_stdout(file):
    answers = [sys.stdin.readline()]
start = sys.stdout
for sys.stdout in (None, closed, start):
    if sys.stdout is start:
        start.close()
    answers.append(sys.stdin.readline())
print(answers, [file.getvalue()], file=sys.stderr)
"""


def test_answers_write_nothing_to_redirected_output_and_need_none(tmp_path: Path) -> None:
    program = tmp_path / "redirects.py"
    program.write_text(REDIRECTS)
    command = [sys.executable, "-m", "farcall", "launch", "-n", "1", str(program)]
    with Terminal(command, 80, os.environ) as terminal:
        terminal.type("a\nb\nc\nd\n")
        assert terminal.end(60.0) == 0
    assert r"['a\n', 'b\n', 'c\n', 'd\n'] ['']" in terminal.printed


# ---- dynamic groups

COMES_BACK = """
import os, queue, signal, sys, threading
import rpc

rank, starts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
finished = threading.Event()

def end(kill):
    if kill:
        os.kill(os.getpid(), signal.SIGKILL)
    finished.set()

def count_starts():
    return starts

events = queue.SimpleQueue()
rpc.on_worker_joined(lambda worker: events.put(f"joined {worker.name}"))
rpc.on_worker_lost(lambda worker, reason: events.put(f"lost {worker.name}"))
rpc.init_rpc(f"worker{rank}")
if rank == 0:
    assert {events.get(), events.get()} == {"joined worker1", "joined worker2"}
    bystander = rpc.rpc_sync("worker2", os.getpid)
    rpc.rpc_async("worker1", end, args=(True,))
    while (event := events.get()) != "joined worker1":
        print(event)
    print(event, rpc.rpc_sync("worker2", os.getpid) == bystander, flush=True)
    print("served by start", rpc.rpc_sync("worker1", count_starts), "of worker1")
    for name in ("worker1", "worker2"):
        rpc.rpc_async(name, end, args=(False,))
else:
    finished.wait()
rpc.shutdown()
"""


TAKEN = """
import os, signal, sys
from pathlib import Path

noted = Path("spare")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    children = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children")
    spares = []
    while not spares:
        started = children.read_text().split()
        spares = [each for each in started if b"--spare=" in Path(f"/proc/{each}/cmdline").read_bytes()]
    noted.write_text(spares[0])
    os.kill(os.getpid(), signal.SIGKILL)
who = "the spare" if noted.read_text() == str(os.getpid()) else "another process"
print(who, "is rank", os.environ["RANK"], *sys.argv)
sys.exit(3 if sys.stdin.read() else 0)
"""


def test_spare_process_takes_the_place_of_a_killed_worker(tmp_path: Path) -> None:
    flags = "-m farcall launch -n 1 --dynamic --restart 1 --spares 1 program.py --epochs 3"
    done = run_program(tmp_path, TAKEN, *flags.split())
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0] the spare is rank 0 program.py --epochs 3\n"


def test_of_a_dynamic_group_only_who_was_killed_is_started_again(tmp_path: Path) -> None:
    flags = "-m farcall launch -n 3 --dynamic --restart 1 program.py"
    done = run_program(tmp_path, COMES_BACK, *flags.split())
    assert done.returncode == 0, done.stderr
    said = ["[0] lost worker1", "[0] joined worker1 True", "[0] served by start 1 of worker1"]
    assert done.stdout.splitlines() == said
    assert ") was killed by SIGKILL; it is started again (1 of 1 restarts)" in done.stderr


REPLICAS = """
import os, signal, time
from pathlib import Path

names = ("RANK", "FARCALL_REPLICA", "FARCALL_REPLICA_PLACE", "FARCALL_REPLICA_SIZE")
rank, *replica = [int(os.environ[each]) for each in names]
print(*replica, "start", start := int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
Path(f"{rank}.{start}").touch()
awaited = {0: "3.1", 1: "2.1", 2: "none", 3: "2.0"}[rank] if start == 0 else f"{5 - rank}.1"
while not Path(awaited).exists():
    time.sleep(0.01)
if rank == 3 and start == 0:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_of_a_replica_are_started_again_together(tmp_path: Path) -> None:
    flags = "-m farcall launch -n 4 --dynamic --restart 1 --replica 2 program.py"
    done = run_program(tmp_path, REPLICAS, *flags.split())
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[0] 0 0 2 start 0", "[1] 0 1 2 start 0",
        "[2] 1 0 2 start 0", "[2] 1 0 2 start 1",
        "[3] 1 1 2 start 0", "[3] 1 1 2 start 1",
    ]  # fmt: skip
    assert "was killed by SIGKILL; it is started again with rank 2 of its replica (1 of 1" in done.stderr
