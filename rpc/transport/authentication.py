"""Authentication: a process belongs to the job if it has the job's token. HMAC-SHA256 throughout, no I/O.

*Connections.* ``TokenAuthenticator`` is used in the handshake: each side proves that it has the token, over
all previous messages. The acceptor's challenge and the dialler's proof each contain a nonce, so a proof is
valid for one connection only; each names its role, so none can be reflected; and the hello that it covers
names both workers, so none is valid between two others.

*Tickets.* Transports that have a place for a ticket present one before there is a connection for a handshake:
a nonce, and a proof over it. An eavesdropper can replay it, but only gets as far as the handshake.

*Records.* The records that workers write to the store are sealed under the name of their key: a process that
can write to the store but does not have the token can delete or repeat records, which at worst keeps a group
from forming, but cannot forge any.

Each use has a key of its own, derived from the token. The token itself is never sent.
"""

from __future__ import annotations

import hmac
import secrets
from enum import Enum
from typing import Any, Final

__all__ = ["ForeignRecordError", "Role", "Seal", "TokenAuthenticator"]

_NONCE_BYTES: Final = 32
_MAC_BYTES: Final = 32
_SEALED: Final = b"sealed:"


def _derive(token: bytes, use: str) -> bytes:
    return hmac.digest(token, f"farcall 1 {use}".encode(), "sha256")


class Role(Enum):
    """The two sides of a connection: the one that connects, and the one that listens."""

    DIALLER = "dialler"
    ACCEPTOR = "acceptor"


class TokenAuthenticator:
    """Proves to the other side that this worker belongs to the job, and verifies the other side's proof: both
    have the same token.

    Headers are maps that msgpack can encode. ``said`` is a digest of all messages before the proof. A proof
    includes its author's role, so that it cannot be reflected.

    Args:
        token: token of the job.
    """

    def __init__(self, token: bytes) -> None:
        self._key = _derive(token, "handshake")
        self._ticket_key = _derive(token, "ticket")

    def ticket(self) -> str:
        """Return a ticket that is valid for this job, in printable ASCII, each time another one."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return (nonce + hmac.digest(self._ticket_key, nonce, "sha256")).hex()

    def is_ticket(self, text: str) -> bool:
        """Whether a worker of this job has issued the ticket."""
        try:
            ticket = bytes.fromhex(text)
        except ValueError:
            return False
        nonce, mac = ticket[:_NONCE_BYTES], ticket[_NONCE_BYTES:]
        return hmac.compare_digest(mac, hmac.digest(self._ticket_key, nonce, "sha256"))

    def challenge(self) -> dict[str, Any]:
        """At the acceptor: return the header of CHALLENGE, different each time."""
        return {"nonce": secrets.token_bytes(_NONCE_BYTES)}

    def prove(self, role: Role, said: bytes) -> dict[str, Any]:
        """Return the header of PROOF, for a dialler, or of WELCOME; different each time."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return {"nonce": nonce, "mac": self._mac(role, said, nonce)}

    def verify(self, role: Role, said: bytes, proof: dict[str, Any]) -> bool:
        """Whether ``proof`` is what ``prove`` returns at a worker of this job in this role."""
        match proof:
            case {"nonce": bytes(nonce), "mac": bytes(mac)}:
                return hmac.compare_digest(mac, self._mac(role, said, nonce))
        return False

    def _mac(self, role: Role, said: bytes, nonce: bytes) -> bytes:
        return hmac.digest(self._key, b"%b\0%b%b" % (role.value.encode(), said, nonce), "sha256")


class ForeignRecordError(ValueError):
    """A record is not sealed with this job's token. ``claimed`` is its content, which proves nothing."""

    def __init__(self, claimed: bytes) -> None:
        super().__init__("a record is not sealed with this job's token")
        self.claimed = claimed


class Seal:
    """Seals records by the key under which they are stored.

    Args:
        token: token of the job; None: nothing is sealed, and records that others have sealed are rejected.
    """

    def __init__(self, token: bytes | None = None) -> None:
        self._key = None if token is None else _derive(token, "store")

    def close(self, name: str, value: bytes) -> bytes:
        """Return the value to be stored under ``name``; the same each time."""
        return value if self._key is None else _SEALED + self._mac(name, value) + value

    def open(self, name: str, sealed: bytes) -> bytes:
        """Return the value of a sealed record; raises ``ForeignRecordError`` unless ``close`` made it for
        ``name``.
        """
        is_sealed = sealed.startswith(_SEALED)
        value = sealed[len(_SEALED) + _MAC_BYTES :] if is_sealed else sealed
        if self._key is None and not is_sealed:
            return value
        mac = sealed[len(_SEALED) : len(_SEALED) + _MAC_BYTES]
        if self._key is None or not is_sealed or not hmac.compare_digest(mac, self._mac(name, value)):
            raise ForeignRecordError(value)
        return value

    def _mac(self, name: str, value: bytes) -> bytes:
        assert self._key is not None
        return hmac.digest(self._key, name.encode() + b"\0" + value, "sha256")
