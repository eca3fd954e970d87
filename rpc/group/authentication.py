"""Who belongs to the job: whoever has its token. HMAC-SHA256 throughout, no I/O.

*Connections.* ``TokenAuthenticator`` is the handshake's: each side proves that it has the token, over all
that was said before. The acceptor's challenge and the dialler's proof each bring a nonce, so no proof is good
for another connection; each names its role, so none can be given back as one's own; and the hello that it
covers names both workers, so none is good between two others.

*Tickets.* Transports that have a place for it show one before there is a connection to shake hands over: a
nonce, and a proof over it. Who has listened can show it again, and gets as far as the handshake.

*Records.* What workers leave in the store is sealed under the name of its key: whoever writes to the store
without the token can delete or repeat records, which at worst keeps a group from forming, but make none.

Each use has a key of its own, derived from the token, which itself goes nowhere.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Any, Final

from rpc.group.handshake import Role

__all__ = ["ForeignRecordError", "Seal", "TokenAuthenticator"]

_NONCE_BYTES: Final = 32
_MAC_BYTES: Final = 32
_SEALED: Final = b"sealed:"


def _derive(token: bytes, use: str) -> bytes:
    return hmac.digest(token, f"farcall 1 {use}".encode(), "sha256")


class TokenAuthenticator:
    """An ``Authenticator``: both sides have the same token.

    Args:
        token: the job's.
    """

    def __init__(self, token: bytes) -> None:
        self._key = _derive(token, "handshake")
        self._ticket_key = _derive(token, "ticket")

    def ticket(self) -> str:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return (nonce + hmac.digest(self._ticket_key, nonce, "sha256")).hex()

    def is_ticket(self, text: str) -> bool:
        try:
            ticket = bytes.fromhex(text)
        except ValueError:
            return False
        nonce, mac = ticket[:_NONCE_BYTES], ticket[_NONCE_BYTES:]
        return hmac.compare_digest(mac, hmac.digest(self._ticket_key, nonce, "sha256"))

    def challenge(self) -> dict[str, Any]:
        return {"nonce": secrets.token_bytes(_NONCE_BYTES)}

    def prove(self, role: Role, said: bytes) -> dict[str, Any]:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return {"nonce": nonce, "mac": self._mac(role, said, nonce)}

    def verify(self, role: Role, said: bytes, proof: dict[str, Any]) -> bool:
        match proof:
            case {"nonce": bytes(nonce), "mac": bytes(mac)}:
                return hmac.compare_digest(mac, self._mac(role, said, nonce))
        return False

    def _mac(self, role: Role, said: bytes, nonce: bytes) -> bytes:
        return hmac.digest(self._key, b"%b\0%b%b" % (role.value.encode(), said, nonce), "sha256")


class ForeignRecordError(ValueError):
    """A record is not sealed with this job's token. ``claimed`` is what it says, which proves nothing."""

    def __init__(self, claimed: bytes) -> None:
        super().__init__("a record is not sealed with this job's token")
        self.claimed = claimed


class Seal:
    """Seals records by the key that they are under.

    Args:
        token: the job's; None: nothing is sealed, and what others have sealed is not taken for anything.
    """

    def __init__(self, token: bytes | None = None) -> None:
        self._key = None if token is None else _derive(token, "store")

    def close(self, name: str, value: bytes) -> bytes:
        """The value as it goes to the store under ``name``; the same each time."""
        return value if self._key is None else _SEALED + self._mac(name, value) + value

    def open(self, name: str, sealed: bytes) -> bytes:
        """The reverse; raises ``ForeignRecordError`` unless it was closed with this token, under ``name``."""
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
