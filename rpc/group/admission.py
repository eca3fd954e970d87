"""Admission: whether to accept a hello. Pure.

There is one connection per pair of workers. When two workers connect to each other at the same moment, the
attempt of the one with the smaller incarnation counts: that worker refuses the other's as *crossed*, and the
other abandons its own attempt when it sees the hello of the first.
"""

from __future__ import annotations

from typing import Final

from rpc.errors import RpcError
from rpc.group.handshake import Hello, Refusal
from rpc.group.membership import Membership

__all__ = ["CROSSED", "GONE", "MISTAKEN", "STRANGER", "judge"]

CROSSED: Final = "crossed"
STRANGER: Final = "stranger"
GONE: Final = "gone"
MISTAKEN: Final = "mistaken"


def judge(hello: Hello, view: Membership, group: str, *, connected: bool, connecting: bool) -> Refusal | None:
    """Decide about a hello: None to accept it, else the refusal, which contains nothing that helps an
    intruder.

    Args:
        view: this worker's membership; in a dynamic group, a newcomer joins it here.
        group: the group that this worker belongs to.
        connected: whether there is a connection to that worker already.
        connecting: whether this worker is connecting to that worker now.
    """
    me, other = view.me, hello.member
    sides = f"worker '{other.name}' asked worker '{me.name}' (id {me.id})"
    if hello.group != group:
        theirs = repr(hello.group)[:200]
        reason = f"{sides} in the name of another group ({theirs})"
        return Refusal(STRANGER, reason, f"this worker's is '{group}'")
    if hello.wanted != me.incarnation:
        reason = f"{sides}, but wanted incarnation {hello.wanted:x}, which is no longer at this address"
        return Refusal(MISTAKEN, reason, f"this is {me.incarnation:x}")
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
