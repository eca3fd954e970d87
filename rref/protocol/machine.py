"""The reference protocol: which workers hold a reference to an object, and when the object is freed.

This is a pure state machine: it does no I/O, starts no thread, reads no clock and has no global state. This
file has the theory and the interface for the shell; ``user``, ``owner`` and ``fence`` implement the rules,
``messages`` and ``peers`` the vocabulary.

Theory of operation
===================

Each object has one *owner*, the worker that it lives on. Every other worker that refers to it is a *user*.
The owner keeps the set of *forks* of each object: one per user's reference, with the user's incarnation. When
the set is empty, the object is freed. So everything depends on the set never missing a fork that is in use.

A reference is passed on by forking it: the sender makes a new fork id and puts it into the message as a
*descriptor* (owner, object, fork). The descriptor can arrive late, and the sender can drop its own reference
or die in the meantime. The owner can receive the third worker's message about the new fork and the sender's
message about the old one in any order. Hence these rules; each worker follows its own part of them.

R1  The owner counts a fork that it sends itself before the message leaves.
R2  A user that sends a fork holds its own fork, the *parent*, until the receiver says that the *child* no
    longer needs it ("accepted"), whatever the sizes of the messages, and whatever becomes of the call that
    the message belonged to. Only if the message was certainly not sent, or was lost with a connection (a
    large one), is the parent released at once.
R3  The receiver asks the owner to count the child ("confirm"), and sends "accepted" to the parent when the
    child is counted or refused. If the receiver has a counted fork of the same object, the child joins that
    one at once. The owner itself accepts at once; a message to oneself needs no control messages.
R4  A fork is deleted when it has no local reference, *and* the owner has answered for it, *and* it has no
    children. Only then is the owner notified ("delete"). So a delete cannot overtake what it depends on.
R5  The descriptors of an object may arrive before its creation: the owner parks the object until the creation
    arrives, until the creator is lost, or until a sweep finds it twice. It asks the creator ("wanted"), which
    also detects the creator's death; a creator that has no such creation under way answers "unknown". If the
    creation fails at the creator (it timed out or could not be sent), the creator says so when it drops its
    reference ("abandon"): every other reference fails, and a tombstone keeps a late creation from being run.
    If it arrives after the tombstone was swept, the creator gets the owner's late answer and deletes its
    fork.
R6  A lost worker is lost for ever, and for all workers. Its forks, and the children that were on their way to
    it or pending there, are dropped only by a *fence*: see ``fence``. References to objects that it owned
    fail; creations that it had sent and that have not arrived are given up.

Why it is safe. Take any fork that a living worker holds or will still read, and go from it to its parent, and
so on. A child that is not counted has its parent held (R2, R3); a parent that is held is either counted, or
its own parent is held in turn (R4). The first in the line is counted (R1), or is the fork of a creation,
whose delete waits for the creation (R4). If a worker in the line is dead, neither its forks nor those that
kept them alive are dropped before the fence has found every later fork counted, refused, or discarded unread
(R6).

Why it is live. Each "confirm" is answered (at the latest by a sweep), so each child is accepted, so each
parent can be released. Each fence ends, as the workers that it waits for answer, or die and join it. So all
forks are released in the end.

The states of a user's fork are listed at the head of ``user``, those of an object at its owner at the head of
``owner``, in both cases as the tables that the code runs.

The messages must be delivered exactly once between any two living workers, in any order: sessions do this,
even if connections break. Calls, creations and answers travel separately, and may be late; large ones may be
lost with their connection, and their senders are notified of that.

How a shell uses it
===================

Use one ``Protocol`` for the process, on one thread at a time except where noted; no method waits or calls
out. After one or more inputs, take the actions and perform them: ``Send``, ``Confirmed``, ``Failed``,
``Free``, ``Fence``. A local reference (``Ref``) corresponds to one Python object; each is released once.

* ``peer_joined`` comes before any other input about a member; each member is announced to all before it takes
  part. ``peer_lost`` comes once the link to a dead worker is closed and its unread frames are discarded: when
  its death is detected, or on ``Fence``. Workers that leave in an orderly way are reported as lost as well.
* ``remote()`` is ``create``, then exactly one of ``created`` (any answer, late ones too) and
  ``creation_failed``. At the owner, ``arrived`` when the call is read: if true, it is run, then ``finished``.
* When a reference is sent: ``fork``; ``take_back`` if the message was never written, or was lost with its
  connection.
* When a message is read: ``adopt`` each descriptor, whether or not the pickle will be read. User code waits
  while ``state`` is ``PENDING``. A fetch that may be earlier than the creation waits for the result of
  ``expect``.
* While ``waits_for_sweep``: ``sweep`` about once a minute; what two sweeps in a row find is given up.
* Shutdown, with no call under way: ``release_all``, then wait until ``counts()["users"]`` is 0 and the
  deletes are acknowledged everywhere; ``leaks`` returns what is left at the owners.
"""

from __future__ import annotations

from itertools import count
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
from rref.protocol.user import Users

__all__ = ["Protocol"]


class Protocol:
    """The reference protocol of one worker; see the head of this file.

    Not thread-safe: use it from one thread, or under one lock.

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

    __slots__ = ("_numbers", "_owner", "_peers", "_revoked", "_users", "actions", "me")

    def __init__(self, me: Peer) -> None:
        self.me: Final = me
        self._numbers = count(1)
        self._peers = Peers(me)
        self.actions: Final = self._peers.actions
        """Actions that the shell has yet to perform; see ``take_actions``."""
        self._owner = Owner(self._peers)
        self._users = Users(self._peers)
        self._revoked = _Revoked()

    def take_actions(self) -> list[Action]:
        """Return the actions that the shell must perform, in order, and forget them."""
        actions = self.actions.copy()
        self.actions.clear()
        return actions

    def receive(self, peer: Peer, message: object) -> None:
        """Handle a control message of ``peer``, delivered exactly once. Messages of dead peers are ignored.

        Raises:
            ProtocolError: the message is malformed, or ``peer`` is not allowed to send it.
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
                users.answers.asked(peer, dead, reason)
            case "fenced", (dead,):
                owner.fences.answered(peer, dead)
            case "cleared", (dead,):
                users.on_cleared(peer, dead)

    def nobody(self, creator: Peer) -> None:
        """Record that ``creator`` is not in the group: the creations attributed to it will not come."""
        self._owner.creator_lost(creator, "there is no such worker in this group")

    # The group

    def peer_joined(self, peer: Peer) -> None:
        """Record that ``peer`` is now a member."""
        if self._peers.joined(peer):
            self._owner.fences.joined(peer)

    def peer_lost(self, peer: Peer, reason: str) -> None:
        """Record that ``peer`` is dead, for ``reason``; its link is closed, and nothing more will come from
        it.
        """
        if self._peers.lost(peer, reason):
            self._users.lost(peer, reason)
            self._owner.lost(peer, reason)
            self._revoked.lost(peer)

    # Creating references

    def new_id(self) -> tuple[int, int]:
        """Return an id for an object, a fork or a local reference. From any thread."""
        return self.me, next(self._numbers)

    def own(self, rref: RRefId | None = None) -> Ref:
        """Register an object that exists on this worker; returns its first local reference, which is also its
        id.
        """
        rref = rref or self.new_id()
        self._owner.own(rref)
        return rref

    def create(
        self, owner: Peer, rref: RRefId | None = None, fork: ForkId | None = None
    ) -> tuple[RRefId, Ref]:
        """Register an object to be created by a call to ``owner``, which may be this worker.

        Returns:
            The object's id and its first local reference, which is also the creation's fork id.
        """
        rref, fork = rref or self.new_id(), fork or self.new_id()
        if owner == self.me:
            self._owner.create(rref, fork)
        else:
            self._users.create(owner, rref, fork)
        return rref, fork

    def created(self, owner: Peer, rref: RRefId, fork: ForkId) -> None:
        """Record that ``owner`` answered the creation, whatever its outcome, even if no thread waits any
        more.
        """
        if owner != self.me:
            self._users.created(owner, rref, fork)

    def creation_failed(self, owner: Peer, rref: RRefId, fork: ForkId, reason: str) -> None:
        """Record that the creation timed out, could not be sent, or was refused."""
        if owner == self.me:
            self._owner.abandon(rref, reason)
        else:
            self._users.creation_failed(fork, reason)

    def arrived(self, rref: RRefId, fork: ForkId, creator: Peer) -> bool:
        """Handle a creation that was received; returns whether to run it. If so, ``finished`` must follow,
        once.

        Raises:
            ProtocolError: ``creator`` uses an id that is not its own.
        """
        return not self._is_dead(creator) and self._owner.arrived(rref, fork, creator)

    def finished(self, rref: RRefId) -> None:
        """Record that the creation has been run, and its value, or the exception in its place, is stored."""
        self._owner.finished(rref)

    def expect(self, rref: RRefId, ref: Ref | None = None) -> Ref:
        """Return a local reference to an object that this worker owns or will own, for a fetch to wait on."""
        ref = ref or self.new_id()
        self._owner.adopt(rref, ref, None)
        return ref

    # Passing on

    def fork(self, ref: Ref, to: Peer, fork: ForkId | None = None) -> Descriptor:
        """Return a fork of ``ref`` for a message to ``to``: the owner, another worker, or this one.

        Raises:
            RRefError: ``ref`` has failed, or does not exist.
        """
        fork = fork or self.new_id()
        if ref in self._users:
            return self._users.fork(ref, to, fork)
        if ref in self._owner:
            return self._owner.fork(ref, to, fork)
        raise RRefError(f"worker {self.me} holds no reference {ref}")

    def take_back(self, descriptor: Descriptor) -> None:
        """Record that the message with this fork was not sent, and never will be."""
        owner, rref, fork = descriptor
        if owner == self.me:
            self._owner.take_back(rref, fork)
        else:
            self._users.take_back(fork)

    def adopt(self, descriptor: object, sender: Peer) -> Ref:
        """Take a fork that came in a message of ``sender``; returns a new local reference, in any ``state``.

        Raises:
            ProtocolError: it is malformed, ``sender`` may not pass it on, or it was received before.
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
        """Release ``ref``, whose last Python object is gone. Does nothing if it is released already."""
        if ref in self._users:
            self._users.release(ref)
        elif ref in self._owner:
            self._owner.release(ref)

    def release_all(self) -> None:
        """Release every local reference to other workers' objects, for an orderly shutdown."""
        self._users.release_all()

    def sweep(self) -> None:
        """Give up what was already waiting for a late message at the last sweep and still is."""
        self._owner.sweep()
        self._revoked.sweep()
        self._peers.sweep()

    # Queries

    @property
    def waits_for_sweep(self) -> bool:
        """Whether anything waits for a message that may never come."""
        return bool(self._revoked) or self._owner.waits_for_sweep or self._peers.has_hearsay

    def state(self, ref: Ref) -> State:
        """Return the state of ``ref``, which is not yet released. From any thread.

        Raises:
            RRefError: there is no such reference.
        """
        state = self._users.state(ref) or self._owner.state(ref)
        if state is None:
            raise RRefError(f"worker {self.me} holds no reference {ref}")
        return state

    def reason(self, ref: Ref) -> str:
        """Return why ``ref``, not yet released, has failed; empty if it has not. From any thread."""
        return self._users.reason(ref) or self._owner.reason(ref)

    def leaks(self) -> dict[RRefId, tuple[int, int]]:
        """Return, for each object owned here, its number of forks at other workers and of references on this
        one.
        """
        return self._owner.leaks()

    def holders(self, limit: int) -> list[tuple[RRefId, ObjectState, dict[Peer, int]]]:
        """Objects owned here and their holders. From any thread; see ``Owner.holders``."""
        return self._owner.holders(limit)

    def counts(self) -> dict[str, int]:
        """Return the number of entries by kind, for debugging; all are zero when no reference is left.

        ``owned`` objects, those ``shared`` with other workers, their ``forks`` there, ``local`` references to
        them; ``users``: forks here, those of them that are ``pending_users``, their ``children``; ``parked``,
        ``tombstones``, ``revoked`` forks, ``fences`` and ``fence_answers`` under way.
        """
        return {**self._owner.counts(), **self._users.counts(), "revoked": len(self._revoked)}

    # The machine

    def _refused(self, peer: Peer, fork: ForkId, reason: str) -> None:
        if not self._users.on_refused(peer, fork, reason) and fork[0] == peer:
            self._peers.note_hearsay(peer)
            self._revoked.add(fork, reason)  # it has overtaken the message that brings the fork

    def _is_dead(self, peer: Peer) -> bool:
        """Whether ``peer`` is dead; if not, its message shows that it lives."""
        if peer in self._peers.dead:
            return True
        if peer not in self._peers.living:
            self.peer_joined(peer)
        return False


class _Revoked:
    """Forks that may still be on their way here, and must not be taken when they arrive. An entry that two
    sweeps have seen is forgotten.
    """

    __slots__ = ("_forks",)

    def __init__(self) -> None:
        self._forks: dict[ForkId, tuple[str, bool]] = {}  # reason, and whether a sweep has seen it

    def __len__(self) -> int:
        return len(self._forks)

    def add(self, fork: ForkId, reason: str) -> None:
        """Revoke ``fork``."""
        self._forks[fork] = (reason, False)

    def pop(self, fork: ForkId) -> str | None:
        """``fork`` has arrived: return why it must not be taken, or None if it may be."""
        found = self._forks.pop(fork, None)
        return None if found is None else found[0]

    def lost(self, peer: Peer) -> None:
        """Forget the forks of ``peer``, which is dead: nothing more will come from it."""
        self._forks = {fork: entry for fork, entry in self._forks.items() if fork[0] != peer}

    def sweep(self) -> None:
        """Forget the entries that the last sweep saw already."""
        self._forks = {fork: (reason, True) for fork, (reason, seen) in self._forks.items() if not seen}
