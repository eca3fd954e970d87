"""A version of a store, from its first part to the end of its last lease. Pure.

A version is open from the first part that is declared until the last one has been written, or it is given up.
Once it is whole, it never changes again. When it is dropped, or newer ones have taken its place, it stays for
its leases only.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from farcall.weights.assembly import Assembly
from farcall.weights.errors import WeightsError

__all__ = ["Freed", "Lease", "Part", "Version", "Who", "Writer", "check_tag", "checked_metadata"]

_LONGEST_TAG: Final = 256
"""Maximum length of a tag."""

_MOST_METADATA: Final = 1 << 16
"""Maximum size of a version's metadata in bytes, as JSON."""


class Who(NamedTuple):
    """A worker: its name, for people, and what distinguishes it from others of that name."""

    name: str
    incarnation: Hashable


class Writer(NamedTuple):
    """A put of a part: its worker, and a number that the worker has chosen."""

    who: Who
    put: int


class Lease(NamedTuple):
    """A lease: its holder, and a number that the holder has chosen."""

    holder: Who
    ticket: int


class Freed(NamedTuple):
    """Memory that no version uses any more, and whether another one may use it."""

    memory: int
    reusable: bool


@dataclass(eq=False)
class Part:
    """A part of a version that has been declared.

    Attributes:
        writers: its writers, and whether they have finished; None: with an error. The part is written once
            all of them have, without one: no one writes to a version that is whole.
        lost: the name of a writer that was lost since the part was declared last.
    """

    writers: dict[Writer, bool | None] = field(default_factory=dict)
    lost: str | None = None

    @property
    def written(self) -> bool:
        """Whether it has been written."""
        return self.lost is None and all(self.writers.values())


@dataclass(eq=False)
class Version:
    """A version.

    Attributes:
        number: the user's number.
        assembly: which blocks its parts have, and its layout.
        parts: those that have been declared.
        memory: for each segment of its layout, the memory that it lies in.
        ended: whether its memory is free.
        tainted: whether a worker that this one has lost sight of may still use its memory, which must not be
            used again then.
        leases: its leases.
        writing: the workers whose blocks are copied into it here, each once for each call under way.
        serial: place in the order in which versions became whole; 0 while it is open.
        since: when it became whole, in seconds.
        copied: whether it was copied from another keeper, in one part; its writers may have had others.
        metadata: what the user has said about it.
    """

    number: int
    assembly: Assembly
    parts: dict[int, Part] = field(default_factory=dict)
    memory: list[int] = field(default_factory=list)
    ended: bool = False
    tainted: bool = False
    leases: set[Lease] = field(default_factory=set)
    writing: list[Who] = field(default_factory=list)
    serial: int = 0
    since: float = 0.0
    copied: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether all parts have been written."""
        return self.serial > 0

    @property
    def stuck(self) -> bool:
        """Whether it cannot become whole: a lost worker may still write to it."""
        return self.tainted and not (self.whole or self.ended)

    def unwritten(self) -> list[int]:
        """Return the parts that are missing."""
        there = {} if self.stuck else self.parts
        return [each for each in range(self.assembly.parts) if each not in there or not there[each].written]

    def declare(self, part: int, writer: Writer) -> None:
        """Have a part written once more, in place of those that have failed."""
        there = self.parts.setdefault(part, Part())
        there.writers = {each: done for each, done in there.writers.items() if done is not None}
        there.writers[writer], there.lost = False, None

    def begun_by(self, who: Who) -> list[int]:
        """Return the parts that a worker has begun to write, and has not finished."""
        return [
            part
            for part, each in self.parts.items()
            if any(not done and writer.who == who for writer, done in each.writers.items())
        ]

    def lose(self, who: Who, *, lives: bool) -> bool:
        """Note that a worker is lost, which may still write if it ``lives``, or its blocks are being copied;
        returns whether the version misses a part of it now.
        """
        left = self.begun_by(who)
        for part in left:
            there = self.parts[part]
            there.writers = {each: done for each, done in there.writers.items() if done or each.who != who}
            there.lost = who.name
        self.tainted |= bool(left) and (lives or who in self.writing)
        return bool(left)

    def missing(self) -> str:
        """Describe which parts are missing."""
        parts = self.unwritten()
        shown = ", ".join(map(str, parts[:8])) + (", ..." if len(parts) > 8 else "")
        lost = ", ".join(
            f"worker '{each.lost}', which was to write part {part}, is lost"
            for part, each in self.parts.items()
            if each.lost is not None
        )
        if self.stuck:
            lost += ", and may still write: all parts have to be put again"
        return f"part {shown} of {self.assembly.parts} is missing" + (f" ({lost})" if lost else "")


def check_tag(name: object) -> None:
    """Raise ``WeightsError`` if this is no tag."""
    if not isinstance(name, str) or not name or len(name) > _LONGEST_TAG:
        raise WeightsError(f"a tag is a text of up to {_LONGEST_TAG} characters, not {name!r:.80}")


def checked_metadata(given: Mapping[Any, Any] | None) -> dict[str, Any]:
    """Return the metadata of a version; ``WeightsError`` if it is none."""
    found = dict(given or {})
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, str | int | float | bool | None):
            raise WeightsError(
                f"metadata is texts, numbers, booleans and None by name, not {name!r:.80}: {value!r:.80}"
            )
    if len(json.dumps(found)) > _MOST_METADATA:
        raise WeightsError(
            f"the metadata of a version has {_MOST_METADATA} bytes at most: store it elsewhere"
        )
    return found
