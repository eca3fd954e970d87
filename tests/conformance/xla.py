"""PyTorch/XLA's own tests and examples of SPMD mode, unmodified, over farcall::

    python -m tests.conformance.xla PATH                    # PATH: a checkout of github.com/pytorch/xla
    python -m tests.conformance.xla PATH --only sharding    # files whose name contains this
    python -m tests.conformance.xla PATH --programs         # examples, and tests that are programs, too

Each file of ``test/spmd`` runs in a process of its own under ``farcall run``, with 4 workers. If a case
fails, the file runs with 8 workers and with 1 as well, as theirs run on machines of several sizes: a case
counts if it passes in one of these runs. A program counts if it ends without an error, or has printed the
loss of a step when its time is over, since some train a ResNet-50 for hours. The tests need ``absl-py`` and
``rich``, and some programs ``torchvision``.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

__all__ = ["Outcome", "main", "outcomes_in"]

_WORKERS: Final = (4, 8, 1)
_LEAST: Final = 180
"""Number of cases that must pass."""

_FLAGS: Final = {
    "test_train_spmd_linear_model": ["--skip-gradient-checkpointing"],
    "test_train_spmd_imagenet": ["--fake_data", "--model=resnet18", "--batch_size=8"],
}
_SMALL: Final = ["--num-steps=2", "--hidden-size=64", "--intermediate-size=128", "--num-layers=2"]
_OF_DECODERS: Final = "train_decoder_only_base.py"
_NO_PROGRAMS: Final = ("decoder_only_model", "decoder_with_scan")
"""Files of ``examples`` that others import."""

_CASE: Final = re.compile(r"^(test\w+) \(([\w.]+)\)")
_STATUS: Final = re.compile(r"(?:^|\.\.\. )(ok|FAIL|ERROR|skipped .*|expected failure)$")
_HEADING: Final = re.compile(r"^(FAIL|ERROR): (\w+) \(([\w.]+)\)")
_STEP: Final = re.compile(r"step\D{0,3}\d+.*loss", re.IGNORECASE)


@dataclass
class Outcome:
    """What has become of the cases of a file.

    Attributes:
        passed, failed, skipped: names of cases.
        said: the last lines that were printed, if there is no case.
    """

    passed: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    skipped: set[str] = field(default_factory=set)
    said: str = ""

    def add(self, other: Outcome) -> None:
        """Take another run of the file into account: what has passed once has passed."""
        self.passed |= other.passed
        self.failed = (self.failed | other.failed) - self.passed
        self.skipped = (self.skipped | other.skipped) - self.passed - self.failed


def outcomes_in(text: str) -> Outcome:
    """What unittest has written with ``-v``; a program may print between."""
    found = Outcome()
    current = ""
    for line in text.splitlines():
        if heading := _HEADING.match(line):
            found.failed.add(heading[2] if heading[2] == "setUpClass" else heading[3])
            current = ""
        elif case := _CASE.match(line):
            current = case[2]
        if current and (status := _STATUS.search(line)):
            kind = found.passed if status[1] in ("ok", "expected failure") else found.failed
            (found.skipped if status[1].startswith("skipped") else kind).add(current)
            current = ""
    found.passed -= found.failed
    if not found.passed | found.failed | found.skipped:
        found.failed.add("(no case was run)")
        found.said = "\n".join(text.splitlines()[-3:])
    return found


def run(file: Path, flags: Sequence[str], workers: int, seconds: float) -> tuple[int | None, str]:
    """Run a file under ``farcall run``; its exit status, None if its time was over, and what it printed."""
    environ = {**os.environ, "FARCALL_SPMD_WORKERS": str(workers), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "farcall", "run", str(file.resolve()), *flags],
            cwd=file.parent,
            env=environ,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(process.pid, signal.SIGKILL)  # its workers end with it
            process.wait()
        output.seek(0)
        return status, output.read()


def test_files(checkout: Path) -> list[Path]:
    """Tests, without their base class and what only measures."""
    without = {"test_xla_sharding_base", "test_sharding_strategies"}
    return [each for each in sorted((checkout / "test/spmd").glob("test_*.py")) if each.stem not in without]


def programs(checkout: Path) -> Iterator[tuple[Path, list[str]]]:
    """Programs, with flags that make them small where they have such."""
    yield checkout / "test/spmd/test_sharding_strategies.py", ["--sharding=spmd", "--embedding_dimension=64"]
    for each in sorted((checkout / "examples").rglob("*.py")):
        if each.stem not in _NO_PROGRAMS:
            yield each, _SMALL if each.name == _OF_DECODERS else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what passes; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.xla", description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--only", default="", help="run files whose name contains this")
    parser.add_argument("--programs", action="store_true", help="run examples as well")
    parser.add_argument("--seconds", type=float, default=1800.0, help="limit for each file")
    options = parser.parse_args(arguments)
    total = Outcome()
    for file in test_files(options.checkout):
        if options.only not in file.name:
            continue
        found = Outcome()
        for workers in _WORKERS:
            flags = ["-v", *_FLAGS.get(file.stem, [])]
            found.add(outcomes_in(run(file, flags, workers, options.seconds)[1]))
            if not found.failed:
                break
        print(
            f"{file.stem}: {len(found.passed)} pass, {len(found.failed)} fail, {len(found.skipped)} skipped",
            *sorted(found.failed),
            *([found.said] if found.said else []),
            sep="\n    ",
            flush=True,
        )
        for kind in ("passed", "failed", "skipped"):
            getattr(total, kind).update(f"{file.stem}.{each}" for each in getattr(found, kind))
    wrong = _run_programs(options) if options.programs else 0
    print(f"{len(total.passed)} pass, {len(total.failed)} fail, {len(total.skipped)} skipped")
    return int(not options.only and len(total.passed) < _LEAST) or wrong


def _run_programs(options: argparse.Namespace) -> int:
    """The number of programs that do not run."""
    wrong = 0
    for file, flags in programs(options.checkout):
        if options.only not in file.name:
            continue
        status, text = run(file, flags, _WORKERS[0], options.seconds)
        runs = status == 0 or (status is None and _STEP.search(text) is not None)
        wrong += not runs
        end = "ends" if status == 0 else "trains until its time is over"
        last = (text.strip().splitlines() or [""])[-1]
        print(f"{file.relative_to(options.checkout)}: {end if runs else 'does not run: ' + last}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
