"""The user's half of the reference protocol: forks of objects that other workers own.

The rules (R1 to R6) are explained at the head of ``machine``.

A user's fork
=============

    state        held    is                         event           becomes     and then
    -----------  ------  -------------------------  --------------  ----------  ---------------------------
    PENDING      yes     not answered by the owner  held once more  PENDING
                                                    dropped         ORPHANED
                                                    granted         CONFIRMED   accepted to sender, Confirmed
                                                    failed          FAILED      accepted to sender, Failed
    ORPHANED     no      not answered by the owner  held once more  PENDING
                                                    granted         LINGERING   accepted to sender
                                                    failed          GONE        accepted to sender
    CONFIRMED    yes     counted by the owner       held once more  CONFIRMED
                                                    dropped         LINGERING
                                                    failed          FAILED      Failed
    LINGERING    no      counted, has children      held once more  CONFIRMED
                                                    childless       GONE        delete to owner
                                                    failed          GONE
    FAILED       yes     of no use                  held once more  FAILED
                                                    dropped         GONE        abandon to owner [1]
    GONE                 not remembered

*Granted*: the owner's "confirmed", or its answer to the creation. *Failed*: the owner's "refused", its death,
or a failed creation; the children are released then. *Held once more*: another fork joins it (R3). A fork
enters as PENDING when created or received, as CONFIRMED when received from the owner (R1).

[1] if its creation failed here: the owner may have the object, or receive it later.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Final, NamedTuple

from rpc.errors import ProtocolError, RRefError
from rref.protocol.fence import FenceAnswers
from rref.protocol.messages import Confirmed, Descriptor, Failed, ForkId, Peer, Ref, RRefId, State
from rref.protocol.peers import Peers

__all__ = ["TRANSITIONS", "Event", "Users"]


class Event(IntEnum):
    """Event of a user's fork."""

    __hash__ = int.__hash__

    HELD = 1
    """One more local reference shares it."""
    DROPPED = 2
    """Its last local reference is released."""
    GRANTED = 3
    """The owner counts it."""
    FAILED = 4
    """The owner refuses it, is lost, or the creation failed."""
    CHILDLESS = 5
    """Its last child is gone (or it has none)."""


TRANSITIONS: Final[dict[State, dict[Event, State]]] = {
    State.PENDING: {
        Event.HELD: State.PENDING,
        Event.DROPPED: State.ORPHANED,
        Event.GRANTED: State.CONFIRMED,
        Event.FAILED: State.FAILED,
    },
    State.ORPHANED: {
        Event.HELD: State.PENDING,
        Event.GRANTED: State.LINGERING,
        Event.FAILED: State.GONE,
    },
    State.CONFIRMED: {
        Event.HELD: State.CONFIRMED,
        Event.DROPPED: State.LINGERING,
        Event.FAILED: State.FAILED,
    },
    State.LINGERING: {
        Event.HELD: State.CONFIRMED,
        Event.CHILDLESS: State.GONE,  # only here is the owner asked to delete it
        Event.FAILED: State.GONE,
    },
    State.FAILED: {
        Event.HELD: State.FAILED,
        Event.DROPPED: State.GONE,
    },
}

_UNANSWERED: Final = (State.PENDING, State.ORPHANED)


class _Fork:
    """One fork held by this worker, and the local references that share it."""

    __slots__ = ("abandons", "children", "fork", "held", "owner", "reason", "rref", "sender", "state")

    def __init__(self, owner: Peer, rref: RRefId, fork: ForkId, sender: Peer | None, state: State) -> None:
        self.owner = owner
        self.rref = rref
        self.fork = fork
        self.sender = sender  # to be sent "accepted"; None for a creation or a fork from the owner
        self.state = state
        self.held = 1
        self.children: set[ForkId] | None = None
        self.reason = ""
        self.abandons = False


class _Child(NamedTuple):
    parent: _Fork
    to: Peer


class Users:
    """All forks that this worker holds of other workers' objects, and their children."""

    __slots__ = ("_children", "_created", "_forks", "_peers", "_refs", "_shared", "answers")

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self.answers = FenceAnswers(peers, self._unsettled)
        self._forks: dict[ForkId, _Fork] = {}
        self._refs: dict[Ref, _Fork] = {}
        self._shared: dict[RRefId, _Fork] = {}  # a confirmed fork of each object, which others can join
        self._children: dict[ForkId, _Child] = {}
        self._created: set[RRefId] = set()  # objects of the forks that were created here

    def __contains__(self, ref: Ref) -> bool:
        return ref in self._refs

    # Creating references

    def create(self, owner: Peer, rref: RRefId, fork: ForkId) -> None:
        """Add the fork of a creation."""
        if owner in self._peers.dead:
            self._add_failed((owner, rref, fork), self._peers.dead[owner])
        else:
            self._add(owner, rref, fork, None, State.PENDING)
            self._created.add(rref)

    def created(self, owner: Peer, rref: RRefId, fork: ForkId) -> None:
        """Record that the owner answered the creation."""
        user = self._forks.get(fork)
        if user is None:
            # An answer after the timeout: the owner may have kept the object after all.
            self._peers.send(owner, ["delete", rref, fork])
        elif user.state in _UNANSWERED:
            self._grant(user)

    def creation_failed(self, fork: ForkId, reason: str) -> None:
        """Record that the creation will not be answered, or was not answered in time."""
        user = self._forks.get(fork)
        if user is not None and user.state in _UNANSWERED:
            user.abandons = True
            self._fail(user, reason)

    def adopt(self, descriptor: Descriptor, sender: Peer, why_not: str | None) -> None:
        """Add a fork from a message; ``why_not`` is the reason why it must not be taken, if any."""
        owner, rref, fork = descriptor
        if fork in self._forks or fork in self._refs:
            raise ProtocolError(f"fork {fork} of reference {rref} came twice")
        if sender == self._peers.me:
            self._adopt_own(descriptor)
            return
        if why_not is None:
            why_not = self._peers.dead.get(owner)
        if why_not is not None:
            self._add_failed(descriptor, why_not)
            if sender != owner:
                self._peers.send(sender, ["accepted", fork])
        elif sender == owner:
            self._share(self._add(owner, rref, fork, None, State.CONFIRMED))  # counted when it was forked
        elif rref in self._shared:
            self._hold(self._shared[rref], fork)
            self._peers.send(sender, ["accepted", fork])
        else:
            self._add(owner, rref, fork, sender, State.PENDING)
            self._peers.send(owner, ["confirm", rref, fork])

    def _adopt_own(self, descriptor: Descriptor) -> None:
        """Add a fork from a message to this worker itself: it shares the fork that it came from."""
        child = self._children.get(descriptor[2])
        if child is None:
            self._add_failed(descriptor, "the reference failed before this message was read")
        else:
            self._hold(child.parent, descriptor[2])
            self._clear(descriptor[2])

    # Passing on

    def fork(self, ref: Ref, to: Peer, fork: ForkId) -> Descriptor:
        """Return a child of ``ref`` for ``to``."""
        user = self._refs[ref]
        if user.state is State.FAILED:
            raise RRefError(f"this reference cannot be sent: {user.reason}")
        if to not in self._peers.dead:
            self._children[fork] = _Child(user, to)
            if user.children is None:
                user.children = set()
            user.children.add(fork)
        return user.owner, user.rref, fork

    def take_back(self, fork: ForkId) -> None:
        """Record that the child was never sent."""
        self._clear(fork)

    # Ends

    def release(self, ref: Ref) -> None:
        """Release one local reference."""
        user = self._refs.pop(ref)
        user.held -= 1
        if not user.held:
            self._step(user, Event.DROPPED)

    def release_all(self) -> None:
        """Release all local references."""
        for ref in list(self._refs):
            self.release(ref)

    def lost(self, peer: Peer, reason: str) -> None:
        """Record that ``peer`` is dead: its objects are lost, and forks sent to it wait for the fence."""
        for user in [user for user in self._forks.values() if user.owner == peer]:
            self._fail(user, reason)
        for owner in {child.parent.owner for child in self._children.values() if child.to == peer}:
            self._peers.send(owner, ["bereaved", peer])
        self.answers.lost(peer)

    # Messages

    def on_confirmed(self, peer: Peer, fork: ForkId) -> None:
        """The owner counts the fork."""
        user = self._forks.get(fork)
        if user is not None and user.owner == peer and user.state in _UNANSWERED:
            self._grant(user)

    def on_refused(self, peer: Peer, fork: ForkId, reason: str) -> bool:
        """The owner does not count the fork (any longer); returns false if it is not known here."""
        user = self._forks.get(fork)
        if user is not None and user.owner == peer:
            self._fail(user, reason)
        return user is not None

    def on_wanted(self, peer: Peer, rref: RRefId) -> None:
        """The owner asks for a creation by this worker: while its fork exists, it is under way or done."""
        if rref not in self._created:
            self._peers.send(peer, ["unknown", rref])

    def on_accepted(self, peer: Peer, fork: ForkId) -> None:
        """The child at ``peer`` no longer needs its parent."""
        child = self._children.get(fork)
        if child is not None and child.to == peer:
            self._clear(fork)

    def on_cleared(self, peer: Peer, dead: Peer) -> None:
        """No fork from ``dead`` is unsettled anywhere: children that were there need no parent."""
        for fork, (parent, to) in list(self._children.items()):
            if to == dead and parent.owner == peer:
                self._clear(fork)

    # Queries

    def state(self, ref: Ref) -> State | None:
        """Return the state of ``ref``, or None if there is no such reference. From any thread."""
        user = self._refs.get(ref)
        return None if user is None else user.state

    def reason(self, ref: Ref) -> str:
        """Return why ``ref`` failed, or an empty string. From any thread."""
        user = self._refs.get(ref)
        return "" if user is None else user.reason

    def counts(self) -> dict[str, int]:
        """Return the number of entries by kind."""
        return {
            "users": len(self._forks),
            "pending_users": sum(user.state in _UNANSWERED for user in self._forks.values()),
            "children": len(self._children),
            "fence_answers": len(self.answers),
        }

    # The machine

    def _add(self, owner: Peer, rref: RRefId, fork: ForkId, sender: Peer | None, state: State) -> _Fork:
        user = _Fork(owner, rref, fork, sender, state)
        self._forks[fork] = self._refs[fork] = user
        return user

    def _add_failed(self, descriptor: Descriptor, reason: str) -> None:
        self._add(*descriptor, None, State.FAILED).reason = reason

    def _share(self, user: _Fork) -> None:
        self._shared.setdefault(user.rref, user)

    def _hold(self, user: _Fork, ref: Ref) -> None:
        self._refs[ref] = user
        user.held += 1
        self._step(user, Event.HELD)

    def _grant(self, user: _Fork) -> None:
        self._share(user)
        if self._step(user, Event.GRANTED) is State.CONFIRMED:
            self._peers.actions.extend(map(Confirmed, self._refs_of(user)))

    def _fail(self, user: _Fork, reason: str) -> None:
        if user.state is State.FAILED:
            return
        user.reason = reason
        if self._step(user, Event.FAILED) is State.FAILED:
            self._peers.actions.extend(Failed(ref, reason) for ref in self._refs_of(user))
            self._unshare(user)
        for fork in user.children or ():
            del self._children[fork]
        user.children = None

    def _step(self, user: _Fork, event: Event) -> State:
        before = user.state
        user.state = TRANSITIONS[before][event]
        if before in _UNANSWERED and (event is Event.GRANTED or event is Event.FAILED):
            self._settled(user)
        self._leave_if_done(user)
        return user.state

    def _leave_if_done(self, user: _Fork) -> None:
        if user.state is State.LINGERING and not user.children:
            self._peers.send(user.owner, ["delete", user.rref, user.fork])
            user.state = TRANSITIONS[State.LINGERING][Event.CHILDLESS]
        if user.state is State.GONE:
            if user.abandons:
                self._peers.send(user.owner, ["abandon", user.rref, user.reason])
            del self._forks[user.fork]
            if user.sender is None:
                self._created.discard(user.rref)
            self._unshare(user)

    def _settled(self, user: _Fork) -> None:
        if user.sender is not None:
            self._peers.send(user.sender, ["accepted", user.fork])
            self.answers.settled(user.owner, user.sender, user.fork)

    def _unshare(self, user: _Fork) -> None:
        if self._shared.get(user.rref) is user:
            del self._shared[user.rref]

    def _clear(self, fork: ForkId) -> None:
        child = self._children.pop(fork, None)
        if child is not None and child.parent.children is not None:
            child.parent.children.discard(fork)
            self._leave_if_done(child.parent)

    def _refs_of(self, user: _Fork) -> Iterable[Ref]:
        if user.held == 1 and self._refs.get(user.fork) is user:
            return (user.fork,)
        return [ref for ref, held in self._refs.items() if held is user]

    def _unsettled(self, owner: Peer, sender: Peer) -> set[ForkId]:
        return {
            fork
            for fork, user in self._forks.items()
            if user.owner == owner and user.sender == sender and user.state in _UNANSWERED
        }
