"""The page that two workers share beside their segments: a proof that they do, and what has been returned.

It holds a nonce, which the sender of segments put there, and one word for each of its segments, which only
the receiver writes: the number of the use that is over. So giving a segment back is a store into memory; it
may be done in a finalizer, on any thread, and costs no message. The sender looks when it needs a segment.

A word is eight bytes and aligned, so it is never seen half written; and whoever drops the last reference to a
tensor has finished with its memory before, in the order that all processors keep for reference counts.
"""

from __future__ import annotations

import ctypes
import secrets
from typing import Final

from rpc.bulk.shared_memory.memory import Mapping

__all__ = ["LEDGER_BYTES", "REFUSED", "RETIRED", "SLOTS", "Ledger"]

LEDGER_BYTES: Final = 4096
_NONCE_BYTES: Final = 32
_WORDS_AT: Final = 64

SLOTS: Final = (LEDGER_BYTES - _WORDS_AT) // 8
"""How many segments a ledger has words for."""

RETIRED: Final = (1 << 64) - 1
"""Instead of the number of a use: the receiver keeps this segment for good; it must not be written again."""

REFUSED: Final = (1 << 64) - 2
"""Instead of the number of a use: the receiver could not map this segment."""


class Ledger:
    """A mapped ledger.

    Attributes:
        words: by slot, the number of the use that was returned last, or one of the marks above.
    """

    __slots__ = ("_mapping", "words")

    def __init__(self, mapping: Mapping) -> None:
        self._mapping = mapping
        self.words = (ctypes.c_uint64 * SLOTS).from_address(mapping.address + _WORDS_AT)

    def write_nonce(self) -> None:
        """Put in a new nonce, which nobody can know who does not share this memory."""
        ctypes.memmove(self._mapping.address, secrets.token_bytes(_NONCE_BYTES), _NONCE_BYTES)

    def nonce(self) -> bytes:
        """The nonce that is in it."""
        return ctypes.string_at(self._mapping.address, _NONCE_BYTES)
