"""Scripts as people run them from a terminal: what they print and how they end when they do not end well."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.support.workers import RunWorkers, Worker, Workers

ROOT = Path(__file__).resolve().parents[4]
IN_TIME = 60.0
"""Seconds to end in; generous, since the machine may be busy."""

LONG_WAIT = " has waited "
"""In a line that a worker prints when it has waited for seconds for the others."""

BEGINNING = """
import sys, threading
import rpc

rank, world_size, init_method = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
neighbour = (rank + 1) % world_size

called = threading.Event()

def wait_for_ever():
    called.set()
    print("called", flush=True)
    threading.Event().wait()

options = rpc.AgentOptions(init_method=init_method, rpc_timeout=0)
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
"""

FORGETS_SHUTDOWN = """
rref = rpc.remote(neighbour, list)
rref.rpc_sync().append(rank)
future = rpc.rpc_async(neighbour, wait_for_ever)
own = rpc.RRef(object())
rpc.barrier()
"""

FAILS = """
rpc.barrier()
if rank == 0:
    future = rpc.rpc_async(neighbour, wait_for_ever)
    called.wait()
    raise LookupError("rank 0 has had enough")
rpc.rpc_sync(0, wait_for_ever)
"""

WAITS = {
    "rpc_sync": "rpc.rpc_sync(neighbour, wait_for_ever)",
    "wait": "rpc.rpc_async(neighbour, wait_for_ever).wait()",
    "wait_all": "with rpc.wait_all():\n    rpc.rpc_async(neighbour, wait_for_ever)",
    "to_here": "rpc.remote(neighbour, wait_for_ever).to_here()",
    "shutdown": "rpc.rpc_async(neighbour, wait_for_ever)\nrpc.shutdown()",
}


@contextlib.contextmanager
def terminal(folder: Path, *scripts: str, beginning: str = "") -> Iterator[list[subprocess.Popen[str]]]:
    """Starts one process per script, in one process group, as a shell does with ``a & b & c``."""
    processes: list[subprocess.Popen[str]] = []
    for rank, script in enumerate(scripts):
        path = folder / f"script{rank}.py"
        path.write_text(beginning + BEGINNING + script)
        processes.append(
            subprocess.Popen(
                [sys.executable, path, str(rank), str(len(scripts)), f"file://{folder / 'rendezvous'}"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=folder,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                process_group=processes[0].pid if processes else 0,
            )
        )
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def ends(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[int, list[str]]]:
    """The status of each process, and the lines that it wrote to stderr, but those of long waits."""
    all_lines = [process.communicate(timeout=IN_TIME)[1].splitlines() for process in processes]
    said = [[line for line in lines if LONG_WAIT not in line] for lines in all_lines]
    return [(process.returncode, lines) for process, lines in zip(processes, said, strict=True)]


def run_as_script(worker: Worker, script: str) -> int:
    """Runs a script in a worker, which then ends as a process does that Python has run it in; its status."""
    sys.argv = [worker.name, str(worker.rank), str(worker.world_size), worker.init_method]
    try:
        exec(compile(BEGINNING + script, f"{worker.name}.py", "exec"), {"__name__": "__main__"})
    except Exception as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def lines_of(workers: Workers) -> list[list[str]]:
    """What each of them has printed until it ended."""
    return [worker.log_lines() for worker in workers]


@pytest.mark.fresh_interpreter
def test_a_script_that_forgets_shutdown_ends_quietly_with_status_0(tmp_path: Path) -> None:
    with terminal(tmp_path, FORGETS_SHUTDOWN, FORGETS_SHUTDOWN) as processes:
        assert ends(processes) == [(0, []), (0, [])]


def test_shutdown_can_be_registered_for_the_exit_before_init_rpc(tmp_path: Path) -> None:
    registers = "import atexit, rpc\natexit.register(rpc.shutdown)\n"
    calls = "assert [rpc.rpc_sync(0, abs, args=(-i,)) for i in range(3)] == [0, 1, 2]"
    notes = "ended = []\natexit.register(ended.append, 1)\ndef at_exit(): return bool(ended)\n"
    waits = "def at_exit(): ...\nwhile not rpc.rpc_sync(0, at_exit): pass\n"
    with terminal(tmp_path, notes, waits + calls, beginning=registers) as processes:
        assert ends(processes) == [(0, []), (0, [])]


def test_an_exception_in_the_main_thread_ends_the_script_and_is_told_to_the_others(tmp_path: Path) -> None:
    with terminal(tmp_path, FAILS, FAILS) as processes:
        (status, lines), (other_status, other_lines) = ends(processes)
    assert (status, lines[0], lines[-1]) == (
        1,
        "Traceback (most recent call last):",
        "LookupError: rank 0 has had enough",
    )
    assert len([line for line in lines if line.startswith("Traceback")]) == 1
    assert other_status == 1
    assert other_lines[-1] == (
        "rpc.errors.WorkerLostError: worker 'worker0' (id 0) is gone: its program was ended by an exception, "
        "LookupError: rank 0 has had enough. wait_for_ever was not answered"
    )
    assert len([line for line in other_lines if line.startswith("Traceback")]) == 1


def test_an_exception_is_told_to_workers_that_had_no_connection_to_the_script(
    run_workers: RunWorkers, tmp_path: Path
) -> None:
    fails, asks = 'raise LookupError("had enough")\n', 'rpc.rpc_sync("worker0", pow, args=(2, 2))\n'
    ended = str(tmp_path / "ended")
    waits = f"import os, time\nwhile not os.path.exists({ended!r}): time.sleep(0.01)\n"
    workers = run_workers.start([partial(run_as_script, script=each) for each in (fails, waits + asks)])
    assert workers[0].result() == 1
    (tmp_path / "ended").touch()
    assert workers[1].result() == 1
    _, lines = lines_of(workers)
    reason = "worker 'worker0' (id 0) is gone: its program was ended by an exception, LookupError: had enough"
    assert lines[0] == f"worker 'worker1': {reason}"
    assert lines[-1].startswith(f"rpc.errors.WorkerLostError: {reason}")


@pytest.mark.parametrize(
    "failure",
    [
        "raise ImportError('no dataset here')",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1); rpc.shutdown()",
    ],
    ids=["raises", "dies", "refuses"],
)
def test_spmd_mode_that_cannot_begin_tells_its_cause_once_on_each_worker(
    run_workers: RunWorkers, failure: str, tmp_path: Path
) -> None:
    begun = str(tmp_path / "begun")
    begins = "import os, time, spmd, torch.distributed as dist\nrpc.barrier()\n"
    begin = f"open({begun!r}, 'w').close(); spmd.use_spmd()"
    fail = f"while not os.path.exists({begun!r}): time.sleep(0.01)\n{failure}"
    scripts = [begins + each for each in (begin, "rpc.shutdown()", fail)]
    workers = run_workers.start([partial(run_as_script, script=each) for each in scripts])
    workers[2].death_intended = True
    statuses = workers.results()
    driver, bystander, culprit = lines_of(workers)
    assert statuses[0] == 1
    assert driver[-1].startswith(
        (
            "rpc.errors.WorkerLostError: SPMD mode could not begin: worker 'worker2'",
            "spmd.engine.errors.SpmdError: worker 'worker2'",
        )
    )
    assert len([line for line in bystander if "is gone" in line]) <= 2, "worker2, and the driver after it"
    assert not [line for line in bystander if "Traceback" in line or "called by" in line]
    for lines in (driver, bystander, culprit):
        losses = [line for line in lines if line.startswith("worker '") and "is gone" in line]
        assert len({line.partition(" is gone")[0] for line in losses}) == len(losses)
    assert len([line for line in driver if line == "Traceback (most recent call last):"]) <= 2


@pytest.mark.parametrize("ways", [("rpc_sync", "wait", "wait_all"), ("to_here", "shutdown")], ids="-".join)
def test_ctrl_c_ends_all_scripts_of_a_terminal_each_with_one_short_traceback(
    tmp_path: Path, ways: tuple[str, ...]
) -> None:
    with terminal(tmp_path, *(WAITS[way] for way in ways)) as processes:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "called\n"  # so its neighbour waits, or is just about to
        os.killpg(processes[0].pid, signal.SIGINT)
        for way, (status, lines) in zip(ways, ends(processes), strict=True):
            own = [line for line in lines if " is gone: " not in line]  # of the others
            assert (way, status, own[-1]) == (way, -signal.SIGINT, "KeyboardInterrupt")
            assert len([line for line in lines if line.startswith("Traceback")]) == 1, lines
            assert "During handling" not in "".join(lines)
