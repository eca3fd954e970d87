"""The weight stores of a job: what their keepers have written into the states of their workers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from farcall.observe.reading.state import JobState, items, mappings, whole

__all__ = ["KeptVersion", "WeightStore", "lines_of", "stores_of"]

_MOST_READERS = 8


@dataclass(frozen=True, slots=True)
class KeptVersion:
    """A whole version.

    Attributes:
        age: seconds since it became whole.
        leases: the workers that have leases of it.
        readers: the workers that have read it last.
    """

    number: int
    age: float
    bytes: int
    tags: list[str]
    leases: list[str]
    readers: list[str]


@dataclass(frozen=True, slots=True)
class WeightStore:
    """A weight store, or the copy that a host has of one.

    Attributes:
        worker: the worker that keeps it, by name.
        copy: whether it is a host's copy.
        copies: number of workers that have all its versions.
        versions: the whole versions, the newest last; of a copy, none.
        open: for each other version, which parts are missing.
        bytes: size of all its memory.
        sent, received: bytes that went to other hosts, and came from them.
        saved: bytes that did not go, as only differences did.
    """

    name: str
    worker: str
    copy: bool
    copies: int
    versions: list[KeptVersion]
    open: dict[str, str]
    bytes: int
    sent: int
    received: int
    saved: int

    def to_json(self) -> dict[str, Any]:
        """Return it as values for JSON."""
        versions = [{name: getattr(each, name) for name in each.__slots__} for each in self.versions]
        return {name: getattr(self, name) for name in self.__slots__} | {"versions": versions}


def stores_of(job: JobState) -> Iterator[WeightStore]:
    """Return the weight stores of a job, and the copies of its hosts."""
    for worker in job:
        for each in mappings(worker.snapshot.get("weights")):
            yield WeightStore(
                str(each.get("name")),
                worker.name,
                each.get("copy") is True,
                whole(each.get("copies"), 1),
                [
                    KeptVersion(
                        whole(version.get("number")),
                        round(worker.age(version.get("since")), 1),
                        whole(version.get("bytes")),
                        _texts(version.get("tags")),
                        _texts(version.get("leases")),
                        _texts(version.get("readers")),
                    )
                    for version in mappings(each.get("versions"))
                ],
                _named(each.get("open")),
                whole(each.get("bytes")),
                whole(each.get("sent")),
                whole(each.get("received")),
                whole(each.get("saved")),
            )


def lines_of(job: JobState) -> Iterator[str]:
    """Describe the weight stores of a job, a line for each and for each version."""
    for store in stores_of(job):
        what = "a host's copy of weight store" if store.copy else "weight store"
        saved = f", {_size(store.saved)} saved by differences" if store.saved else ""
        second = ", a second copy" if store.copies > 1 else ""
        sent = f", {_size(store.sent)} sent" if store.sent else ""
        yield f"{what} '{store.name}' on {store.worker}: {_size(store.bytes)} of memory{second}{sent}{saved}"
        for each in store.versions:
            tags = f" ({', '.join(each.tags)})" if each.tags else ""
            shown = ", ".join(each.readers[:_MOST_READERS]) + (", ..." * (len(each.readers) > _MOST_READERS))
            read = f", read by {shown}" if each.readers else ""
            leased = f", leased by {', '.join(each.leases[:_MOST_READERS])}" if each.leases else ""
            yield f"  version {each.number}{tags}: {each.age:.0f} s old, {_size(each.bytes)}{read}{leased}"
        for name, missing in store.open.items():
            yield f"  version {name}: {missing}"


def _texts(value: object) -> list[str]:
    return [str(each) for each in items(value)]


def _named(value: object) -> dict[str, str]:
    return {str(name): str(each) for name, each in value.items()} if isinstance(value, Mapping) else {}


def _size(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.1f} MiB"
