"""Who may hold a reference to an object on another worker, and when the object is freed.

A pure state machine: it does no I/O, starts no thread, reads no clock, has no globals. This file has the
theory, and the face that a shell uses; ``user``, ``owner``, ``fence`` and ``revoked`` have the rules at work,
``messages`` and ``peers`` the words.

Theory of operation
===================

Each object has one *owner*, the worker it lives on. Every other worker that refers to it is a *user*. The
owner keeps the set of *forks* of each object: one per user's reference, with the user's incarnation. When
the set is empty the object is freed. So all depends on the set never missing a fork that is still of use.

A reference is passed on by forking it: the sender makes a new fork id and puts it into the message as a
*descriptor* (owner, object, fork). The descriptor can arrive late, the sender can drop its own reference
or die meanwhile; and to the owner, what a third worker says of the new fork and what the sender says of
the old one come in any order. Hence these rules; each worker keeps its own part of them.

R1  The owner counts a fork that it sends itself before the message leaves.
R2  A user that sends a fork holds its own fork, the *parent*, until the receiver says that the *child*
    needs it no longer ("accepted"), however small the delete and large the message, and whatever becomes
    of the call that the message was. Only a message that surely was not sent, or was lost with a connection
    (a large one), gives it back at once.
R3  The receiver has the owner count the child ("confirm"), and says "accepted" to the parent when it is
    counted, or refused. If it has a counted fork of the same object, the child joins that one at once. The
    owner itself accepts at once; a message to oneself needs no words.
R4  A fork is deleted when no local reference is left, *and* the owner has answered for it, *and* it has
    no children. Only then is the owner told ("delete"). So no delete can overtake what it depends on.
R5  What a creation brings may be known before the creation arrives: the owner parks it until then, until
    the creator is lost, or until a sweep finds it twice. It asks the creator ("wanted"), whose death is
    noticed then, and which says so if it has no such creation under way ("unknown"). If it fails for the
    creator (it timed out, could not be sent), that says so when it drops its reference ("abandon"): every
    other one fails, and a tombstone keeps the creation from being run should it come late. If it comes after
    the tombstone is swept away, the owner's answer comes too late at the creator, which deletes it then.
R6  A lost worker is lost for ever, and to everyone. Its forks, and the children that were on their way to
    it or pending there, are dropped by a *fence* only: see ``fence``. References to objects that it
    owned fail; creations that it had on the way are given up.

Why it is safe. Take any fork that a living worker holds, or will yet read, and go from it to its parent,
and so on. A child that is not counted has its parent held (R2, R3); a parent that is held is counted, or
its own parent is held in turn (R4). The first of the line is counted (R1), or is the fork of a creation,
whose delete waits for the creation (R4). If a worker in the line is dead, nothing of it or of what held it
is dropped before the fence has found every fork beyond it counted, refused, or thrown away unread (R6).

Why it is live. Each "confirm" is answered (at the latest by a sweep), so each child is accepted, so each
parent is free to go; each fence ends, as those it waits for answer or die and join it. So all forks go.

What happens to a user's fork stands at the head of ``user``, what happens to an object at its owner at the
head of ``owner``, both as the tables that run.

The messages must be delivered exactly once between any two that live, in any order: sessions do this, also
where connections break. Calls, creations and answers go their own way, and may be late; large ones may be
lost with their connection, and their senders learn of it.

How a shell uses it
===================

One ``Protocol`` for the process, used by one thread at a time but where said; no method waits or calls
out. After each input, or a few, take the actions and do them: ``Send``, ``Confirmed``, ``Failed``,
``Free``, ``Fence``. A local reference (``Ref``) is what a Python object stands for: each is released once.

* ``peer_joined`` comes before anything else of a member, which is announced to all before it takes part.
  ``peer_lost`` comes once the link to a dead one is closed and its unread frames are thrown away: on finding
  it dead, or on ``Fence``. Workers that leave in order are lost as well.
* ``remote()`` is ``create``, then exactly one of ``created`` (any answer, late ones too) and
  ``creation_failed``. At the owner, ``arrived`` when the call is read: it is run if true, then ``finished``.
* A reference is sent: ``fork``; ``take_back`` if the message was never written, or was lost with its
  connection.
* A message is read: ``adopt`` each descriptor, whether or not the pickle will be read. User code waits while
  ``state`` is ``PENDING``. A fetch that may be earlier than the creation waits by what ``expect`` gives.
* While ``waits_for_sweep``: ``sweep`` every minute or so; what two of them see is given up.
* Shutdown, with no call under way: ``release_all``, then wait until ``counts()["users"]`` is 0 and the
  deletes are acknowledged everywhere; ``leaks`` says what is left at the owners.
"""

from __future__ import annotations

from typing import Final

from rpc.errors import ProtocolError, RRefError
from rref.protocol.messages import (
    Action,
    Descriptor,
    ForkId,
    Peer,
    Ref,
    RRefId,
    State,
    parse,
    parse_descriptor,
)
from rref.protocol.owner import ObjectState, Owner
from rref.protocol.peers import Peers
from rref.protocol.revoked import Revoked
from rref.protocol.user import Users

__all__ = ["Protocol"]


class Protocol:
    """The reference protocol of one worker; see the head of this file.

    Not thread-safe: one thread uses it, or all that do hold one lock.

    Args:
        me: this worker's incarnation.

    Example::

        owner, user = Protocol(1), Protocol(2)
        rref, ref = user.create(owner=1)             # goes out with the call
        assert owner.arrived(rref, ref, creator=2)   # the call is run ...
        owner.finished(rref)                         # ... and its value kept
        user.created(1, rref, ref)                   # the call's answer
        user.release(ref)
        _, delete = user.take_actions()              # Confirmed(ref), Send(1, ["delete", rref, ref])
        owner.receive(2, delete.message)
        assert owner.take_actions() == [Free(rref)]
    """

    __slots__ = ("_owner", "_peers", "_revoked", "_users", "actions", "me")

    def __init__(self, me: Peer) -> None:
        self.me: Final = me
        self._peers = Peers(me)
        self.actions: Final = self._peers.actions
        """What the shell has still to do, for ``take_actions``."""
        self._owner = Owner(self._peers)
        self._users = Users(self._peers)
        self._revoked = Revoked()

    def take_actions(self) -> list[Action]:
        """What the shell is to do, in order; each is given once."""
        actions = self.actions.copy()
        self.actions.clear()
        return actions

    def receive(self, peer: Peer, message: object) -> None:
        """A control message of ``peer``, delivered exactly once. One of a dead peer is ignored.

        Raises:
            ProtocolError: it is malformed, or not for ``peer`` to say.
        """
        if self._is_dead(peer):
            return
        owner, users = self._owner, self._users
        match parse(message):
            case "delete", (rref, fork):
                owner.on_delete(peer, rref, fork)
            case "accepted", (fork,):
                users.on_accepted(peer, fork)
            case "confirm", (rref, fork):
                owner.on_confirm(peer, rref, fork)
            case "confirmed", (fork,):
                users.on_confirmed(peer, fork)
            case "refused", (fork, reason):
                self._refused(peer, fork, reason)
            case "wanted", (rref,):
                users.on_wanted(peer, rref)
            case "unknown", (rref,):
                owner.on_unknown(peer, rref)
            case "abandon", (rref, reason):
                owner.on_abandon(peer, rref, reason)
            case "bereaved" | "fence", (self.me, *_):
                raise ProtocolError("a peer says that this worker is dead")
            case "bereaved", (dead,):
                owner.fences.bereaved(peer, dead)
            case "fence", (dead, reason):
                users.on_fence(peer, dead, reason)
            case "fenced", (dead,):
                owner.fences.answered(peer, dead)
            case "cleared", (dead,):
                users.on_cleared(peer, dead)

    def nobody(self, creator: Peer) -> None:
        """There is no such worker in the group: what it is said to have created will not come."""
        self._owner.creator_lost(creator, "there is no such worker in this group")

    # The group

    def peer_joined(self, peer: Peer) -> None:
        """``peer`` is a member now."""
        if self._peers.joined(peer):
            self._owner.fences.joined(peer)

    def peer_lost(self, peer: Peer, reason: str) -> None:
        """``peer`` is dead, for this ``reason``; its link is closed, and nothing of it comes again."""
        if self._peers.lost(peer, reason):
            self._users.lost(peer, reason)
            self._owner.lost(peer, reason)
            self._revoked.lost(peer)

    # Beginnings

    def new_id(self) -> tuple[int, int]:
        """An id for an object, a fork or a local reference. From any thread."""
        return self._peers.new_id()

    def own(self, rref: RRefId | None = None) -> Ref:
        """An object on this worker, here already; returns its first local reference, also its id."""
        rref = rref or self.new_id()
        self._owner.own(rref)
        return rref

    def create(
        self, owner: Peer, rref: RRefId | None = None, fork: ForkId | None = None
    ) -> tuple[RRefId, Ref]:
        """An object to be created by a call to ``owner`` (this worker, too).

        Returns:
            its id, and its first local reference, which is also the creation's fork id.
        """
        rref, fork = rref or self.new_id(), fork or self.new_id()
        if owner == self.me:
            self._owner.create(rref, fork)
        else:
            self._users.create(owner, rref, fork)
        return rref, fork

    def created(self, owner: Peer, rref: RRefId, fork: ForkId) -> None:
        """``owner`` answered the creation, whatever came of running it; also if nobody waits any more."""
        if owner != self.me:
            self._users.created(owner, rref, fork)

    def creation_failed(self, owner: Peer, rref: RRefId, fork: ForkId, reason: str) -> None:
        """The creation timed out, could not be sent, or was turned away."""
        if owner == self.me:
            self._owner.abandon(rref, reason)
        else:
            self._users.creation_failed(fork, reason)

    def arrived(self, rref: RRefId, fork: ForkId, creator: Peer) -> bool:
        """A creation is here; true if it is to be run. Then ``finished`` follows, once.

        Raises:
            ProtocolError: ``creator`` names an id that is not its own.
        """
        return not self._is_dead(creator) and self._owner.arrived(rref, fork, creator)

    def finished(self, rref: RRefId) -> None:
        """The creation has been run: the value, or the exception in its place, is there."""
        self._owner.finished(rref)

    def expect(self, rref: RRefId, ref: Ref | None = None) -> Ref:
        """A local reference to an object that this worker owns or will own, for a fetch to wait by."""
        ref = ref or self.new_id()
        self._owner.adopt(rref, ref, None)
        return ref

    # Passing on

    def fork(self, ref: Ref, to: Peer, fork: ForkId | None = None) -> Descriptor:
        """A fork of ``ref`` for a message to ``to``: the owner, another, or this worker itself.

        Raises:
            RRefError: ``ref`` has failed, or is none.
        """
        fork = fork or self.new_id()
        if ref in self._users:
            return self._users.fork(ref, to, fork)
        if ref in self._owner:
            return self._owner.fork(ref, to, fork)
        raise RRefError(f"worker {self.me} holds no reference {ref}")

    def take_back(self, descriptor: Descriptor) -> None:
        """The message with this fork was not sent, and never will be."""
        owner, rref, fork = descriptor
        if owner == self.me:
            self._owner.take_back(rref, fork)
        else:
            self._users.take_back(fork)

    def adopt(self, descriptor: object, sender: Peer) -> Ref:
        """A message of ``sender`` brought this fork; returns a new local reference, in any ``state``.

        Raises:
            ProtocolError: malformed, not ``sender``'s to give, or given before.
        """
        owner, rref, fork = parse_descriptor(descriptor)
        if fork[0] != sender:
            raise ProtocolError(f"worker {sender} sent a fork in another's name: {fork}")
        why_not = self._revoked.pop(fork)
        if self._is_dead(sender):
            why_not = self._peers.dead[sender]
        if owner == self.me:
            self._owner.adopt(rref, fork, sender, why_not)
        else:
            self._users.adopt((owner, rref, fork), sender, why_not)
        return fork

    # Ends

    def release(self, ref: Ref) -> None:
        """The last Python object of ``ref`` is gone. Nothing happens if it is released already."""
        if ref in self._users:
            self._users.release(ref)
        elif ref in self._owner:
            self._owner.release(ref)

    def release_all(self) -> None:
        """Release every local reference to others' objects, for a shutdown in order."""
        self._users.release_all()

    def sweep(self) -> None:
        """Give up what was waiting for a late message at the last sweep, and still is."""
        self._owner.sweep()
        self._revoked.sweep()
        self._peers.sweep()

    # What can be asked

    @property
    def waits_for_sweep(self) -> bool:
        """Whether anything waits for a message that may never come."""
        return bool(self._revoked) or self._owner.waits_for_sweep or self._peers.has_hearsay

    def state(self, ref: Ref) -> State:
        """How ``ref``, not yet released, stands. From any thread.

        Raises:
            RRefError: there is no such reference.
        """
        state = self._users.state(ref) or self._owner.state(ref)
        if state is None:
            raise RRefError(f"worker {self.me} holds no reference {ref}")
        return state

    def reason(self, ref: Ref) -> str:
        """Why ``ref``, not yet released, has failed; empty if it has not. From any thread."""
        return self._users.reason(ref) or self._owner.reason(ref)

    def leaks(self) -> dict[RRefId, tuple[int, int]]:
        """Objects owned here: how many forks other workers have, and how many references this one has."""
        return self._owner.leaks()

    def holders(self, limit: int) -> list[tuple[RRefId, ObjectState, dict[Peer, int]]]:
        """Objects owned here and their holders. From any thread; see ``Owner.holders``."""
        return self._owner.holders(limit)

    def counts(self) -> dict[str, int]:
        """How much is remembered, by kind, for debugging; all zero when no reference is left.

        ``owned`` objects, those ``shared`` with others, their ``forks`` there, ``local`` references to
        them; ``users``: forks here, those of them ``pending_users``, their ``children``; ``parked``,
        ``tombstones``, ``revoked`` forks, ``fences`` and ``fence_answers`` under way.
        """
        return {**self._owner.counts(), **self._users.counts(), "revoked": len(self._revoked)}

    # The machine

    def _refused(self, peer: Peer, fork: ForkId, reason: str) -> None:
        if not self._users.on_refused(peer, fork, reason) and fork[0] == peer:
            self._peers.note_hearsay(peer)
            self._revoked.add(fork, reason)  # it has overtaken the message that brings the fork

    def _is_dead(self, peer: Peer) -> bool:
        """Whether ``peer`` is dead; if not, a word of it shows that it lives."""
        if peer in self._peers.dead:
            return True
        if peer not in self._peers.living:
            self.peer_joined(peer)
        return False
