"""Whether a store's job has a static or a dynamic group: never both at a time, each after the other.

The mode is one key. It is changed by compare-and-set, and only when nobody of the other kind lives.
"""

from __future__ import annotations

import secrets

from rpc.errors import GroupMismatchError
from rpc.rendezvous.arrival_log import ArrivalLog
from rpc.rendezvous.liveness import Probe
from rpc.rendezvous.roster import Roster
from rpc.rendezvous.store import SharedStore

__all__ = ["enter_dynamic", "enter_static", "is_dynamic"]

_STATIC = b"static"


def enter_static(store: SharedStore, tell: Probe) -> None:
    """The job has a static group from now on.

    Raises:
        GroupMismatchError: a dynamic group lives.
    """
    roster = Roster(store)
    before = store.swap("mode", b"", _STATIC)
    while before != _STATIC:
        if roster.any_alive(tell):
            raise _mixed("a dynamic group lives in the same store and job")
        found = store.swap("mode", before, _STATIC)
        if found == _STATIC:
            if roster.any_alive(tell):  # joined between the look and the change
                store.swap("mode", _STATIC, before)
                raise _mixed("a worker has just started a dynamic group in the same store and job")
            return
        before = found


def enter_dynamic(store: SharedStore, tell: Probe) -> str:
    """The job has a dynamic group from now on; returns a text that names the group.

    Raises:
        GroupMismatchError: a worker of a static group lives.
    """
    mine = b"dynamic-" + secrets.token_hex(8).encode()
    found = store.swap("mode", b"", mine)
    while found == _STATIC:
        alive = [member.name for member in ArrivalLog(store, 0).formed() if tell(member)]
        if alive:
            raise _mixed(f"a static group lives in the same store and job: {', '.join(alive)}")
        found = store.swap("mode", _STATIC, mine)
    return found.decode()


def is_dynamic(store: SharedStore) -> bool:
    """Whether the job has a dynamic group just now."""
    return store.get("mode") != _STATIC


def _mixed(why: str) -> GroupMismatchError:
    return GroupMismatchError(
        f"RPC group mixes statically and dynamically initialized members which is not supported. "
        f"Here {why}. Pass the same world_size to all workers or to none, or give the groups different "
        f"jobs (FARCALL_JOB)."
    )
