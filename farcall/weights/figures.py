"""What a store says of itself: ``Store.usage()``, and what ``farcall ps``, the page and the metrics show."""

from __future__ import annotations

from time import monotonic
from typing import Any, Final

from farcall.weights.catalogue import Catalogue

__all__ = ["Figures"]

_MOST_READERS: Final = 4096
"""Maximum number of readers whose last version is noted."""

_MOST_SHOWN: Final = 64
"""Maximum number of versions, and of workers that have one, in a worker's state file."""


class Figures:
    """What a store has sent and received, and who has read what. One thread at a time.

    Attributes:
        sent, received: bytes that went to and came from other hosts.
        saved: bytes that did not go, as only differences did.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._readers: dict[str, int] = {}
        """For each worker, by name, the serial of the version that it has read last."""
        self.sent = self.received = self.saved = 0

    def has_read(self, reader: str, serial: int) -> None:
        """Note that a worker has read a version."""
        self._readers[reader] = serial
        if len(self._readers) > _MOST_READERS:
            del self._readers[next(iter(self._readers))]

    def usage(self, size: int, copies: int) -> dict[str, Any]:
        """Return what ``Store.usage()`` returns, with the size of all memory and the number of copies."""
        catalogue = self._catalogue
        numbers = {each.serial: each.number for each in catalogue.whole.values()}
        return {
            "versions": list(catalogue.whole),
            "open": {number: version.missing() for number, version in catalogue.open.items()},
            "tags": dict(catalogue.tags),
            "keep": catalogue.keep,
            "bytes": size,
            "leases": len(catalogue.leases),
            "holders": sorted({lease.holder.name for lease in catalogue.leases}),
            "copies": copies,
            "sent_bytes": self.sent,
            "received_bytes": self.received,
            "saved_bytes": self.saved,
            "ages": {number: monotonic() - each.since for number, each in catalogue.whole.items()},
            "readers": {name: numbers[last] for name, last in self._readers.items() if last in numbers},
        }

    def observed(self, size: int, copies: int) -> dict[str, Any]:
        """Return what the observer shows."""
        catalogue = self._catalogue
        return {
            "name": catalogue.name,
            "copies": copies,
            "versions": [
                {
                    "number": each.number,
                    "since": each.since,
                    "bytes": each.assembly.layout.bytes,
                    "tags": [name for name, number in catalogue.tags.items() if number == each.number],
                    "leases": sorted({lease.holder.name for lease in each.leases})[:_MOST_SHOWN],
                    "readers": sorted(name for name, last in self._readers.items() if last == each.serial)[
                        :_MOST_SHOWN
                    ],
                }
                for each in list(catalogue.whole.values())[-_MOST_SHOWN:]
            ],
            "open": {str(number): version.missing() for number, version in catalogue.open.items()},
            "bytes": size,
            "sent": self.sent,
            "received": self.received,
            "saved": self.saved,
        }
