"""Runs inputs through a target, keeps those that reach lines which none has reached, and finds what breaks.

Coverage is that of lines of ours, and of which line came before in that function: the number of such steps
that an input has reached first decides whether it is kept and mutated further. Small inputs are preferred.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import rpc
from tests.fuzz.hostile import corpus
from tests.fuzz.hostile.cores import Target
from tests.fuzz.hostile.mutation import Mutator

__all__ = ["Campaign", "Failure", "outcome"]

HANG_SECONDS: Final = 5.0
GROWTH_MIB: Final = 256
"""By how much this process may grow at one input: a header of 64 KiB may become some 200 times as large."""

_ROOT: Final = str(Path(rpc.__file__).parent.parent)
_OURS: Final = tuple(f"{_ROOT}/{package}/" for package in ("rpc", "rref", "farcall"))

Step = tuple[CodeType, int, int]


class HangError(Exception):
    """An input takes too long."""


@dataclass(frozen=True)
class Failure:
    """What an input has broken."""

    target: str
    data: bytes
    what: str


def outcome(target: Target, data: bytes) -> Failure | None:
    """Run one input; what it breaks, if it does."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with _time_limit():
            target.run(data)
    except target.refuses:
        pass
    except Exception as error:
        return Failure(target.name, data, f"{type(error).__name__}: {error}")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    if grown > GROWTH_MIB:
        return Failure(target.name, data, f"this process has grown by {grown} MiB")
    return None


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def expired(number: int, frame: FrameType | None) -> None:
        raise HangError(f"an input takes more than {HANG_SECONDS:g} s of a CPU")

    before = signal.signal(signal.SIGPROF, expired)
    signal.setitimer(signal.ITIMER_PROF, HANG_SECONDS)  # the machine may have other things to do
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class _Coverage:
    """Notes which steps of our code are taken while it is on."""

    def __init__(self) -> None:
        self.steps: set[Step] = set()

    def __enter__(self) -> None:
        sys.settrace(self._called)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(_OURS):
            return None
        steps, last = self.steps, 0

        def line(frame: FrameType, event: str, _: object) -> Any:
            nonlocal last
            if event == "line":
                steps.add((code, last, frame.f_lineno))
                last = frame.f_lineno
            return line

        return line


@dataclass
class Campaign:
    """One target's.

    Attributes:
        kept: inputs that have reached something new, as they were found.
        failures: one for each thing that broke.
        runs: how many inputs were run.
    """

    target: Target
    seed: int = 0
    runs: int = 0
    kept: list[bytes] = field(default_factory=list)
    failures: dict[str, Failure] = field(default_factory=dict)
    known: set[Step] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.mutator = Mutator(self.seed)
        for data in [*self.target.seeds(), *corpus.load(self.target.name)]:
            self.run(data)
        if not self.kept:
            self.kept.append(b"")

    def run(self, data: bytes) -> None:
        """Run one input, and keep it if it reaches something new."""
        self.runs += 1
        coverage = _Coverage()
        with coverage:
            failure = outcome(self.target, data)
        if failure is not None:
            self.failures.setdefault(failure.what[:60], failure)
        elif not coverage.steps <= self.known:
            self.known |= coverage.steps
            self.kept.append(data)

    def run_new(self, count: int) -> None:
        """Run so many new inputs."""
        chance = self.mutator.chance
        mutate = self.mutator.of_values if self.target.of_values else self.mutator.of_bytes
        for _ in range(count):
            one, other = chance.choice(self.kept), chance.choice(self.kept)
            data = mutate(min(one, other, key=len), self.kept)
            if self.target.of_values and chance.random() < 0.1:
                data = self.mutator.of_bytes(data, self.kept)
            self.run(data)

    def run_for(self, seconds: float) -> None:
        """Run new inputs for so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.run_new(50)
