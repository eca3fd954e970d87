"""The copy that another host has of a store: its processes share it, and fetch each version once.

The store's worker names one process for each host that asks, the first one; that one keeps the copy, as a
keeper of its own (``keeper.py``), which has the versions under the numbers of their order. A reader of the
host holds a lease of a version at the store, has the copy bring it, and reads it from the copy's memory. The
copy gets the blocks, or only what has changed since the version that it has. If its process dies, the store
names another one.

Blocks come from the copy of the host that has asked for the version before, if there is one, as soon as they
are there; so a version goes from the store's host once, and on from host to host (``Hosts.source``).

The second copy of a store with two (``replication.py``) is such a copy, which has all versions. It is the
store itself once it has taken over.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from farcall.weights import delta
from farcall.weights.blocks import Box
from farcall.weights.errors import WeightsError
from farcall.weights.handle import Handle
from farcall.weights.keeper import Keeper
from farcall.weights.node import call_kept, new_id, node_of
from farcall.weights.replication import Listing
from farcall.weights.transfer import Held, batches, box_to_wire, check, in_window, wholes
from farcall.weights.versions import Lease, Who
from rpc.errors import RpcError
from rpc.group.workers import Member
from rpc.runtime.legible import legible

__all__ = ["Arrival", "Copy"]

logger = logging.getLogger(__name__)


class Arrival:
    """The blocks of a version that is brought: those that are here, and those that others wait for. From any
    thread.

    Args:
        tensors: the memory for it.

    Attributes:
        blocks: names and blocks of whole tensors with their memory, grouped as they go in calls; these are
            the same in all processes.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.blocks = list(batches(wholes(tensors)))
        self._lock = threading.Lock()
        self._here: set[int] = set()
        self._waiting: dict[int, list[torch.futures.Future[list[Tensor]]]] = {}
        self._error: Exception | None = None

    def missing(self) -> list[int]:
        """Return the indices of the blocks that are not here."""
        return [index for index in range(len(self.blocks)) if index not in self._here]

    def put(self, index: int, data: Sequence[Tensor]) -> None:
        """Take in blocks."""
        for (*_, local), tensor in zip(self.blocks[index], data, strict=True):
            local.copy_(tensor)
        self._give([index])

    def finish(self) -> None:
        """All blocks are here."""
        self._give(self.missing())

    def fail(self, error: Exception) -> None:
        """No more blocks come."""
        with self._lock:
            self._error = error
            waiting = [future for futures in self._waiting.values() for future in futures]
            self._waiting = {}
        for future in waiting:
            future.set_exception(_gave_up(error))  # type: ignore[arg-type]  # as PyTorch means it

    def wait(self, index: int) -> torch.futures.Future[list[Tensor]]:
        """Return a future of blocks."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        with self._lock:
            error, is_here = self._error, index in self._here
            if error is None and not is_here:
                self._waiting.setdefault(index, []).append(future)
        if is_here:
            future.set_result(self._tensors(index))
        elif error is not None:
            future.set_exception(_gave_up(error))  # type: ignore[arg-type]
        return future

    def _give(self, indices: Sequence[int]) -> None:
        for index in indices:
            with self._lock:
                self._here.add(index)
                waiting = self._waiting.pop(index, [])
            for future in waiting:
                future.set_result(self._tensors(index))

    def _tensors(self, index: int) -> list[Tensor]:
        return [local.contiguous() for *_, local in self.blocks[index]]


def _gave_up(error: Exception) -> WeightsError:
    return WeightsError(f"the copy of a host could not get a version: {error}")


class Copy(Keeper):
    """The copy of a store that this process keeps. From any thread.

    Args:
        source: the store, as this process uses it.
        copy_id: see ``Node.can_keep``.

    Attributes:
        ended: whether it is the store itself by now.
    """

    asked: ClassVar[frozenset[str]] = Keeper.asked | {"bring", "relay", "block", "follow", "release_copy"}

    def __init__(self, source: Handle, copy_id: int) -> None:
        super().__init__(source.name, source.agent)
        self.id = copy_id
        self.source_store = source
        self.ended = False
        self._keep = self._catalogue.keep = 1
        self._bringing = threading.Lock()
        """Held while a version is brought, so that each comes once."""
        self._listing_here: Listing | None = None
        """What this second copy is to have, and has had; None if it is none."""
        self._arrivals: dict[int, Arrival] = {}
        """The version that is brought, or was brought last."""

    @property
    def newest(self) -> int | None:
        """The serial of the newest version of this second copy, 0 without one; None if it is none. Others
        that readers have brought do not count.
        """
        listing = self._listing_here
        if listing is None:
            return None
        listed = {serial for _, serial, _ in listing.versions}
        return max(listed.intersection(self.versions()), default=0)

    # ---- a host's copy

    def _lose(self, lost: tuple[Who, str]) -> None:
        super()._lose(lost)
        if lost[0].incarnation == self.source_store.at and self._listing_here is None and not self.ended:
            self.source_store.end_copy()  # versions of a new store would have other serials

    def bring(self, serial: int, who: list[Any], ticket: int) -> list[Any]:
        """Get a version unless it is here, and return it as ``open`` does, with a lease."""
        with self._bringing:
            self._check_not_ended()
            if self._listing_here is not None:  # an older one must not take the place of one that is listed
                self.describe(len({*self.versions(), serial}))
            if not self._get(serial):
                raise WeightsError(f"store '{self.name}' has that version no longer")
            return self.open(serial, None, who, ticket)

    def _check_not_ended(self) -> None:
        if self.ended:
            raise WeightsError("this copy is the store itself by now")

    def _get(self, serial: int) -> bool:
        """Get a version unless it is here; returns whether the store has it still."""
        if serial not in self.versions():
            with self.source_store.reading(serial) as held:
                if held is None:
                    return False
                self._bring(held)
        return True

    def _bring(self, held: Held) -> None:
        tensors = [
            [name, spec.dtype, list(spec.shape), [box_to_wire(Box.whole(spec.shape))]]
            for name, spec in held.layout.specs.items()
        ]
        store, serial = self.source_store, held.serial
        have = next(reversed(self.versions()), None)
        own = list(self.own)
        self.begin(serial, [0, 1], tensors, own, True)
        new = self.tensors(serial)
        arrival = self._arrivals[serial] = Arrival(new)
        try:
            changes = None if have is None else store.ask("changes", store.who, held.ticket, have)
            if have is None or changes is None:
                self._fill(arrival, held)
            else:
                for name, old in self.tensors(have).items():
                    new[name].copy_(old)
                for name, gaps, bits in changes:
                    delta.apply(gaps, bits, new[name])
            self.written(serial, 0, own)
        except Exception as error:
            self._arrivals.pop(serial, None)
            arrival.fail(error)
            raise
        arrival.finish()
        self._arrivals = {serial: arrival}

    def _fill(self, arrival: Arrival, held: Held) -> None:
        """Get the blocks of a version, from another host's copy or from the store."""
        store, failed = self.source_store, list[int]()
        while arrival.missing():
            source = store.ask("source", held.serial, store.who, self.id, failed)
            if source is None:
                self._get_blocks(arrival, lambda index: store.read(held.ticket, arrival.blocks[index]))
                return
            member = store.admitted(source[0])
            try:
                with self._relaying(held.serial, member, source[1]) as block:
                    self._get_blocks(arrival, block)
            except RpcError as error:
                failed.append(member.incarnation)
                logger.info("another source of store '%s' is asked: %s", self.name, legible(error))

    def _get_blocks(self, arrival: Arrival, call: Callable[[int], Any]) -> None:
        """Get the blocks that have not arrived; ``call`` asks for one, by its index."""
        for index, data in in_window(call, iter(arrival.missing())):
            check(self.name, arrival.blocks[index], data)
            arrival.put(index, data)

    @contextlib.contextmanager
    def _relaying(self, serial: int, member: Member, copy_id: int) -> Iterator[Callable[[int], Any]]:
        """Have another host's copy keep a version; the value asks it for blocks."""
        who, ticket = [*self.own, None], new_id()  # this process uses no memory of the other host

        later = partial(call_kept, self.agent, member.name, member.incarnation, copy_id, self.name)
        try:
            later("relay", serial, who, ticket).wait()
            yield partial(later, "block", serial)
        finally:
            with contextlib.suppress(RpcError):  # it is gone, and the lease with it
                later("release", who, ticket, False)

    def tensors(self, number: int) -> dict[str, Tensor]:
        """Return the whole tensors of a version that is here, or is being brought."""
        with self._lock:
            version = self._catalogue.whole.get(number) or self._catalogue.open[number]
            return {name: self._tensor(version, name) for name in version.assembly.layout.specs}

    def relay(self, serial: int, who: list[Any], ticket: int) -> None:
        """Keep a version that is here, or is being brought, for the copy of another host."""
        with self._changing():
            version = self._catalogue.whole.get(serial) or self._catalogue.open.get(serial)
            if version is None or serial not in self._arrivals:
                raise WeightsError("this copy does not have that version")
            self._catalogue.lease(version, Lease(self._who(who), ticket))

    def block(self, serial: int, index: int) -> torch.futures.Future[list[Tensor]]:
        """Return a future of blocks of that version."""
        arrival = self._arrivals.get(serial)
        if arrival is None or not 0 <= index < len(arrival.blocks):
            raise WeightsError("this copy does not have that version")
        return arrival.wait(index)

    # ---- the second copy

    def follow(self, *listed: Any) -> int:
        """Have the versions of a listing, and no others. ``keep`` of them stay, besides those with tags.
        Those that the store has removed since are passed over: another listing is under way. Returns the
        serial of the newest one, 0 without one.
        """
        listing = Listing(*listed)
        with self._bringing:
            self._check_not_ended()
            # until the later versions are here, the earlier ones count if the keeper is lost
            self._listing_here = listing.with_earlier(self._listing_here or listing, self.versions())
            serials = [serial for _, serial, _ in listing.versions]
            self.describe(max(listing.keep, len(serials)))
            here = self.versions()
            others = [each for each in here if each not in serials]
            base = []  # it stays meanwhile, and what has changed since it is less
            if others and len(others) == len(here):
                base.append(self.newest or others[-1])
            for serial in others:
                if serial not in base:
                    self.drop(serial)
            for serial in serials:
                self._get(serial)
            for serial in base:
                if serial in self.versions():
                    self.drop(serial)
            self._listing_here = listing
            return self.newest or 0

    def release_copy(self) -> None:
        """Keep no second copy any more: the memory is free, except what readers have leases of."""
        with self._bringing:
            if self.ended:
                return
            self._listing_here, self._arrivals = None, {}
            with self._changing():
                self._keep = self._catalogue.keep = 1
                for serial in list(self._catalogue.whole):
                    self._catalogue.drop(serial)
            self._segments.free((), 0)

    def take_over(self) -> None:
        """Be the store from now on."""
        with self._bringing, self._changing():
            listing = self._listing_here
            if listing is None:
                raise WeightsError(f"this process has no copy of store '{self.name}' any more")
            node_of(self.agent).add(self.source_store.home, self)  # calls wait for the lock from now on
            self.ended, self._listing_here, self._arrivals = True, None, {}
            self._keep = listing.keep
            self._catalogue.take_over(self.name, *listing)

    def _closed_error(self) -> RpcError:
        if self.ended:
            return super()._closed_error()
        return WeightsError(f"this process has no copy of store '{self.name}' any more")

    def close(self) -> None:
        """Release all memory."""
        super().close()
        self._arrivals.clear()  # their blocks use it

    def observed(self) -> dict[str, Any]:
        """Return what the observer shows. The numbers of a copy's versions are not those of the store."""
        shown = super().observed()
        return shown if self.ended else shown | {"copy": True, "versions": [], "open": {}}
