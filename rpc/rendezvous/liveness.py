"""Whether the worker that left a record in the store still lives: does anyone answer where it listened?"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from rpc.group.workers import Member
from rpc.rendezvous.address import host_identity

__all__ = ["Probe", "dead_among", "probe"]

Probe = Callable[[Member], bool | None]
"""Tells whether a member lives: True, False, or None if that cannot be told from here."""

_TIMEOUT_SECONDS = 1.0
_PARALLEL = 16


def probe(member: Member) -> bool | None:
    """Connect to where a member listens and hang up.

    Its kernel accepts the connection, however busy the process is, and refuses it once the process is
    gone. Unix addresses are random and used once, so on one host the answer is exact; a TCP port can have
    passed to another process.
    """
    here = member.host == host_identity()
    answer: bool | None = None
    for address in member.addresses:
        scheme, _, rest = address.partition(":")
        if scheme == "unix" and here and rest.startswith("@"):
            return _answers(socket.AF_UNIX, b"\0" + rest[1:].encode())
        if scheme == "tcp":
            host, _, port = rest.rpartition(":")
            host = host.removeprefix("[").removesuffix("]")
            try:
                family, _, _, _, where = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
            except (OSError, ValueError):
                continue
            answer = _answers(family, where)
            if answer is not None:
                return answer
    return answer


def _answers(family: int, where: object) -> bool | None:
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(_TIMEOUT_SECONDS)
        try:
            connection.connect(where)  # type: ignore[arg-type]
        except ConnectionRefusedError:
            return False
        except OSError:
            return None
        return True


def dead_among(members: Iterable[Member], tell: Probe) -> set[int]:
    """Incarnations of those members that are certainly dead, several asked at a time."""
    asked = list(members)
    if len(asked) < 2:
        return {member.incarnation for member in asked if tell(member) is False}
    with ThreadPoolExecutor(min(_PARALLEL, len(asked)), "rpc-probe") as pool:
        answers = zip(asked, pool.map(tell, asked), strict=True)
        return {member.incarnation for member, alive in answers if alive is False}
