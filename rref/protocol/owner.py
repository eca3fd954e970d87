"""The owner's half of the reference protocol: the state of each object, and its forks.

The rules (R1 to R6) are explained at the head of ``machine``.

An object at its owner
======================

    state      is                          event         becomes    and then
    ---------  --------------------------  ------------  ---------  -------------------------------------
    UNKNOWN    not (or no more) known      own           OWNED
                                           await         AWAITED
                                           arrived       CREATING   run
                                           referred      PARKED     or refused at once [1]
                                           abandoned     BURIED
    PARKED     known by hearsay            arrived       CREATING   run; all confirmed and accepted
                                           unused        UNKNOWN
                                           abandoned     BURIED     all refused and accepted
                                           creator lost  UNKNOWN    all refused and accepted
                                           denied        UNKNOWN    all refused and accepted
                                           swept         UNKNOWN    all refused and accepted
    AWAITED    its creation is on its way  arrived       CREATING   run
               from this worker to itself  abandoned     BURIED     all refused, Free
    CREATING   its creation runs           finished      OWNED      unused if it has no fork
                                           abandoned     CANCELLED  all refused
    OWNED      here                        unused        UNKNOWN    Free
                                           abandoned     BURIED     all refused, Free
    CANCELLED  given up; creation runs     finished      BURIED     Free
    BURIED     given up: a tombstone       creator lost  UNKNOWN
                                           swept         UNKNOWN

An event without a row changes nothing: a second creation is not run. *Referred*: by "confirm", ``adopt`` or
``expect``; confirmed or accepted at once if the object is here, refused if it is given up. *Unused*: the last
fork is gone; a local reference of the owner is a fork, too.

[1] if the creator is this worker or is dead: the object existed before, or never will.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from rpc.errors import ProtocolError, RRefError
from rref.protocol.fence import Fences
from rref.protocol.messages import (
    CREATOR_LOST,
    Confirmed,
    Descriptor,
    Failed,
    ForkId,
    Free,
    Peer,
    Ref,
    RRefId,
    State,
)
from rref.protocol.peers import Peers

__all__ = ["TRANSITIONS", "ObjectEvent", "ObjectState", "Owner"]


class ObjectState(IntEnum):
    """State of an object at its owner."""

    __hash__ = int.__hash__  # an enum's own is slow, and the tables are looked up often

    UNKNOWN = 1
    PARKED = 2
    AWAITED = 3
    CREATING = 4
    OWNED = 5
    CANCELLED = 6
    BURIED = 7


class ObjectEvent(IntEnum):
    """Event of an object at its owner."""

    __hash__ = int.__hash__

    OWN = 1  # an existing value gets its first reference
    AWAIT = 2  # this worker sends a creation to itself
    ARRIVED = 3  # the creation has arrived
    REFERRED = 4  # one more fork: of another worker, or a local one
    UNUSED = 5  # the last fork is gone
    FINISHED = 6  # the creation has been run
    ABANDONED = 7  # the creator gave it up
    CREATOR_LOST = 8  # nothing more comes from the creator
    DENIED = 9  # the creator does not know it
    SWEPT = 10  # two sweeps have found it waiting for a late message


_S, _E = ObjectState, ObjectEvent

TRANSITIONS: Final[dict[ObjectState, dict[ObjectEvent, ObjectState]]] = {
    _S.UNKNOWN: {
        _E.OWN: _S.OWNED,
        _E.AWAIT: _S.AWAITED,
        _E.ARRIVED: _S.CREATING,
        _E.REFERRED: _S.PARKED,
        _E.ABANDONED: _S.BURIED,
    },
    _S.PARKED: {
        _E.ARRIVED: _S.CREATING,
        _E.ABANDONED: _S.BURIED,
        **dict.fromkeys((_E.UNUSED, _E.CREATOR_LOST, _E.DENIED, _E.SWEPT), _S.UNKNOWN),
    },
    _S.AWAITED: {_E.ARRIVED: _S.CREATING, _E.ABANDONED: _S.BURIED},
    _S.CREATING: {_E.FINISHED: _S.OWNED, _E.ABANDONED: _S.CANCELLED},
    _S.OWNED: {_E.UNUSED: _S.UNKNOWN, _E.ABANDONED: _S.BURIED},
    _S.CANCELLED: {_E.FINISHED: _S.BURIED},
    _S.BURIED: {_E.CREATOR_LOST: _S.UNKNOWN, _E.SWEPT: _S.UNKNOWN},
}
"""Events that are not listed for a state change nothing."""

_HERE: Final = (_S.AWAITED, _S.CREATING, _S.OWNED, _S.CANCELLED)  # the shell has an entry for it, until Free
_LATE: Final = (_S.PARKED, _S.BURIED)  # waits for a message that may never come
_GIVEN_UP: Final = (_S.CANCELLED, _S.BURIED)


class _Object:
    """One object, and the user of each of its forks. A local reference is a fork whose user is this
    worker.
    """

    __slots__ = ("accept", "forks", "reason", "rref", "state")

    def __init__(self, rref: RRefId) -> None:
        self.rref = rref
        self.state = ObjectState.UNKNOWN
        self.forks: dict[ForkId, Peer] = {}
        self.accept: dict[ForkId, Peer] | None = None  # if parked: local forks, and whom to send "accepted"
        self.reason = ""  # why it was given up


class Owner:
    """All objects that this worker owns, or that other workers say it owns."""

    __slots__ = ("_broken", "_late", "_local", "_objects", "_peers", "fences")

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self.fences = Fences(peers, self._drop_forks_of)
        self._objects: dict[RRefId, _Object] = {}  # all that are not UNKNOWN
        self._late: dict[RRefId, bool] = {}  # those in a state of _LATE: whether a sweep has seen it
        self._local: dict[Ref, RRefId] = {}  # local references
        self._broken: dict[Ref, str] = {}  # local references to objects that were given up, and why

    def __contains__(self, ref: Ref) -> bool:
        return ref in self._local or ref in self._broken

    # Creating references

    def own(self, rref: RRefId) -> None:
        """Register an existing value; its first local reference has the object's id."""
        self._begin(rref, ObjectEvent.OWN, rref)

    def create(self, rref: RRefId, fork: ForkId) -> None:
        """Register a creation that this worker sends to itself."""
        self._begin(rref, ObjectEvent.AWAIT, fork)

    def _begin(self, rref: RRefId, event: ObjectEvent, fork: ForkId) -> None:
        created = _Object(rref)
        created.forks[fork] = self._peers.me
        self._local[fork] = rref
        self._step(created, event)

    def arrived(self, rref: RRefId, fork: ForkId, creator: Peer) -> bool:
        """Handle a creation that was received; returns whether to run it."""
        if rref[0] != creator:
            raise ProtocolError(f"worker {creator} sent a creation in another's name: {rref}")
        created = self._objects.get(rref) or _Object(rref)
        before, mine = created.state, creator == self._peers.me
        if ObjectEvent.ARRIVED not in TRANSITIONS[before] or (mine and before is not ObjectState.AWAITED):
            return False
        if before is ObjectState.PARKED:
            self._confirm_parked(created)
        if not mine:
            created.forks[fork] = creator
        self._step(created, ObjectEvent.ARRIVED)
        return True

    def _confirm_parked(self, created: _Object) -> None:
        for fork, user in created.forks.items():
            if user != self._peers.me:
                self._peers.send(user, ["confirmed", fork])
            elif fork in self._local:
                self._peers.actions.append(Confirmed(fork))
        self._accept(created)

    def finished(self, rref: RRefId) -> None:
        """Record that the creation has been run."""
        created = self._objects.get(rref)
        if created is not None:
            self._step(created, ObjectEvent.FINISHED)
            self._leave_if_unused(created)

    def adopt(self, rref: RRefId, fork: ForkId, sender: Peer | None, why_not: str | None = None) -> None:
        """Add a local reference: from a message, or, if ``sender`` is None, for the shell."""
        me = self._peers.me
        if fork in self:
            raise ProtocolError(f"fork {fork} of reference {rref} came twice")
        if why_not is None:
            why_not = self._why_not(rref, fork, me)
        if why_not is not None:
            self._broken[fork] = why_not
        else:
            if sender is not None:
                self._peers.note_hearsay(sender, rref not in self._objects)
            self._local[fork] = rref
            referred = self._refer(rref)
            referred.forks[fork] = me
            if referred.state is ObjectState.PARKED and sender is not None and sender != me:
                if referred.accept is None:
                    referred.accept = {}
                referred.accept[fork] = sender
                return
        if sender is not None and sender != me:
            self._peers.send(sender, ["accepted", fork])

    # Passing on

    def fork(self, ref: Ref, to: Peer, fork: ForkId) -> Descriptor:
        """Return a fork for ``to``, which is counted from now on."""
        if ref in self._broken:
            raise RRefError(f"this reference cannot be sent: {self._broken[ref]}")
        rref = self._local[ref]
        if to not in self._peers.dead:
            self._objects[rref].forks[fork] = to
        return self._peers.me, rref, fork

    def take_back(self, rref: RRefId, fork: ForkId) -> None:
        """Record that the fork was never sent."""
        self._drop(rref, fork)

    # Ends

    def release(self, ref: Ref) -> None:
        """Release one local reference."""
        if self._broken.pop(ref, None) is None:
            self._drop(self._local.pop(ref), ref)

    def lost(self, peer: Peer, reason: str) -> None:
        """Record that ``peer`` is dead: nothing more comes from it, and its forks wait for the fence."""
        self.creator_lost(peer, reason)
        self.fences.lost(peer, any(peer in each.forks.values() for each in self._objects.values()))

    def creator_lost(self, creator: Peer, reason: str) -> None:
        """Record that no more creations come from ``creator``."""
        for rref in [rref for rref in self._late if rref[0] == creator]:
            self._give_up(self._objects[rref], ObjectEvent.CREATOR_LOST, _creator_lost(reason))

    def sweep(self) -> None:
        """Give up the objects that were already waiting at the last sweep."""
        for rref, seen in list(self._late.items()):
            if seen:
                late = "its creation did not arrive in time"
                self._give_up(self._objects[rref], ObjectEvent.SWEPT, late)
            else:
                self._late[rref] = True

    def abandon(self, rref: RRefId, reason: str) -> None:
        """Give up an object for its creator: every reference to it fails, and a late creation is not run."""
        if rref in self._objects or rref[0] != self._peers.me:  # otherwise this worker has freed it already
            self._peers.note_hearsay(rref[0], rref not in self._objects)
            self._give_up(self._objects.get(rref) or _Object(rref), ObjectEvent.ABANDONED, reason)

    # Messages

    def on_confirm(self, peer: Peer, rref: RRefId, fork: ForkId) -> None:
        """``peer`` received a fork from another user and asks to have it counted."""
        reason = self._why_not(rref, fork, peer)
        if reason is not None:
            self._peers.send(peer, ["refused", fork, reason])
            return
        self._peers.note_hearsay(peer, rref not in self._objects)
        referred = self._refer(rref)
        referred.forks[fork] = peer
        if referred.state is not ObjectState.PARKED:
            self._peers.send(peer, ["confirmed", fork])

    def on_delete(self, peer: Peer, rref: RRefId, fork: ForkId) -> None:
        """``peer`` has deleted a fork."""
        referred = self._objects.get(rref)
        if referred is not None and referred.forks.get(fork) == peer:
            self._drop(rref, fork)

    def on_abandon(self, peer: Peer, rref: RRefId, reason: str) -> None:
        """``peer``, the creator, gives the object up."""
        if rref[0] != peer:
            raise ProtocolError(f"worker {peer} abandoned what another created: {rref}")
        self.abandon(rref, reason)

    def on_unknown(self, peer: Peer, rref: RRefId) -> None:
        """``peer``, the creator, has no such creation under way: if there was one, it has arrived by now."""
        parked = self._objects.get(rref)
        if rref[0] == peer and parked is not None and parked.state is ObjectState.PARKED:
            self._give_up(parked, ObjectEvent.DENIED, "its creator knows nothing of it")

    # Queries

    def state(self, ref: Ref) -> State | None:
        """Return the state of ``ref``, or None if there is no such reference. From any thread."""
        rref = self._local.get(ref)
        referred = None if rref is None else self._objects.get(rref)
        if referred is None:
            return State.FAILED if ref in self._broken else None
        return State.PENDING if referred.state is ObjectState.PARKED else State.CONFIRMED

    def reason(self, ref: Ref) -> str:
        """Return why ``ref`` failed, or an empty string. From any thread."""
        return self._broken.get(ref, "")

    @property
    def waits_for_sweep(self) -> bool:
        """Whether anything waits for a message that may never come."""
        return bool(self._late)

    def leaks(self) -> dict[RRefId, tuple[int, int]]:
        """Return, for each object, its number of forks at other workers and of references on this one."""
        me, found = self._peers.me, {}
        for rref, each in self._objects.items():
            if each.state in _HERE:
                native = list(each.forks.values()).count(me)
                found[rref] = (len(each.forks) - native, native)
        return found

    def holders(self, limit: int) -> list[tuple[RRefId, ObjectState, dict[Peer, int]]]:
        """Objects, their states, and how many forks each worker has, this one included. From any thread.

        Args:
            limit: maximum number of objects; the newest.
        """
        found: list[tuple[RRefId, ObjectState, dict[Peer, int]]] = []
        for each in list(self._objects.values())[-limit:]:
            if each.state in _HERE:
                forks: dict[Peer, int] = {}
                for user in list(each.forks.values()):
                    forks[user] = forks.get(user, 0) + 1
                found.append((each.rref, each.state, forks))
        return found

    def counts(self) -> dict[str, int]:
        """Return the number of entries by kind."""
        states = [each.state for each in self._objects.values()]
        leaks = self.leaks()
        shared = [foreign for foreign, _ in leaks.values() if foreign]
        return {
            "owned": len(leaks),
            "shared": len(shared),
            "forks": sum(shared),
            "local": len(self._local) + len(self._broken),
            "parked": states.count(ObjectState.PARKED),
            "tombstones": states.count(ObjectState.BURIED),
            "fences": len(self.fences),
        }

    # The machine

    def _step(self, each: _Object, event: ObjectEvent) -> None:
        before = each.state
        each.state = after = TRANSITIONS[before].get(event, before)
        if after is before:
            return
        if before is ObjectState.UNKNOWN:
            self._objects[each.rref] = each
        elif after is ObjectState.UNKNOWN:
            del self._objects[each.rref]
        if before in _LATE:
            del self._late[each.rref]
        if after in _LATE:
            self._late[each.rref] = False
        if before in _HERE and after not in _HERE:
            self._peers.actions.append(Free(each.rref))

    def _give_up(self, each: _Object, event: ObjectEvent, reason: str) -> None:
        """Refuse the forks of an object that no longer exists, or never will."""
        forks, each.forks = each.forks, {}
        for fork, user in forks.items():
            if user != self._peers.me:
                self._peers.send(user, ["refused", fork, reason])
            elif fork in self._local:
                self._broken[fork] = reason  # before it leaves the other table: ``state`` always finds it
                del self._local[fork]
                self._peers.actions.append(Failed(fork, reason))
        self._accept(each)
        if each.state not in _GIVEN_UP:
            each.reason = reason
        self._step(each, event)

    def _why_not(self, rref: RRefId, fork: ForkId, user: Peer) -> str | None:
        """Return why ``fork`` cannot be counted for ``user``; None if it can, as soon as the object is here.

        A fork belongs to one worker. If two claim it, this worker cannot tell which is wrong, and accuses
        neither.
        """
        known, creator = self._objects.get(rref), rref[0]
        if known is not None:
            if known.state in _GIVEN_UP:
                return known.reason
            return (
                None if known.forks.get(fork, user) == user else "its sender gave it to another worker, too"
            )
        if creator == self._peers.me:
            return "its owner has freed it already"
        return _creator_lost(self._peers.dead[creator]) if creator in self._peers.dead else None

    def _refer(self, rref: RRefId) -> _Object:
        """Return the object, which is parked if it was unknown; its creator is asked then."""
        referred = self._objects.get(rref)
        if referred is None:
            referred = _Object(rref)
            self._peers.send(rref[0], ["wanted", rref])  # also finds out whether the creator lives
        self._step(referred, ObjectEvent.REFERRED)
        return referred

    def _drop(self, rref: RRefId, fork: ForkId) -> None:
        referred = self._objects.get(rref)
        if referred is None:
            return
        referred.forks.pop(fork, None)
        sender = referred.accept.pop(fork, None) if referred.accept else None
        if sender is not None:
            self._peers.send(sender, ["accepted", fork])
        self._leave_if_unused(referred)

    def _leave_if_unused(self, each: _Object) -> None:
        if not each.forks:
            self._step(each, ObjectEvent.UNUSED)

    def _accept(self, each: _Object) -> None:
        for fork, sender in (each.accept or {}).items():
            self._peers.send(sender, ["accepted", fork])
        each.accept = None

    def _drop_forks_of(self, dead: set[Peer]) -> None:
        for each in list(self._objects.values()):
            left = {fork: user for fork, user in each.forks.items() if user not in dead}
            if len(left) < len(each.forks):
                each.forks = left
                self._leave_if_unused(each)


def _creator_lost(reason: str) -> str:
    return f"{CREATOR_LOST}: {reason}"
