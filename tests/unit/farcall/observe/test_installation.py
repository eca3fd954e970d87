"""A process that is observed before it has an agent."""

from __future__ import annotations

import os
import threading
import time
from importlib.util import find_spec, module_from_spec
from pathlib import Path

import pytest

from farcall.observe.format.jobs import JOB
from farcall.observe.format.orders import give_order
from farcall.observe.reading.reader import read_worker
from farcall.observe.tracing import parts_in


def test_process_that_a_launcher_has_started_records_a_trace_when_it_is_ordered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARCALL_JOBS_DIR", str(tmp_path))
    spec = find_spec("farcall.observe.installation")
    assert spec is not None
    assert spec.loader is not None
    installation = module_from_spec(spec)  # this process itself stays without an observer
    spec.loader.exec_module(installation)
    installation.begin({JOB: "job"}, "prog.py")
    found = installation.observer()
    assert found is not None
    try:
        parts = tmp_path / "parts"
        parts.mkdir()
        give_order(tmp_path / "job", "trace", until=time.time() + 2, parts=str(parts))
        assert found.look_now(10)
        for thread in threading.enumerate():
            if thread.name == "farcall-trace":
                thread.join()
        assert {path.name for path in parts.iterdir()} >= {f"{os.getpid()}.begun"}
        assert [part.pid for part in parts_in(parts)] == [os.getpid()]
        installation.failed(ValueError("two\nlines"))
    finally:
        found.stop("left")
    assert found.path is not None
    assert read_worker(found.path).error == "ValueError: two lines"
