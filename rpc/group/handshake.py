"""What two workers say to each other before the first call, and who is let in: no I/O.

The side that connects sends *hello*: who it is, whom it wants (by incarnation, so that a message for a
worker that has since been replaced is refused) and the group that it belongs to. The other side answers
*welcome* or *refused*; a refusal names both sides and why.

There is one connection per pair. When two workers connect to each other at the same moment, the attempt
of the one with the smaller incarnation counts: it refuses the other's as *crossed*, and the other, when it
sees the smaller one's hello, lets its own attempt go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from rpc.errors import ProtocolError, RpcError
from rpc.group.membership import Membership
from rpc.group.workers import Member

__all__ = ["CROSSED", "Hello", "Refusal", "judge", "legible", "parse_refusal"]

CROSSED: Final = "crossed"
STRANGER: Final = "stranger"
GONE: Final = "gone"
MISTAKEN: Final = "mistaken"

_LONGEST_TEXT: Final = 1000


@dataclass(frozen=True, slots=True)
class Hello:
    """The first thing that the connecting side says."""

    member: Member
    wanted: int
    group: str

    def header(self) -> dict[str, Any]:
        return {"member": self.member.to_wire(), "wanted": self.wanted, "group": self.group}

    @classmethod
    def parse(cls, header: dict[str, Any]) -> Hello:
        """Raises ``ProtocolError`` if this is no hello."""
        try:
            member, wanted, group = Member.from_wire(header["member"]), header["wanted"], header["group"]
        except (KeyError, TypeError, ValueError) as error:
            said = str(error)[:300]
            raise ProtocolError(f"a malformed hello: {type(error).__name__}: {said}") from error
        if not isinstance(wanted, int) or not isinstance(group, str):
            raise ProtocolError("a malformed hello: wrong types")
        return cls(member, wanted, group)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a hello is not accepted; ``code`` is for the program, ``reason`` for people."""

    code: str
    reason: str

    def header(self) -> dict[str, Any]:
        return {"code": self.code, "reason": self.reason}


def parse_refusal(header: dict[str, Any]) -> Refusal:
    """The refusal that a peer sent; tolerant, since it is only shown."""
    return Refusal(str(header.get("code", "")), legible(header.get("reason", "no reason given")))


def legible(text: object) -> str:
    """What another process says, made fit for logs and errors: of one line, and not too long."""
    shown = str(text)[:_LONGEST_TEXT]
    return shown if shown.isprintable() else repr(shown)


def judge(hello: Hello, view: Membership, group: str, *, connected: bool, connecting: bool) -> Refusal | None:
    """Decide about a hello.

    Args:
        hello: what the other side said.
        view: this worker's membership; in a dynamic group a newcomer joins it here.
        group: the group that this worker belongs to.
        connected: there is a connection to that worker already.
        connecting: this worker is trying to connect to that worker right now.

    Returns:
        None to welcome it, else the refusal.
    """
    me, other = view.me, hello.member
    sides = f"worker '{other.name}' asked worker '{me.name}' (id {me.id}, incarnation {me.incarnation:x})"
    if hello.group != group:
        theirs = repr(hello.group)[:200]
        return Refusal(
            STRANGER, f"{sides} in the name of another group ({theirs}; this worker's is '{group}')"
        )
    if hello.wanted != me.incarnation:
        return Refusal(
            MISTAKEN, f"{sides}, but wanted incarnation {hello.wanted:x}, which is no longer at this address"
        )
    if other.incarnation == me.incarnation:
        return Refusal(STRANGER, f"{sides}, but claims to be that very worker")
    gone = view.gone_reason(other.incarnation)
    if gone is not None:
        return Refusal(GONE, f"{sides}, which has given it up ({gone})")
    known = view.find(other.incarnation)
    if known is None:
        if view.static:
            return Refusal(STRANGER, f"{sides}, but is not among the workers that formed the group")
        try:
            view.join(other)
        except RpcError as error:
            return Refusal(STRANGER, f"{sides}, but {error}")
    elif known != other:
        return Refusal(STRANGER, f"{sides}, but describes itself otherwise than it did to the group")
    if connected:
        return Refusal(CROSSED, f"{sides}, but they are connected already")
    if connecting and me.incarnation < other.incarnation:
        return Refusal(CROSSED, f"{sides}, which is just connecting to it")
    return None
