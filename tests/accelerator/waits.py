"""Deletes each wait for devices in turn, and shows which test notices: ``python -m tests.accelerator.waits``.

A wait is a line that makes a stream or a thread wait for a device, or keeps memory from being reused early.
For each one the tree is copied, the line is taken out of the copy, and the tests of devices run there in the
mode ``lazy``, where what nothing waits for does not happen. At least one must fail.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]

_COPIED: Final = ("rpc", "rref", "dist_autograd", "dist_optim", "spmd", "farcall", "tests")


@dataclass(frozen=True)
class Wait:
    """One line to delete.

    Attributes:
        what: what it does.
        file, line: where it is, and its text without indentation.
        instead: what stands in its place.
        tests: the expression of pytest's ``-k`` that selects the tests that must notice.
    """

    what: str
    file: str
    line: str
    instead: str = "pass"
    tests: str = "test_streams_wait or test_memory_of"


WAITS: Final = (
    Wait(
        "the sending stream waits for the caller's stream",
        "rpc/devices/staging.py",
        "stream.wait_event(_current_stream(device).record_event())",
    ),
    Wait("the message waits for its copies", "rpc/devices/staging.py", "event.synchronize()"),
    Wait(
        "a consumer's stream waits for a future's or a reference's tensors",
        "rpc/devices/streams.py",
        "current.wait_event(event)",
    ),
    Wait("Future.wait joins", "rpc/agent/futures.py", "self._arrived.join()"),
    Wait("a reference's value joins", "rref/value.py", "self._made.join()"),
    Wait(
        "a reference's value waits for what other requests did to it",
        "rpc/devices/streams.py",
        "shared.renew()",
        tests="test_requests_on_one_object",
    ),
    Wait(
        "gradients that are held back wait for the device's thread",
        "dist_autograd/participant.py",
        "work.join()",
        tests="test_gradients",
    ),
    Wait(
        "the gradients of a context are joined",
        "dist_autograd/contexts.py",
        "self._work.join(found.values())",
        tests="test_gradients",
    ),
    Wait(
        "a recv waits for gradients on other devices",
        "dist_autograd/recording.py",
        "wait_for_other_devices(gradients)",
        tests="test_gradients_are",
    ),
    Wait(
        "requests wait for optimizers' steps",
        "rpc/devices/installation.py",
        "self.updates.wait()",
        tests="test_requests_after_a_step",
    ),
    Wait(
        "a step is part of what later requests wait for",
        "dist_optim/local_optimizer.py",
        "devices.updates.renew()",
        tests="test_requests_after_a_step",
    ),
    Wait(
        "the caller of step() waits for its own parameters",
        "dist_optim/optimizer.py",
        "devices.updates.join()",
        tests="test_training_here",
    ),
    Wait(
        "memory that is read on another stream is recorded",
        "rpc/devices/streams.py",
        "tensor.record_stream(_current_stream(tensor.device))",
        tests="test_memory_is_kept or test_training or test_gradients",
    ),
    Wait(
        "memory that is being copied for a message is recorded",
        "rpc/devices/staging.py",
        "elements.record_stream(stream)",
        tests="test_memory_is_kept",
    ),
    Wait(
        "a collective waits for the caller's streams",
        "spmd/collectives/staged.py",
        "self._called.join()",
        tests="test_operations_wait",
    ),
    Wait(
        "a collective's messages wait for their copies",
        "rpc/devices/staging.py",
        "_current_stream(tensor.device).synchronize()",
        tests="test_operations_wait",
    ),
    Wait(
        "a waiting thread's streams wait for a collective's results",
        "spmd/collectives/work.py",
        "self._staged.join()",
        tests="test_operations_wait",
    ),
)


def _without(wait: Wait, folder: Path) -> int:
    """Delete a wait in a copy of the tree; returns how many lines that were."""
    path = folder / wait.file
    lines = path.read_text().split("\n")
    count = 0
    for number, line in enumerate(lines):
        if line.strip() == wait.line:
            lines[number] = line[: len(line) - len(line.lstrip())] + wait.instead
            count += 1
    path.write_text("\n".join(lines))
    return count


def _notices(wait: Wait, folder: Path) -> str:
    """The tests that fail without a wait."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-o", "addopts=", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, "tests/group/devices", "-k", f"({wait.tests}) and (lazy or not (eager or random))"],
        check=False,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    failed = [
        line.split("::")[1].split(" ")[0] for line in ended.stdout.splitlines() if line.startswith("FAILED")
    ]
    if ended.returncode == 0:
        return ""
    return ", ".join(failed) or "an error"


def main() -> int:
    """Print the table; returns 1 if a wait can be deleted unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=int, help="one of them, by its number, from 1 on")
    arguments = parser.parse_args()
    unnoticed = 0
    for number, wait in enumerate(WAITS, 1):
        if arguments.only not in (None, number):
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for each in _COPIED:
                shutil.copytree(ROOT / each, folder / each, ignore=shutil.ignore_patterns("__pycache__"))
            for each in ("pyproject.toml", "farcall_backend.py", "farcall_guard.py"):
                shutil.copy(ROOT / each, folder / each)
            count = _without(wait, folder)
            if not count:
                raise SystemExit(f"{wait.file} has no line {wait.line!r}")
            found = _notices(wait, folder)
        unnoticed += not found
        print(f"{number:2} {wait.what}: {found or 'NOTICED BY NO TEST'}", flush=True)
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
