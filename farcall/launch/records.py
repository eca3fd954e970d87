"""The records that launchers exchange through their store, and what they do about a stranger's.

Anyone who reaches the store can write to it. A record is sealed with the job's token, under its key, which
contains the name of this run of the job; it carries a number that grows with each record of its launcher, its
*beat*. So a reader recognizes a record that another process has made up, taken from another key or job, or
written a second time. It passes over such a record, and says so once.

*Writing again.* A launcher that does not find its own record under its key writes it again, with the next
beat. So a record that was overwritten or deleted is back at the launcher's next look.

*Silence.* If the coordinator finds no news of a launcher for two beats, it writes a record of its own under
that launcher's key, a *question*, with a new number at each look. If the question is still there at the next
look, the launcher is silent. If anything else is there, or nothing, a stranger is writing: the coordinator
cannot know whether the launcher is silent, and goes on. The others need no such question: the coordinator
serves the store, so it is not gone as long as the store answers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, Final, Generic, TypeVar

from farcall.launch.rounds import SILENT_SECONDS, Launcher, Report, State
from farcall.launch.terminal import say
from rpc.rendezvous.store import SharedStore
from rpc.transport.authentication import ForeignRecordError

__all__ = [
    "Arrivals",
    "Heard",
    "Notice",
    "Post",
    "Quiet",
    "Records",
    "Unreadable",
    "keep",
    "read",
    "unpacked",
]

_BEAT_SECONDS: Final = 1.0
_ASK_SECONDS: Final = 2 * _BEAT_SECONDS
"""Time in seconds without news after which a reader asks."""

_LONGEST_LOOK_SECONDS: Final = 1.0
"""Maximum time in seconds between two looks that counts as silence."""

_PLACES_AHEAD: Final = 16
"""Number of places behind the last launcher that has arrived in which the coordinator looks for others."""

T = TypeVar("T")


class Unreadable(Exception):
    """A record that no launcher of this job has written, or not now; the text says what is wrong with it."""


class Notice:
    """Says once that there are records of strangers in the store.

    Args:
        place: HOST:PORT of the store.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._said = False

    def __call__(self, key: str, what: str) -> None:
        """Say that the record under a key was passed over."""
        if not self._said:
            self._said = True
            say(
                f"another process writes to the store at {self._place}: the record '{key}' {what}. Such "
                f"records are passed over, and the job goes on. Let only its machines reach this port"
            )


def unpacked(packed: bytes, parse: Callable[[bytes], T]) -> T:
    """Parse a record.

    Raises:
        Unreadable: no launcher writes such a record.
    """
    try:
        return parse(packed)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise Unreadable("is damaged") from error


def read(store: SharedStore, key: str) -> bytes | None:
    """Return the record under a key; None if there is none.

    Raises:
        Unreadable: it is not sealed with this job's token for this key.
    """
    try:
        return store.get(key)
    except ForeignRecordError as error:
        raise Unreadable("is not sealed with this job's token") from error


def keep(store: SharedStore, key: str, packed: bytes) -> None:
    """Write a record that never changes, unless it is there."""
    try:
        is_there = store.get(key) == packed
    except ForeignRecordError:
        is_there = False
    if not is_there:
        store.set(key, packed)


class Post:
    """The record of this launcher under one key.

    Args:
        store: the store, under the job's prefix.
        key: the key; no other launcher writes there.
    """

    def __init__(self, store: SharedStore, key: str) -> None:
        self._store = store
        self._key = key
        self._said: object = None
        self._written = b""
        self._beat = 0
        self._due = 0.0

    def keep(self, said: Mapping[str, Any]) -> bool:
        """Write the record if it has changed, is due again, or is not there any more.

        Returns:
            Whether it was written because it is due, or has changed.
        """
        now = time.monotonic()
        is_due = said != self._said or now >= self._due
        if is_due or not self._is_there():
            self._said, self._due, self._beat = said, now + _BEAT_SECONDS, self._beat + 1
            self._written = json.dumps({"beat": self._beat, "said": said}).encode()
            self._store.set(self._key, self._written)
        return is_due

    def _is_there(self) -> bool:
        try:
            return self._store.get(self._key) == self._written
        except ForeignRecordError:
            return False


class Records(Generic[T]):
    """The records of another launcher under one key. A record that is no news is passed over.

    Args:
        store: the store, under the job's prefix.
        key: the key.
        parse: makes a value of what the launcher says.
        notice: is called for records that are passed over.

    Attributes:
        said: the value of the last record; None before the first.
        beat: number of the last record; 0 before the first.
    """

    def __init__(
        self, store: SharedStore, key: str, parse: Callable[[Any], T], notice: Callable[[str, str], object]
    ) -> None:
        self._store = store
        self._key = key
        self._parse = parse
        self._notice = notice
        self.said: T | None = None
        self.beat = 0

    def look(self) -> bytes | None:
        """Read the record that is there now, and return it as it is.

        Raises:
            Unreadable: a stranger has written it.
        """
        try:
            packed = read(self._store, self._key)
            if packed is not None:
                beat, said = unpacked(packed, self._unpack)
                if beat < self.beat:
                    raise Unreadable("is an old one, written again")
                if beat > self.beat:
                    self.beat, self.said = beat, said
        except Unreadable as error:
            self._notice(self._key, str(error))
            raise
        return packed

    def _unpack(self, packed: bytes) -> tuple[int, T | None]:
        found = json.loads(packed)
        if "question" in found:
            return self.beat, self.said
        return int(found["beat"]), self._parse(found["said"])


class Quiet:
    """Time in seconds for which a value has stayed the same, as far as it was read: a process that was
    stopped for a while (Ctrl-Z) has not read it. For one thread.
    """

    def __init__(self) -> None:
        self._value: object = None
        self._looked_at = time.monotonic()
        self.seconds = 0.0

    def look(self, value: object) -> float:
        """Read the value; returns that time."""
        now = time.monotonic()
        passed, self._looked_at = min(now - self._looked_at, _LONGEST_LOOK_SECONDS), now
        self.seconds = self.seconds + passed if value == self._value else 0.0
        self._value = value
        return self.seconds


class Heard:
    """The reports of another launcher, and for how long it has been silent.

    Args:
        store: as for ``Records``; no other launcher reads this key.
        key: as for ``Records``.
        notice: as for ``Records``.
    """

    def __init__(self, store: SharedStore, key: str, notice: Callable[[str, str], object]) -> None:
        self._store = store
        self._key = key
        self._records: Records[Report] = Records(store, key, Report.from_json, notice)
        self._quiet = Quiet()
        self._question: bytes | None = None
        self._asked = 0

    def look(self) -> None:
        """Handle what it has written last."""
        before, found = self._records.beat, None
        try:
            found = self._records.look()
            is_left_alone = found == self._question if self._question else found is not None or not before
        except Unreadable:
            is_left_alone = False
        if self._records.beat > before:
            self._question = None
        silent_for = self._quiet.look(self._records.beat if is_left_alone else object())
        if self._records.beat == before and (not is_left_alone or silent_for > _ASK_SECONDS):
            self._asked += 1
            self._question = json.dumps({"question": self._asked}).encode()
            self._store.set(self._key, self._question)

    @property
    def report(self) -> Report | None:
        """Its last report."""
        return self._records.said

    @property
    def has_left(self) -> bool:
        """Whether it is gone, or leaving, before the job has begun."""
        report = self.report
        leaves = report is not None and (report.leaves or report.state is State.LEFT)
        return bool(leaves) or self.silent_for > SILENT_SECONDS

    @property
    def silent_for(self) -> float:
        """Time in seconds since its last sign of life."""
        return self._quiet.seconds


class Arrivals:
    """The places in which launchers write that they have come. There is no counter, which a stranger could
    set; a launcher takes the first place that has no other's record.

    Args:
        board: the store, under the prefix of this run of the job.
        notice: as for ``Records``.
    """

    def __init__(self, board: SharedStore, notice: Callable[[str, str], object]) -> None:
        self._board = board
        self._notice = notice
        self._last = 0
        self._place = 0

    def keep(self, me: Launcher) -> None:
        """Write that this launcher has come, unless its place says so."""
        if self._place and self._at(self._place) == me:
            return
        self._place = 0
        packed = me.pack()
        while not self._place:
            self._last += 1
            key = f"launcher/{self._last}"
            found = self._at(self._last)
            if found == me:
                self._place = self._last
            elif found is None:
                self._board.remove(key)
                try:
                    is_mine = self._board.swap(key, b"", packed) == packed
                except ForeignRecordError:
                    is_mine = False
                self._place = self._last if is_mine else 0
        self._last = 0

    def new(self, known: Container[str]) -> Iterator[Launcher]:
        """Yield the launchers that have come, other than those with known names."""
        place = 0
        while place < self._last + _PLACES_AHEAD:
            place += 1
            found = self._at(place)
            if found is not None:
                self._last = max(self._last, place)
                if found.name not in known:
                    yield found

    def _at(self, place: int) -> Launcher | None:
        key = f"launcher/{place}"
        try:
            packed = read(self._board, key)
            return None if packed is None else unpacked(packed, Launcher.unpack)
        except Unreadable as error:
            self._notice(key, str(error))
            return None
