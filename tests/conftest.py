"""What the whole session needs: the fork server, a temporary folder of its own, the check for leftovers."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# One thread per process: dozens of workers share few cores, and a process with threads cannot be forked.
# NumPy and PyTorch read these when they are first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
for _name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(_name, None)  # a test that wants them sets them

import pytest

from tests.support import default_device, fresh, interpreters, leftovers, workers
from tests.support.fork_server import ForkServer, become_subreaper

run_workers, standing_workers = workers.run_workers, workers.standing_workers
run_fresh = fresh.run_fresh

_snapshot_key = pytest.StashKey[leftovers.Snapshot]()
_found_key = pytest.StashKey[list[str]]()
_temporary_key = pytest.StashKey[Path]()
_jobs_key = pytest.StashKey[Path]()
_FIXTURE = "run_workers"
_FORKED = {Path(__file__).parent / each for each in ("group", "unit")}


# A job in the background is started with SIGINT ignored, and would pass that on to all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Forks the fork server while this process is one bare thread, and moves temporary files aside."""
    become_subreaper()
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # where tmp_path goes, as ever
    jobs = config.stash[_jobs_key] = Path(tempfile.mkdtemp(prefix="farcall-test-jobs-"))
    os.environ["FARCALL_JOBS_DIR"] = str(jobs)
    folder = Path(tempfile.mkdtemp(prefix="farcall-tests-"))
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    config.stash[_temporary_key] = folder
    if any(Path(each).is_dir() for each in config.args):  # this process and its servers will need PyTorch
        gc.disable()
        for name in workers.PRELOADED:
            importlib.import_module(name)
        gc.enable()
    config.stash[workers.fork_server_key] = ForkServer.start(workers.worker_main)
    gc.disable()  # while tests are imported; workers collect garbage


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what forks workers with ``processes``, so that ``make test-fast`` can leave it out. Puts first
    what uses the logical device in this process, which must be there before the first backward.
    """
    for item in items:
        if _FIXTURE in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.processes)
    items.sort(key=lambda item: item.get_closest_marker("logical_device") is None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Lets the fork server import PyTorch while the first tests run, if it will be needed."""
    gc.freeze()  # collections in tests need not visit what the imports have made
    gc.enable()
    if any(_FIXTURE in getattr(item, "fixturenames", ()) for item in session.items):
        session.config.stash[workers.fork_server_key].warm_up(workers.PRELOADED)
    on_devices = bool(default_device.MODE)
    if on_devices or any("device_kind" in getattr(item, "fixturenames", ()) for item in session.items):
        from tests.support import devices

        missing = devices.is_missing()  # builds the simulated accelerator, which takes longer than a test may
        if on_devices and missing:
            pytest.exit(f"no simulated accelerator: {missing}", pytest.ExitCode.USAGE_ERROR)
    session.config.stash[_snapshot_key] = leftovers.Snapshot()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Has ``sys.executable`` forked while a test of groups or units and its fixtures run, unless it is marked
    ``fresh_interpreter`` or is of the examples, which run as a user runs them.
    """
    server = item.config.stash[workers.fork_server_key]
    fork = functools.partial(server.fork_program, modules=workers.PRELOADED)
    is_forked = not _FORKED.isdisjoint(item.path.parents) and not item.path.name.startswith("test_example")
    is_fresh = item.get_closest_marker("fresh_interpreter") or not is_forked
    interpreters.start_by(None if is_fresh else fork)
    try:
        return (yield)
    finally:
        interpreters.start_by(None)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails the run if a test has left something behind."""
    snapshot = session.config.stash.get(_snapshot_key, None)
    if snapshot is None:
        return
    found = session.config.stash[_found_key] = snapshot.leftovers()
    if found and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says what was left behind, and what could not be tested at all."""
    if (devices := sys.modules.get("tests.support.devices")) and devices.NOT_TESTED:
        terminalreporter.section("NOT TESTED: tensors on devices", red=True, bold=True)
        terminalreporter.write_line(f"There is no simulated accelerator: {devices.NOT_TESTED[0]}")
    if found := config.stash.get(_found_key, []):
        terminalreporter.section("left behind by the tests", red=True, bold=True)
        for line in found:
            terminalreporter.write_line(line)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the fork server and removes the session's temporary folder."""
    if server := config.stash.get(workers.fork_server_key, None):
        with contextlib.suppress(OSError):
            server.stop()
    for key in (_temporary_key, _jobs_key):
        if folder := config.stash.get(key, None):
            shutil.rmtree(folder, ignore_errors=True)
