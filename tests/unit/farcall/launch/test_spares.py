from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest

from farcall.launch import spares
from farcall.launch.spares import Spares
from tests.support.fresh import RunFresh

FAILS = "import os, sys; print('no such package', file=sys.stderr); os.getppid() and sys.exit(3)"
IMPORTS = """
import socket, sys
from farcall.launch.spare_process import become_a_worker

ours, theirs = socket.socketpair()
ours.sendall(b"{}\\n")
assert become_a_worker(theirs.detach(), None)
known = set(sys.modules)
import torch, farcall.elastic
torch.optim.SGD([torch.zeros(())], 0.1)
print(sorted(set(sys.modules) - known))
"""
IS_READY = "import socket, sys; socket.socket(fileno=int(sys.argv[1].partition('=')[2])).send(b'r'); input()"


class Started:
    """A guard of a launcher: it records the number of each process that is started."""

    def __init__(self) -> None:
        self.pids: list[int] = []

    def tell(self, what: str, pid: int) -> None:
        if what == "+":
            self.pids.append(pid)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    monkeypatch.setattr(spares, "_PAUSE_SECONDS", 0.0)
    return Started()


def spares_of(program: str, guard: Any) -> Spares:
    return Spares(1, (sys.executable, "-c", program), 3, guard)


def wait_until_ended(pid: int) -> None:
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def test_spare_that_cannot_import_is_told_and_not_replaced(
    started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = spares_of(FAILS, started)
    kept.keep()
    wait_until_ended(started.pids[0])
    kept.keep()
    kept.keep()
    assert len(started.pids) == 1
    said = capsys.readouterr().err
    assert "ended with status 3 before it was ready; it is not replaced: no such package" in said


def test_spare_that_is_killed_when_it_is_ready_is_replaced(
    started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = spares_of(IS_READY, started)
    kept.keep()
    (spare,) = kept._spares
    spare._socket.setblocking(True)  # until it is ready
    assert spare.is_ready()
    os.kill(started.pids[0], signal.SIGKILL)
    wait_until_ended(started.pids[0])
    kept.keep()
    assert len(started.pids) == 2
    assert not capsys.readouterr().err
    kept.close()


def test_spare_that_the_system_refuses_is_told_once(
    started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = Spares(1, ("/nowhere/python",), 1, started)  # type: ignore[arg-type]
    kept.keep()
    kept.keep()
    assert capsys.readouterr().err.count("a spare process cannot be started") == 1


def test_spare_has_imported_what_an_elastic_job_and_its_first_optimizer_need(run_fresh: RunFresh) -> None:
    assert run_fresh(IMPORTS).stdout == "[]\n"
