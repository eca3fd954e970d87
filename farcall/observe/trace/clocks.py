"""Aligns the clocks of hosts for a trace, by the calls between them. Pure.

Processes of one host share a monotonic clock. A request cannot arrive before it was sent, nor an answer
before it was given. So each call bounds the offset of two clocks from one side, and its answer from the
other; the middle of the tightest bounds is used, and half their distance is the error. Hosts that have not
called each other are aligned by the time of day.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from farcall.observe.trace.parts import Part

__all__ = ["Alignment", "align"]


@dataclass(frozen=True, slots=True)
class Alignment:
    """The clock of a host.

    Attributes:
        offset: seconds to add to its monotonic clock.
        error: maximum error of the offset, in seconds; infinite if it is by the time of day.
    """

    offset: float
    error: float

    def __str__(self) -> str:
        return "by the time of day" if math.isinf(self.error) else f"±{self.error * 1e6:.1f} us"


def align(parts: Sequence[Part]) -> dict[str, Alignment]:
    """Align the clocks of all hosts, by their boot identifier; the first one is the reference."""
    if not parts:
        return {}
    first = parts[0]
    found = {first.boot: Alignment(first.wall, 0.0)}
    walls = {part.boot: part.wall for part in reversed(parts)}
    missing = [boot for boot in walls if boot not in found]
    bounds = _bounds(parts) if missing else {}
    while missing:
        best: tuple[float, str, float] | None = None
        for known, alignment in found.items():
            for boot in missing:
                low = bounds.get((known, boot), -math.inf)
                high = -bounds.get((boot, known), -math.inf)
                error = alignment.error + abs(high - low) / 2
                if math.isfinite(error) and (best is None or error < best[0]):
                    best = error, boot, alignment.offset + (low + high) / 2
        if best is None:
            found |= {boot: Alignment(walls[boot], math.inf) for boot in missing}
            break
        error, boot, offset = best
        found[boot] = Alignment(offset, error)
        missing.remove(boot)
    return found


def _bounds(parts: Sequence[Part]) -> dict[tuple[str, str], float]:
    """Return for two hosts the largest of ``sent at the one - received at the other``, on their own
    clocks.
    """
    seen: dict[tuple[str, int], dict[str, tuple[str, float]]] = {}
    for part in parts:
        for kind, at, _, *rest in part.records:
            if kind in ("sent", "called"):
                key = part.workers[rest[0]], rest[1]
            elif kind in ("came", "answered"):
                key = rest[0], rest[1]
            else:
                continue
            seen.setdefault(key, {}).setdefault(kind, (part.boot, at))
    found: dict[tuple[str, str], float] = {}
    for call in seen.values():
        for sent, received in (("sent", "came"), ("answered", "called")):
            if sent in call and received in call and call[sent][0] != call[received][0]:
                hosts = call[sent][0], call[received][0]
                found[hosts] = max(found.get(hosts, -math.inf), call[sent][1] - call[received][1])
    return found
