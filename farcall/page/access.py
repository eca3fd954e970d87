"""Which requests the page's server answers. Pure.

Everybody on this host can connect to a port of the loopback interface, and so can any web site that a browser
here shows. So each request must carry the token, and must come from the page itself:

- Data needs the header ``Authorization: Bearer TOKEN``. The page keeps the token in the session storage of
  the browser's tab, which belongs to one port: a cookie would go to every port of 127.0.0.1, also to a server
  of another user.
- The files of the page, which hold no data, take the token in the address that ``farcall page`` prints, or a
  cookie that is derived from the token and opens nothing else.
- ``Host`` must name loopback and the port: a site whose name resolves to 127.0.0.1 (DNS rebinding) does not.
  ``Origin`` and ``Sec-Fetch-Site``, where a browser sends them, must be the page's own; only a link to the
  page may come from elsewhere, such as a terminal in the browser, and then it must hold the token.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["Access", "Refusal"]

MAX_TARGET: Final = 1024
"""Maximum length of a request's target, in characters."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is refused: an HTTP status, and a sentence for people."""

    status: int
    why: str


class Access:
    """Decides about requests to one server.

    Args:
        token: the token.
        port: the port that the server listens on.
    """

    def __init__(self, token: str, port: int) -> None:
        self._token = token.encode()
        self._port = port
        names = ("127.0.0.1", "localhost")
        hosts = {f"{name}:{port}" for name in names}
        self._hosts = frozenset(hosts.union(names) if port == 80 else hosts)
        """Values of ``Host``. Clients leave port 80 out: it is the default."""

    @property
    def cookie_name(self) -> str:
        """Name of the cookie that opens the page's files."""
        return f"farcall_page_{self._port}"

    @property
    def cookie(self) -> str:
        """Value of that cookie."""
        return hmac.new(self._token, b"the files of the page", hashlib.sha256).hexdigest()

    def refuse(self, method: str, target: str, headers: Mapping[str, str]) -> Refusal | None:
        """Why no request of this kind is answered, whoever sends it; None if it may go on.

        Args:
            method: the HTTP method.
            target: path and query.
            headers: the headers; names are looked up without regard to case.
        """
        if headers.get("Host", "").lower() not in self._hosts:
            return Refusal(403, "this is not the address that `farcall page` has printed")
        origin = headers.get("Origin")
        if origin is not None and origin.lower() not in {f"http://{host}" for host in self._hosts}:
            return Refusal(403, "requests of other sites are refused")
        is_link = headers.get("Sec-Fetch-Mode") == "navigate" and target.partition("?")[0] == "/"
        if headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin") and not is_link:
            return Refusal(403, "requests of other sites are refused")
        if method != "GET":
            return Refusal(405, "the page is only read: GET")
        if len(target) > MAX_TARGET:
            return Refusal(414, f"an address has at most {MAX_TARGET} characters here")
        if headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in headers:
            return Refusal(413, "requests have no body here")
        return None

    def opens_files(self, token: str | None, cookie: str | None) -> bool:
        """Whether the token of an address, or a cookie, opens the page's files."""
        if token is not None:
            return self._is(token, self._token)
        return cookie is not None and self._is(cookie, self.cookie.encode())

    def opens_data(self, authorization: str | None) -> bool:
        """Whether the value of the header ``Authorization`` opens the data."""
        scheme, _, token = (authorization or "").partition(" ")
        return scheme.lower() == "bearer" and self._is(token.strip(), self._token)

    @staticmethod
    def _is(given: str, wanted: bytes) -> bool:
        # Bytes of a header that are not UTF-8 are lone surrogates in its text.
        packed = given.encode(errors="surrogateescape")
        return hmac.compare_digest(hashlib.sha256(packed).digest(), hashlib.sha256(wanted).digest())
