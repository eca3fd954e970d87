"""The check for what tests leave behind."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from tests.support import leftovers

ROOT = Path(__file__).resolve().parent.parent.parent

CARELESS = """
import tempfile
def test_careless():
    tempfile.mkstemp(prefix="careless")
"""


def test_leftovers_of_every_kind_are_found() -> None:
    stop = threading.Event()
    before = leftovers.Snapshot()
    with contextlib.ExitStack() as cleanup:
        listener = cleanup.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind("\0farcall-leftover-test")
        listener.listen()
        tcp = cleanup.enter_context(socket.create_server(("127.0.0.1", 0)))
        thread = threading.Thread(target=stop.wait, name="left-thread")
        thread.start()
        cleanup.callback(thread.join)
        cleanup.callback(stop.set)
        cleanup.enter_context(tempfile.NamedTemporaryFile(prefix="left-file"))
        memory = os.memfd_create("farcall-left")
        cleanup.callback(os.close, memory)
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        cleanup.callback(process.wait)
        cleanup.callback(process.kill)
        found = "\n".join(before.leftovers(patience=0))
        for trace in (
            "Unix @farcall-leftover-test",
            f"TCP port {tcp.getsockname()[1]}",
            "thread 'left-thread'",
            "left-file",
            "memfd:farcall-left",
            f"process {process.pid}",
        ):
            assert trace in found
    assert before.leftovers() == []


@pytest.mark.nightly
@pytest.mark.fresh_interpreter
@pytest.mark.processes
def test_a_session_fails_if_something_is_left(tmp_path: Path) -> None:
    sample = tmp_path / "test_sample.py"
    sample.write_text(CARELESS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", str(sample)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert "1 passed" in done.stdout
    assert done.returncode == 1
    assert "careless" in done.stdout.partition("left behind by the tests")[2]
