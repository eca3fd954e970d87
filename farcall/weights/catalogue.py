"""The versions of a store: which there are, who has leases of them, and which memory they lie in. Pure.

The newest version is the one that became whole last, whatever its number. The newest ``keep`` whole versions
stay, and those that are leased or have a tag. A version that was begun before another one and is still open
when that becomes whole is given up.

Memory is named by numbers. It is used again for later versions, except memory that a worker may still access
of which this one has lost sight: that of a writer or reader that was lost in the middle, or of a reader whose
tensors outlive its lease.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, Final

from farcall.weights.assembly import Assembly, Declared
from farcall.weights.errors import WeightsError
from farcall.weights.layout import Spec
from farcall.weights.versions import Freed, Lease, Version, Who, Writer, check_tag, checked_metadata

__all__ = ["MOST_PARTS", "MOST_TAGS", "Catalogue"]

MOST_PARTS: Final = 1 << 16
"""Maximum number of parts of a version."""

MOST_TAGS: Final = 64
"""Maximum number of tags, each of which may keep a version."""

_MOST_OPEN: Final = 2
"""Maximum number of open versions. A writer that is further ahead of the others waits for them."""

_MOST_SERIALS: Final = 1 << 40
"""More versions than one keeper of a store ever has."""

_MOST_REMOVED: Final = 4096
"""Maximum number of removed versions in the listing that is sent to the second copy."""

_REMEMBERED: Final = 1 << 16
"""Maximum number of versions, and of lost workers, that are remembered after they are gone."""


class Catalogue:
    """The versions of one store. One thread at a time.

    Args:
        name: of the store, for errors.
        keep: number of whole versions that stay.

    Attributes:
        whole: the whole versions that readers can have, by number, the newest last.
        open: the open versions, by number, in the order in which they were begun.
        leases: all leases, and their versions.
        tags: the user's names of whole versions, which stay while they have one, and their numbers.
        after: the serial after which those of this keeper begin.
        given_up: the open versions that have been given up since ``take_given_up``.
    """

    def __init__(self, name: str, keep: int = 2) -> None:
        self.name = name
        self.keep = keep
        self.whole: dict[int, Version] = {}
        self.open: dict[int, Version] = {}
        self.leases: dict[Lease, Version] = {}
        self.tags: dict[str, int] = {}
        self.given_up: list[Version] = []
        self.after = 0
        self._serials = itertools.count(1)
        self._history: dict[int, int] = {}
        self._dead: dict[Who, None] = {}
        self._freed: list[Freed] = []

    # ---- writers

    def begin(
        self,
        number: int,
        part: int,
        parts: int,
        specs: Mapping[str, Spec],
        blocks: Declared,
        who: Who,
        put: int = 0,
    ) -> tuple[Version, list[int]]:
        """Declare a part of a version. Returns the version, and the sizes of memory that is to be added to
        its ``memory`` before the next call. If the version is whole already, it has this very part. ``put``
        tells apart the puts of one worker.

        A version to whose memory a lost worker may still write is given up, and another one begun under its
        number.

        Raises:
            WeightsError: it does not fit to the other parts.
        """
        self._check_alive(who)
        if not (type(part) is type(parts) is int and 0 <= part < parts <= MOST_PARTS):
            raise WeightsError(
                f"there is no part {part!r:.40} of {parts!r:.40}: a version has up to {MOST_PARTS} parts, "
                "numbered from 0 on"
            )
        there = self.whole.get(number) or self.open.get(number)
        if there is not None and there.stuck:
            self._give_up([there])
            there = None
        version = there or Version(number, Assembly(parts))
        try:
            if version.copied:
                version.assembly.check_within(specs, blocks)
                return version, []
            if version.assembly.parts != parts:
                raise WeightsError(f"it has {version.assembly.parts} parts, and not {parts}")
            size = version.assembly.declare(part, specs, blocks)
            sizes = [] if size is None else [size]
        except WeightsError as error:
            raise WeightsError(f"version {number} of store '{self.name}': {error}") from None
        if not version.whole:
            self.open[number] = version
            version.declare(part, Writer(who, put))
        return version, sizes

    def grow(self, version: Version, memory: list[int]) -> None:
        """Add memory to a version, as its last ``begin`` has asked.

        Raises:
            WeightsError: it was given up meanwhile, and the memory is freed.
        """
        version.memory += memory
        if version.ended:
            self._free(version)
            raise WeightsError(f"version {version.number} of store '{self.name}' was given up meanwhile")

    def make_room(self, number: int, who: Who, *, insist: bool) -> bool:
        """Whether another version may be begun now, or more parts of this one: there are few open ones. For
        one that ``who`` begins, those are given up that miss the part of a lost worker, or one that ``who``
        has begun and left; with ``insist``, as many as necessary.
        """
        if number in self.open or number in self.whole:
            return True
        stuck = [
            each
            for each in self.open.values()
            if each.begun_by(who) or any(part.lost for part in each.parts.values())
        ]
        waiting = [each for each in self.open.values() if each not in stuck]
        excess = len(self.open) - _MOST_OPEN + 1
        self._give_up([*stuck, *(waiting if insist else ())][: max(0, excess)])
        return len(self.open) < _MOST_OPEN

    def withdraw(self, version: Version, part: int) -> None:
        """Undo the last ``begin``: there is no memory for its part."""
        version.assembly.withdraw(part, added=True)
        del version.parts[part]
        if not version.parts:
            self._end(self.open.pop(version.number))

    def check_open(self, number: int, part: int, who: Who, put: int = 0) -> Version:
        """Return the open version that a worker writes a part of.

        Raises:
            WeightsError: it was given up, or this put has not begun that part.
        """
        self._check_alive(who)
        version = self.open.get(number)
        if version is None:
            raise WeightsError(
                f"version {number} of store '{self.name}' was given up before part {part} was written, as "
                "another version became whole, another writer was lost, or it was dropped"
            )
        if part not in version.parts or Writer(who, put) not in version.parts[part].writers:
            raise WeightsError(
                f"worker '{who.name}' has not begun part {part} of version {number} of store '{self.name}', "
                "or the version was given up since, as another writer was lost: put this part again"
            )
        return version

    def written(
        self, number: int, part: int, who: Who, metadata: Mapping[str, Any] | None = None, put: int = 0
    ) -> bool:
        """Note that a part has been written; returns whether the version is whole now."""
        version = self.check_open(number, part, who, put)
        version.metadata = checked_metadata({**version.metadata, **(metadata or {})})
        version.parts[part].writers[Writer(who, put)] = True
        return self._complete(version)

    def failed(self, number: int, part: int, who: Who, put: int) -> None:
        """Note that a put has ended with an error: its part has to be put again. One that is not under way is
        ignored.
        """
        version = self.open.get(number)
        there = None if version is None else version.parts.get(part)
        writer = Writer(who, put)
        if there is not None and writer in there.writers:
            there.writers[writer] = None

    def _complete(self, version: Version) -> bool:
        """Make a version whole if all its parts have been written."""
        if version.unwritten():
            return False
        begun = list(self.open.values())
        self._give_up(begun[: begun.index(version)])
        del self.open[version.number]
        version.serial = next(self._serials)
        self.whole[version.number] = version
        self._history[version.number] = version.serial
        if len(self._history) > _REMEMBERED:
            del self._history[next(iter(self._history))]
        self._remove_old()
        return True

    def _remove_old(self) -> None:
        tagged = set(self.tags.values())
        for each in list(self.whole.values())[: -self.keep]:
            if each.number not in tagged:
                self._remove(each)

    # ---- readers

    def tag(self, name: str, number: int | None) -> None:
        """Give a tag to a whole version, which no other one has then; None: to none.

        Raises:
            WeightsError: there is no such version, or there are too many tags.
        """
        check_tag(name)
        if number is None:
            self.tags.pop(name, None)
        elif number not in self.whole:
            raise WeightsError(f"store '{self.name}' has no version {number}: it has {sorted(self.whole)}")
        elif len(self.tags) >= MOST_TAGS and name not in self.tags:
            raise WeightsError(f"store '{self.name}' has {MOST_TAGS} tags already: {sorted(self.tags)}")
        else:
            self.tags[name] = number
        self._remove_old()

    def find(
        self, number: int | str | None, newer_than: int | None, serial: int | None = None
    ) -> Version | None:
        """Return the version with a number or a tag, or the newest if it is newer than another; None if it is
        not there yet. ``serial``: that of the other one, if it is known: several may have had its number.

        Raises:
            WeightsError: the version was there, and is not kept any more.
        """
        if isinstance(number, str):
            return self.whole[self.tags[number]] if number in self.tags else None
        if number is not None:
            found = self.whole.get(number)
            if found is None and number not in self.open and number in self._history:
                raise WeightsError(
                    f"store '{self.name}' has version {number} no longer: it keeps the newest {self.keep}, "
                    f"which are {sorted(self.whole)}"
                )
            return found
        newest = next(reversed(self.whole.values()), None)
        if newest is None or newer_than is None:
            return newest
        if serial is None:
            serial = self._history.get(newer_than)
        is_newer = newest.number > newer_than if serial is None else newest.serial > serial
        return newest if is_newer else None

    def removed(self) -> list[list[int]]:
        """Return numbers and serials of the last versions that there were, and are not any more."""
        last = itertools.islice(reversed(self._history.items()), _MOST_REMOVED)
        return [[*each] for each in last if each[0] not in self.whole][::-1]

    def by_serial(self, serial: int) -> Version | None:
        """Return a version that readers can have, or have a lease of, by its place in the order."""
        return next((version for version in self.there() if version.serial == serial), None)

    def there(self) -> list[Version]:
        """Return the versions that readers can have, or have leases of."""
        return [*self.whole.values(), *self.leases.values()]

    def lease(self, version: Version, lease: Lease) -> None:
        """Keep a version until ``release``. A lease that its holder has already is for this version then."""
        self._check_alive(lease.holder)
        self.release(lease, used=False)
        version.leases.add(lease)
        self.leases[lease] = version

    def leased(self, lease: Lease) -> Version:
        """Return the version of a lease; ``WeightsError`` if it has ended."""
        version = self.leases.get(lease)
        if version is None:
            raise WeightsError(f"a lease of worker '{lease.holder.name}' of store '{self.name}' has ended")
        return version

    def release(self, lease: Lease, *, used: bool) -> None:
        """End a lease; ``used``: whether its holder still uses the memory. One that has ended is ignored."""
        version = self.leases.pop(lease, None)
        if version is not None:
            version.leases.discard(lease)
            version.tainted |= used
            self._end_if_unused(version)

    # ---- the end of versions and workers

    def take_over(
        self,
        name: str,
        keep: int,
        versions: Iterable[tuple[int, int, Mapping[str, Any]]],
        tags: Mapping[str, int],
        after: int = 0,
        removed: Iterable[tuple[int, int]] = (),
    ) -> None:
        """Be the catalogue of a store of which this had copies, under their serials as numbers.

        Args:
            name: of the store.
            keep: number of whole versions that stay.
            versions: number, serial and metadata of those of the store; others go. Later versions have larger
                serials than any that the store can have had.
            tags: the store's tags.
            after: the store's ``after``.
            removed: see ``removed``.
        """
        self._give_up(list(self.open.values()))
        self.name, self.keep = name, keep
        listed = {serial: (number, metadata) for number, serial, metadata in versions}
        last = {number: serial for serial, (number, _) in sorted(listed.items()) if serial in self.whole}
        kept = set(last.values())
        for serial, version in list(self.whole.items()):
            if serial not in kept:  # it is not listed, or another one was put later under its number
                self._remove(version)
        there = sorted(self.whole.values(), key=lambda version: version.number)
        for version in there:
            version.serial, version.copied = version.number, True
            version.number, metadata = listed[version.serial]
            version.metadata = dict(metadata)
        self.whole = {version.number: version for version in there}
        self.tags = {tag: number for tag, number in tags.items() if number in self.whole}
        self._history = dict(removed)
        for number, _ in listed.values():
            self._history.pop(number, None)  # if it is not here, it may be put again
        self._history |= {version.number: version.serial for version in there}
        self.after = (max([after, *listed]) // _MOST_SERIALS + 1) * _MOST_SERIALS
        self._serials = itertools.count(self.after + 1)
        self._remove_old()

    def drop(self, number: int) -> None:
        """Remove a version; its memory is freed once no one has a lease of it.

        Raises:
            WeightsError: there is none.
        """
        version = self.whole.get(number)
        if version is not None:
            self._remove(version)
            return
        version = self.open.get(number)
        if version is None:
            raise WeightsError(f"store '{self.name}' has no version {number}: it has {sorted(self.whole)}")
        self._give_up([version])

    def lost(self, who: Who, *, lives: bool = True) -> list[Version]:
        """Note that a worker is lost: its leases end. Returns the open versions that miss its part now.
        ``lives``: whether it may still use memory that it knows.
        """
        self._dead[who] = None
        if len(self._dead) > _REMEMBERED:
            del self._dead[next(iter(self._dead))]
        for lease in [lease for lease in self.leases if lease.holder == who]:
            self.release(lease, used=lives)
        return [version for version in self.open.values() if version.lose(who, lives=lives)]

    def take_given_up(self) -> list[Version]:
        """Return the open versions that have been given up since the last call."""
        given_up, self.given_up = self.given_up, []
        return given_up

    def freed(self) -> list[Freed]:
        """Return the memory that has been freed since the last call."""
        freed, self._freed = self._freed, []
        return freed

    def has_lost(self, who: Who) -> bool:
        """Whether a worker was lost."""
        return who in self._dead

    def _check_alive(self, who: Who) -> None:
        if self.has_lost(who):
            raise WeightsError(f"worker '{who.name}' was lost: what it had of store '{self.name}' is gone")

    def _give_up(self, versions: list[Version]) -> None:
        for version in versions:
            del self.open[version.number]
            version.tainted = True  # its writers may still write
            self._end(version)
        self.given_up += versions

    def _remove(self, version: Version) -> None:
        del self.whole[version.number]
        self.tags = {name: number for name, number in self.tags.items() if number != version.number}
        self._end_if_unused(version)

    def _end_if_unused(self, version: Version) -> None:
        # an open one has leases while it is relayed: whether these end or not, its writers need its memory
        there = self.whole.get(version.number), self.open.get(version.number)
        if not version.leases and version not in there:
            self._end(version)

    def _end(self, version: Version) -> None:
        version.ended = True
        self._free(version)

    def _free(self, version: Version) -> None:
        self._freed += [Freed(memory, not version.tainted) for memory in version.memory]
        version.memory = []
