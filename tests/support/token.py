"""An authenticator for tests: whoever knows the job's token belongs to it."""

from __future__ import annotations

import hmac
import secrets
from typing import Any

from rpc.group.handshake import Role


class Token:
    def __init__(self, token: bytes) -> None:
        self._token = token

    def challenge(self) -> dict[str, Any]:
        return {"nonce": secrets.token_bytes(16)}

    def prove(self, role: Role, said: bytes) -> dict[str, Any]:
        return {"mac": self._mac(role, said), "nonce": secrets.token_bytes(16)}

    def verify(self, role: Role, said: bytes, proof: dict[str, Any]) -> bool:
        return hmac.compare_digest(proof["mac"], self._mac(role, said))

    def _mac(self, role: Role, said: bytes) -> bytes:
        return hmac.digest(self._token, role.value.encode() + said, "sha256")
