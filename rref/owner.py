"""The owner's half of the reference protocol: which forks each of its objects has.

What is explained at the head of ``rref.protocol`` as the owner's table, row by row:

* *unknown*: in none of the tables here;
* *parked*: in ``_parked``. Someone knows it, its creation has not arrived;
* *owned*: in ``_owned``. It has forks, or its creation is still running;
* *buried*: in ``_buried``, a tombstone. Its creator gave it up.
"""

from __future__ import annotations

from collections.abc import Container
from itertools import chain

from rpc.errors import ProtocolError, RRefError
from rref.fence import Fences
from rref.messages import Confirmed, Descriptor, Failed, ForkId, Free, Peer, Ref, RRefId, State
from rref.peers import Peers

__all__ = ["Owner"]


class _Forks:
    """The forks of one object: by whom. A local reference is one whose user is this worker."""

    __slots__ = ("forks",)

    def __init__(self, forks: dict[ForkId, Peer]) -> None:
        self.forks = forks


class _Object(_Forks):
    """An object that lives here."""

    __slots__ = ("running",)

    def __init__(self, forks: dict[ForkId, Peer], running: bool) -> None:
        super().__init__(forks)
        self.running = running


class _Parked(_Forks):
    """An object whose creation has not arrived."""

    __slots__ = ("accept", "seen")

    def __init__(self) -> None:
        super().__init__({})
        self.accept: dict[ForkId, Peer] = {}  # local ones -> who is to be told "accepted"
        self.seen = False  # by a sweep


class Owner:
    """All objects that this worker owns or is said to own."""

    __slots__ = ("_broken", "_buried", "_local", "_making", "_owned", "_parked", "_peers", "fences")

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self.fences = Fences(peers, self._drop_forks_of)
        self._owned: dict[RRefId, _Object] = {}
        self._parked: dict[RRefId, _Parked] = {}
        self._buried: dict[RRefId, tuple[str, bool]] = {}  # why, and seen by a sweep
        self._local: dict[Ref, RRefId] = {}  # local references, owned or parked
        self._broken: dict[Ref, str] = {}  # local references to what never came: why
        self._making: dict[ForkId, RRefId] = {}  # creations on their way to oneself

    def __contains__(self, ref: Ref) -> bool:
        return ref in self._local or ref in self._broken

    # Beginnings

    def own(self, rref: RRefId) -> None:
        """A value that is here already; its first local reference has the object's id."""
        self._owned[rref] = _Object({rref: self._peers.me}, running=False)
        self._local[rref] = rref

    def create(self, rref: RRefId, fork: ForkId) -> None:
        """A creation sent to oneself: the object is counted now, and held by the message on its way."""
        self._owned[rref] = _Object({rref: self._peers.me, fork: self._peers.me}, running=False)
        self._local[fork] = self._making[fork] = rref

    def creation_failed(self, fork: ForkId, reason: str) -> bool:
        """A creation sent to oneself will not be run, or not in time; false if ``fork`` is none such."""
        rref = self._making.pop(fork, None) or self._local.get(fork)
        if rref is not None:
            self.abandon(rref, reason)
        return rref is not None

    def arrived(self, rref: RRefId, fork: ForkId, creator: Peer) -> bool:
        """A creation is here; true if it is to be run."""
        if rref[0] != creator:
            raise ProtocolError(f"worker {creator} sent a creation in another's name: {rref}")
        if rref in self._buried:
            return False
        if creator == self._peers.me:
            return self._arrived_here(rref, fork)
        if rref in self._owned:
            return False
        self._owned[rref] = owned = _Object({fork: creator}, running=True)
        parked = self._parked.pop(rref, None)
        if parked is not None:
            owned.forks.update(parked.forks)
            for each, user in parked.forks.items():
                if user != self._peers.me:
                    self._peers.send(user, ["confirmed", each])
                elif each in self._local:
                    self._peers.actions.append(Confirmed(each))
            self._accept(parked)
        return True

    def _arrived_here(self, rref: RRefId, fork: ForkId) -> bool:
        if self._making.pop(fork, None) is None:
            return False
        owned = self._owned[rref]
        del owned.forks[rref]
        owned.running = True
        return True

    def finished(self, rref: RRefId) -> None:
        """It has been run."""
        owned = self._owned.get(rref)
        if owned is not None and owned.running:
            owned.running = False
            self._free_if_unused(rref, owned)

    def adopt(self, rref: RRefId, fork: ForkId, sender: Peer | None, why_not: str | None = None) -> None:
        """A new local reference: from a message, or (``sender`` is none) of the shell's wish."""
        me = self._peers.me
        if fork in self:
            raise ProtocolError(f"fork {fork} of reference {rref} came twice")
        if why_not is None:
            why_not = self._why_not(rref)
        if why_not is not None:
            self._broken[fork] = why_not
        else:
            self._local[fork] = rref
            self._forks_of(rref)[fork] = me
        if sender is not None and sender != me:
            if rref in self._parked:
                self._parked[rref].accept[fork] = sender
            else:
                self._peers.send(sender, ["accepted", fork])

    # Passing on

    def fork(self, ref: Ref, to: Peer) -> Descriptor:
        """A fork for ``to``, counted from now on."""
        if ref in self._broken:
            raise RRefError(f"this reference cannot be sent: {self._broken[ref]}")
        rref, fork = self._local[ref], self._peers.new_id()
        if to not in self._peers.dead:
            self._forks_of(rref)[fork] = to
        return self._peers.me, rref, fork

    def take_back(self, rref: RRefId, fork: ForkId) -> None:
        """The fork was never sent."""
        self._drop(rref, fork)

    def link_lost(self, peer: Peer, kept: Container[ForkId]) -> None:
        """Ask which forks ``peer`` has: some may have been lost on their way."""
        for rref, held in chain(self._owned.items(), self._parked.items()):
            for fork, user in held.forks.items():
                if user == peer and fork not in kept:
                    self._peers.send(peer, ["withdraw", self._peers.me, rref, fork])

    # Ends

    def release(self, ref: Ref) -> None:
        """One local reference less."""
        if self._broken.pop(ref, None) is None:
            self._drop(self._local.pop(ref), ref)

    def lost(self, peer: Peer, reason: str) -> None:
        """``peer`` is dead: nothing comes from it any more, and its forks wait for the fence."""
        for rref in [rref for rref in self._parked if rref[0] == peer]:
            self._refuse_parked(rref, f"its creator was lost before the creation arrived: {reason}")
        for rref in [rref for rref in self._buried if rref[0] == peer]:
            del self._buried[rref]
        held = chain(self._owned.values(), self._parked.values())
        self.fences.lost(peer, any(peer in each.forks.values() for each in held))

    def sweep(self) -> None:
        """Give up what the last sweep saw waiting already."""
        for rref, parked in list(self._parked.items()):
            if parked.seen:
                self._refuse_parked(rref, "its creation did not arrive in time")
            else:
                parked.seen = True
        for rref, (reason, seen) in list(self._buried.items()):
            if seen and rref not in self._owned:
                del self._buried[rref]
            else:
                self._buried[rref] = (reason, True)

    def abandon(self, rref: RRefId, reason: str) -> None:
        """The creator gave it up: every reference to it fails, and what may still arrive is not run."""
        self._buried[rref] = (reason, False)
        owned = self._owned.get(rref)
        if owned is not None:
            forks, owned.forks = owned.forks, {}
            self._refuse(forks, reason)
            self._free_if_unused(rref, owned)
        elif rref in self._parked:
            self._refuse_parked(rref, reason)

    # Messages

    def on_confirm(self, peer: Peer, rref: RRefId, fork: ForkId) -> None:
        """``peer`` received a fork from another user."""
        reason = self._why_not(rref)
        if reason is not None:
            self._peers.send(peer, ["refused", fork, reason])
            return
        if self._forks_of(rref).setdefault(fork, peer) != peer:
            raise ProtocolError(f"worker {peer} has another's fork confirmed: {fork} of reference {rref}")
        if rref in self._owned:
            self._peers.send(peer, ["confirmed", fork])

    def on_delete(self, peer: Peer, rref: RRefId, fork: ForkId) -> None:
        """``peer`` has done with a fork."""
        held = self._owned.get(rref) or self._parked.get(rref)
        if held is not None and held.forks.get(fork) == peer:
            self._drop(rref, fork)

    def on_abandon(self, peer: Peer, rref: RRefId, reason: str) -> None:
        """``peer``, which created it, gives it up."""
        if rref[0] != peer:
            raise ProtocolError(f"worker {peer} abandoned what another created: {rref}")
        self.abandon(rref, reason)

    # What can be asked

    def state(self, ref: Ref) -> State:
        """How ``ref`` stands."""
        if ref in self._broken:
            return State.FAILED
        return State.CONFIRMED if self._local[ref] in self._owned else State.PENDING

    def reason(self, ref: Ref) -> str:
        """Why ``ref`` failed, or nothing."""
        return self._broken.get(ref, "")

    @property
    def waits_for_sweep(self) -> bool:
        """Whether anything waits for a creation."""
        return bool(self._parked or self._buried)

    def leaks(self) -> dict[RRefId, tuple[int, int]]:
        """For each object, how many forks others have, and how many references this worker."""
        return {rref: (self._foreign(owned), self._native(owned)) for rref, owned in self._owned.items()}

    def counts(self) -> dict[str, int]:
        """How much is remembered."""
        owned = self._owned.values()
        return {
            "owned": len(owned),
            "shared": sum(1 for each in owned if self._foreign(each)),
            "forks": sum(self._foreign(each) for each in owned),
            "local": len(self._local) + len(self._broken) + len(self._making),
            "parked": len(self._parked),
            "tombstones": len(self._buried),
            "fences": len(self.fences),
        }

    # The machine

    def _why_not(self, rref: RRefId) -> str | None:
        """Why there is no object to refer to, and never will be; ``None`` if there is or may be."""
        if rref in self._buried:
            return self._buried[rref][0]
        if rref in self._owned:
            return None
        if rref[0] == self._peers.me:
            return "its owner has freed it already"
        if rref[0] in self._peers.dead:
            return f"its creator was lost before the creation arrived: {self._peers.dead[rref[0]]}"
        return None

    def _forks_of(self, rref: RRefId) -> dict[ForkId, Peer]:
        """The forks of what is owned or, if it is unknown, from now on parked."""
        owned = self._owned.get(rref)
        if owned is not None:
            return owned.forks
        parked = self._parked.get(rref)
        if parked is None:
            parked = self._parked[rref] = _Parked()
        return parked.forks

    def _drop(self, rref: RRefId, fork: ForkId) -> None:
        owned = self._owned.get(rref)
        if owned is not None:
            owned.forks.pop(fork, None)
            self._free_if_unused(rref, owned)
            return
        parked = self._parked.get(rref)
        if parked is not None:
            parked.forks.pop(fork, None)
            sender = parked.accept.pop(fork, None)
            if sender is not None:
                self._peers.send(sender, ["accepted", fork])
            if not parked.forks:
                del self._parked[rref]

    def _free_if_unused(self, rref: RRefId, owned: _Object) -> None:
        if not owned.forks and not owned.running:
            del self._owned[rref]
            self._peers.actions.append(Free(rref))

    def _refuse_parked(self, rref: RRefId, reason: str) -> None:
        parked = self._parked.pop(rref)
        self._refuse(parked.forks, reason)
        self._accept(parked)

    def _refuse(self, forks: dict[ForkId, Peer], reason: str) -> None:
        for fork, user in forks.items():
            if user != self._peers.me:
                self._peers.send(user, ["refused", fork, reason])
            elif self._local.pop(fork, None) is not None:
                self._broken[fork] = reason
                self._peers.actions.append(Failed(fork, reason))

    def _accept(self, parked: _Parked) -> None:
        for fork, sender in parked.accept.items():
            self._peers.send(sender, ["accepted", fork])

    def _drop_forks_of(self, dead: set[Peer]) -> None:
        for rref, owned in list(self._owned.items()):
            if self._without(owned.forks, dead):
                self._free_if_unused(rref, owned)
        for rref, parked in list(self._parked.items()):
            if self._without(parked.forks, dead) and not parked.forks:
                del self._parked[rref]

    @staticmethod
    def _without(forks: dict[ForkId, Peer], dead: set[Peer]) -> bool:
        gone = [fork for fork, user in forks.items() if user in dead]
        for fork in gone:
            del forks[fork]
        return bool(gone)

    def _foreign(self, owned: _Object) -> int:
        return sum(1 for user in owned.forks.values() if user != self._peers.me)

    def _native(self, owned: _Object) -> int:
        return len(owned.forks) - self._foreign(owned)
