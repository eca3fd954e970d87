"""How references travel: as descriptors in the message's header, adopted before the pickle is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rpc.errors import ProtocolError, RRefError
from rpc.group.peer import Peer
from rpc.group.workers import Member
from rpc.runtime.interrupts import protected
from rref.reference import RRef
from rref.references import References

__all__ = ["RRefCarrier"]


class RRefCarrier:
    """Carries ``RRef`` objects; see ``rpc.serialization.carriers.Carrier``.

    A descriptor is ``[owner, rref, fork]``. In a dynamic group it also carries the owner's description, since
    the receiver may not know the owner yet.
    """

    kind = "rref"

    def __init__(self, references: References) -> None:
        self._references = references

    @protected
    def depart(self, obj: RRef[Any], to: Peer | None) -> list[Any]:
        shell = obj._references
        if shell.released:
            raise obj.deleted_error()
        if to is None:
            raise RRefError(f"{obj!r} can only be sent in RPC messages")
        if obj._creation is not None:
            obj._creation.check()
        descriptor = shell.fork(obj._rref, obj._ref, obj._owner, to)
        if not shell.workers.view.static:
            descriptor.append(obj._owner.member.to_wire())
        return descriptor

    def take_back(self, descriptors: list[Any], to: Peer) -> None:
        for descriptor in descriptors:
            self._references.take_back(descriptor[:3])

    def arrive(self, descriptors: list[Any], source: Peer) -> list[RRef[Any]]:
        shell = self._references
        arrived: list[RRef[Any]] = []
        for descriptor in descriptors:
            owner = self._owner(descriptor)
            ref = shell.adopt(descriptor[:3], source)
            arrived.append(RRef._of(shell, owner, (descriptor[1][0], descriptor[1][1]), ref))
        return arrived

    def _owner(self, descriptor: Any) -> Peer:
        if not isinstance(descriptor, list) or not 3 <= len(descriptor) <= 4:
            raise ProtocolError(f"a reference is described by {str(descriptor)[:80]}")
        workers = self._references.workers
        owner = workers.by_incarnation(descriptor[0])
        if owner is None and len(descriptor) == 4 and not workers.view.static:
            member = Member.from_wire(descriptor[3])
            if member.incarnation != descriptor[0]:
                raise ProtocolError("a reference is described as one worker's and another's")
            gone = workers.view.gone_reason(member.incarnation)
            if gone is not None:
                return self._references.gone_owner(member, gone)
            workers.view.join(member)
            owner = workers.ensure(member)
        if owner is None:
            raise ProtocolError(f"a reference names incarnation {descriptor[0]}, which is not in this group")
        return owner

    def ready(self, objects: list[RRef[Any]], when_ready: Callable[[], object]) -> bool:
        """User code gets a reference only when its owner has confirmed it, or when it is known to have
        failed.
        """
        for position, reference in enumerate(objects):
            rest = objects[position + 1 :]

            def go_on(rest: list[RRef[Any]] = rest) -> None:
                if self.ready(rest, when_ready):
                    when_ready()

            if not reference._references.when_settled(reference._ref, go_on):
                return False
        return True
