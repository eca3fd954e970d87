"""Runs an input through a target, and finds what it breaks."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Final

from tests.fuzz.hostile.cores import Target

__all__ = ["Failure", "outcome"]

HANG_SECONDS: Final = 5.0
GROWTH_MIB: Final = 256
"""By how much this process may grow at one input: a header of 64 KiB may become some 200 times as large."""


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
