"""PyTorch/XLA's own tests and examples of SPMD mode, unmodified, over farcall::

    python -m tests.conformance.xla PATH                    # PATH: a checkout of github.com/pytorch/xla
    python -m tests.conformance.xla PATH --only sharding    # files whose name contains this

Each file of ``test/spmd`` and each program of ``examples`` runs in a process of its own under
``farcall run``, with 4 workers. If a case fails, the file runs with 8 workers and with 1 as well, as theirs
run on machines of several sizes: a case counts if it passes in one of these runs. A program counts if it ends
without an error. Training programs run with small models and little data
(:mod:`tests.conformance.xla_small`). The command fails if fewer cases pass than expected, or if a program
fails that needs no kernel of XLA's own. Their files need ``absl-py``, ``rich`` and ``torchvision``.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

__all__ = ["Outcome", "main", "outcomes_in"]

_WORKERS: Final = (4, 8, 1)
_LEAST: Final = 180
"""Number of cases that must pass."""
_SMALL: Final = Path(__file__).with_name("xla_small.py")

_NO_TESTS: Final = ("test_sharding_strategies", "test_train_spmd_imagenet", "test_xla_sharding_base")
"""Files of ``test/spmd`` without cases."""
_NO_PROGRAMS: Final = ("decoder_only_model", "decoder_with_scan")
"""Files of ``examples`` that others import."""
_KERNELS: Final = "flash_attention"
"""Folder of ``examples`` whose programs call a TPU's kernel."""

_DECODER: Final = ("--hidden-size=64", "--intermediate-size=128")

_NO_CASE: Final = "(no case was run)"
_CASE: Final = re.compile(r"^(test\w+) (?:\(.*\) )?\((__main__[\w.]*)\)")
_STATUS: Final = re.compile(r"(?:^|\.\.\. )(ok|FAIL|ERROR|skipped .*|expected failure)$")
_HEADING: Final = re.compile(r"^(?:FAIL|ERROR): (\w+) (?:\(.*\) )?\((__main__[\w.]*)\)")


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
            found.failed.add(_name(heading))
            current = ""
        elif case := _CASE.match(line):
            current = _name(case)
        if current and (status := _STATUS.search(line)):
            kind = found.passed if status[1] in ("ok", "expected failure") else found.failed
            (found.skipped if status[1].startswith("skipped") else kind).add(current)
            current = ""
    found.passed -= found.failed
    if not found.passed | found.failed | found.skipped:
        found.failed.add(_NO_CASE)
        found.said = "\n".join(text.splitlines()[-3:])
    return found


def _name(case: re.Match[str]) -> str:
    """A case's class and method, as unittest takes them. absl writes arguments between the two."""
    method, where = case[1], case[2].removeprefix("__main__").removeprefix(".")
    return where if where.endswith(f".{method}") else f"{where}.{method}"


def run(
    file: Path, flags: Sequence[str], workers: int, seconds: float, before: Sequence[str] = ()
) -> tuple[int | None, str]:
    """Run a file under ``farcall run``; its exit status, None if its time was over, and what it printed.

    Args:
        before: a program that runs the file, and its first arguments.
    """
    environ = {**os.environ, "FARCALL_SPMD_WORKERS": str(workers), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "farcall", "run", *before, str(file.resolve()), *flags],
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
    """The files of ``test/spmd`` that have cases."""
    return [each for each in sorted((checkout / "test/spmd").glob("test_*.py")) if each.stem not in _NO_TESTS]


def programs(checkout: Path) -> Iterator[tuple[Path, list[str]]]:
    """Programs of ``test/spmd`` and ``examples``, and the flags that they run with."""
    spmd, examples = checkout / "test/spmd", checkout / "examples"
    yield spmd / "test_sharding_strategies.py", ["--batch_size=64", "--embedding_dimension=64"]
    for sharding in ("batch", "spatial", "conv", "linear"):
        flags = ["--fake_data", "--model=resnet18", "--num_epochs=1", f"--sharding={sharding}"]
        yield spmd / "test_train_spmd_imagenet.py", flags
    for each in sorted(examples.rglob("*.py")):
        if each.stem not in _NO_PROGRAMS:
            yield each, list(_DECODER) if each.stem == "train_decoder_only_base" else []
    scanned = "scan.decoder_with_scan.DecoderWithScan"
    yield examples / "train_decoder_only_base.py", [scanned, *_DECODER]


def _run_tests(file: Path, options: argparse.Namespace) -> tuple[Outcome, str]:
    found = Outcome()
    trains = file.stem.startswith("test_train")
    before = [str(_SMALL), str(options.checkout.resolve())] if trains else []
    for workers in _WORKERS:
        again = sorted(found.failed) if found.passed | found.skipped and not _is_whole(found.failed) else []
        found.add(outcomes_in(run(file, ["-v", *again], workers, options.seconds, before)[1]))
        if not found.failed:
            break
    counts = f"{len(found.passed)} pass, {len(found.failed)} fail, {len(found.skipped)} skipped"
    lines = [f"{file.stem}: {counts}", *sorted(found.failed), *([found.said] if found.said else [])]
    passed, failed, skipped = (
        {f"{file.stem}.{case}" for case in kind} for kind in (found.passed, found.failed, found.skipped)
    )
    return Outcome(passed, failed, skipped), "\n    ".join(lines)


def _is_whole(failed: set[str]) -> bool:
    """Whether not only single cases have failed, but what comes before all of a class or file."""
    return any(each.endswith(".setUpClass") or each == _NO_CASE for each in failed)


def _run_program(file: Path, flags: Sequence[str], options: argparse.Namespace) -> tuple[Outcome, str]:
    before = [str(_SMALL), str(options.checkout.resolve())]
    status, text = run(file, flags, _WORKERS[0], options.seconds, before)
    name = " ".join([str(file.relative_to(options.checkout)), *flags])
    if status == 0:
        return Outcome({name}), f"{name}: ends"
    if file.parent.name == _KERNELS:
        return Outcome(skipped={name}), f"{name}: needs kernels of XLA"
    said = "its time is over" if status is None else (text.strip().splitlines() or [""])[-1]
    return Outcome(failed={name}), f"{name}: fails: {said}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what passes; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.xla", description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--only", default="", help="run files whose path contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="number of files that run at once")
    parser.add_argument("--seconds", type=float, default=600.0, help="limit for each run of a file")
    options = parser.parse_args(arguments)
    cases, ends = Outcome(), Outcome()
    files = [each for each in test_files(options.checkout) if options.only in str(each)]
    ran = [each for each in programs(options.checkout) if options.only in str(each[0])]
    with ThreadPoolExecutor(options.jobs) as pool:
        jobs: list[tuple[Outcome, Callable[[], tuple[Outcome, str]]]] = [
            *((cases, partial(_run_tests, each, options)) for each in files),
            *((ends, partial(_run_program, *each, options)) for each in ran),
        ]
        for total, done in [(total, pool.submit(job)) for total, job in jobs]:
            found, said = done.result()
            total.add(found)
            print(said, flush=True)
    print(f"cases: {len(cases.passed)} pass, {len(cases.failed)} fail, {len(cases.skipped)} skipped")
    print(
        f"programs: {len(ends.passed)} end, {len(ends.failed)} fail, {len(ends.skipped)} need kernels of XLA"
    )
    return int(bool(ends.failed) or (not options.only and len(cases.passed) < _LEAST))


if __name__ == "__main__":
    sys.exit(main())
