"""The process that keeps a store: its versions and their memory, and what other workers ask of it.

Readers and writers of this host map the memory and copy by themselves; what they ask here are a few small
questions. Those of other hosts send and get blocks in calls. All of it is texts, numbers, lists and tensors,
so it works in safe mode as well.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from time import monotonic
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from farcall.weights import delta
from farcall.weights.blocks import Box
from farcall.weights.catalogue import Catalogue
from farcall.weights.errors import WeightsError
from farcall.weights.figures import Figures
from farcall.weights.hosts import Hosts, Place
from farcall.weights.layout import Spec, spec_from_wire
from farcall.weights.memory import Segments
from farcall.weights.node import done, new_id
from farcall.weights.replication import Listing, SecondCopy
from farcall.weights.transfer import box_from_wire, box_to_wire
from farcall.weights.versions import Lease, Version, Who
from rpc.agent.agent import Agent
from rpc.errors import NoMemoryError, RpcError, WorkerLostError
from rpc.group.peer import Peer
from rpc.rendezvous.address import host_identity
from rpc.runtime.process_signs import has_ended

__all__ = ["Keeper"]

logger = logging.getLogger(__name__)

_MOST_GIVEN_UP: Final = 1024
"""Maximum number of waits that are remembered as given up before they have come."""

_UNKNOWN: Final = 0
"""The id of no process: one that is not known may live."""

_LEAST_GAIN: Final = 4
"""Differences are sent if they take at most this fraction of a version, as they cost time on both hosts."""

_MOST_CHANGES: Final = 2
"""Maximum number of pairs of versions whose differences are kept for copies of further hosts."""


class Keeper:
    """Keeps one store, in the process of an agent. From any thread.

    Args:
        name: of the store.
        agent: by which others ask.
    """

    asked: ClassVar[frozenset[str]] = frozenset({
        "begin", "changes", "copied", "copy_at", "describe", "drop", "failed", "give_up", "metadata", "offer",
        "open", "open_serial", "read", "release", "source", "tag", "usage", "versions", "wait", "write",
        "written",
    })  # fmt: skip

    def __init__(self, name: str, agent: Agent) -> None:
        self.name = name
        self.id = new_id()
        self.agent = agent
        self.own = Who(agent.info.name, agent.incarnation)
        self._run_soon = agent.executor.submit_batch
        self._catalogue = Catalogue(name)
        self._keep = 0
        self._segments = Segments(self._run_soon)
        self._lock = threading.RLock()  # a finalizer that runs while it is held may release a lease
        self._growing = threading.Lock()
        """Held while memory is allocated, so that parts are declared one after another."""
        self._waiting: dict[Lease, torch.futures.Future[int]] = {}
        self._given_up: dict[Lease, None] = {}
        """The waits that have been given up before they have come."""
        self._state = 0
        """Changes when waiting writers and readers have to look again."""
        self._second: SecondCopy | None = None
        self._members = agent.group.peers.view
        self._hosts = Hosts(lambda incarnation: self._members.find(incarnation) is not None)
        self._figures = Figures(self._catalogue)
        self._changes_between: dict[tuple[int, int], list[list[Any]] | None] = {}
        self._processes: dict[Hashable, int | None] = {}
        """The process of each caller, by incarnation; None: it uses no memory of this one."""
        self._closed = False
        agent.lifecycle.hooks.gone.append(self._peer_gone)

    # ---- opening

    def describe(self, keep: int | None, copies: int = 1) -> list[Any]:
        """Return what a handle needs. The largest ``keep`` and ``copies`` of all handles that have one
        count.
        """
        with self._changing():
            if keep is not None:
                self._keep = self._catalogue.keep = max(self._keep, keep)
            if copies > 1 and self._second is None:
                self._second = SecondCopy(self.agent, self.name, host_identity())
                self._second.update(self._listing())
        return [self.id, host_identity(), os.getpid(), 1 if self._second is None else 2]

    def offer(self, who: list[Any], host: str, copy: int) -> None:
        """A worker can keep the second copy."""
        if self._second is not None:
            self._second.offer(who[1], host, copy)

    def copied(self, number: int) -> torch.futures.Future[str | None]:
        """Return a future that is completed once the second copy has a version, with None; or cannot,
        with the reason.
        """
        with self._lock:
            version = self._catalogue.whole.get(number)
        return done() if version is None or self._second is None else self._second.wait(version.serial)

    def _listing(self) -> Listing:
        whole = self._catalogue.whole.values()
        versions = [[each.number, each.serial, each.metadata] for each in whole]
        catalogue = self._catalogue
        return Listing(catalogue.keep, versions, dict(catalogue.tags), catalogue.after, catalogue.removed())

    # ---- writers

    def begin(
        self,
        number: int,
        part: list[int],
        tensors: list[list[Any]],
        who: list[Any],
        insist: bool,
        put: int = 0,
    ) -> list[Any] | int | None:
        """Declare a part of a version. Returns the layout, its segments, all segments that there are, and for
        each tensor the blocks that the caller has to write; None if the version is whole, and has this part;
        or a state that ``wait`` waits to change, since other versions have to become whole before. With
        ``insist`` they are given up instead. ``put`` tells apart the puts of one worker.
        """
        specs: dict[str, Spec] = {}
        blocks: dict[str, list[Box]] = {}
        for name, dtype, shape, boxes in tensors:
            specs[name] = spec_from_wire(dtype, shape)
            blocks[name] = [box_from_wire(box) for box in boxes]
        index, count = part
        with self._growing:
            with self._changing():
                if not self._catalogue.make_room(number, self._who(who), insist=insist):
                    return self._state
                version, sizes = self._catalogue.begin(
                    number, index, count, specs, blocks, self._who(who), put
                )
                if version.whole:
                    return None
            if sizes:
                self._grow(version, index, sizes)
            with self._lock:
                writes = version.assembly.writes(index)
                return [
                    version.assembly.layout.to_wire(),
                    self._segments.described(version.memory),
                    self._segments.live,
                    [[name, [box_to_wire(box) for box in boxes]] for name, boxes in writes.items() if boxes],
                ]

    def _grow(self, version: Version, part: int, sizes: Sequence[int]) -> None:
        """Add memory to a version for a part that has just been declared."""
        try:
            memory = self._segments.add(sizes)
        except NoMemoryError as error:
            with self._changing():
                if self._catalogue.open.get(version.number) is version:
                    self._catalogue.withdraw(version, part)
            raise NoMemoryError(
                f"there is no memory for part {part} of version {version.number} of store "
                f"'{self.name}': {error}. The versions before are still there; keep fewer (keep=), or "
                "release leases."
            ) from None
        with self._changing():
            self._catalogue.grow(version, memory)

    def write(
        self,
        number: int,
        part: int,
        who: list[Any],
        blocks: list[list[Any]],
        data: list[Tensor],
        put: int = 0,
    ) -> None:
        """Write blocks of a part, for a writer of another host."""
        writer = self._who(who)
        with self._lock:
            version = self._catalogue.check_open(number, part, writer, put)
            targets = [self._tensor(version, name) for name, _ in blocks]
            writes = version.assembly.writes(part)
            self._figures.received += sum(each.nbytes for each in data)
            version.writing.append(writer)
        try:
            for target, (name, box), local in zip(targets, blocks, data, strict=True):
                where = box_from_wire(box)
                if not any(own.contains(where) for own in writes.get(name, ())):
                    raise WeightsError(
                        f"a block of {name!r} does not belong to part {part} of version {number}"
                    )
                where.of(target).copy_(local)
        finally:
            with self._lock:
                version.writing.remove(writer)

    def written(
        self, number: int, part: int, who: list[Any], metadata: dict[str, Any] | None = None, put: int = 0
    ) -> bool:
        """A part has been written; returns whether the version is whole now."""
        with self._changing():
            whole = self._catalogue.written(number, part, self._who(who), metadata, put)
            if whole:
                self._catalogue.whole[number].since = monotonic()
            return whole

    def failed(self, number: int, part: int, who: list[Any], put: int) -> None:
        """A put of a part has ended with an error."""
        with self._lock:
            self._catalogue.failed(number, part, self._who(who), put)

    # ---- readers

    def open(
        self,
        number: int | str | None,
        newer_than: int | None,
        who: list[Any],
        ticket: int,
        serial: int | None = None,
        reads: bool = False,
    ) -> list[Any]:
        """Return a version, which the caller has a lease of from now on; or a state that ``wait`` waits to
        change, and why there is no such version. ``serial``: see ``Catalogue.find``; ``reads``:
        whether the caller is noted as a reader of it.
        """
        with self._changing():
            version = self._catalogue.find(number, newer_than, serial)
            if version is None:
                return [None, self._state, self._why(number)]
            opened = self._leased(version, Lease(self._who(who), ticket))
            if reads:
                self._figures.has_read(who[0], version.serial)
            return opened

    def open_serial(self, serial: int, who: list[Any], ticket: int) -> list[Any] | None:
        """Return the version that became whole as the ``serial``-th, as ``open`` does, for a host's copy;
        None if it is gone.
        """
        with self._changing():
            version = self._catalogue.by_serial(serial)
            if version is None:
                return None
            return self._leased(version, Lease(self._who(who), ticket))

    def _leased(self, version: Version, lease: Lease) -> list[Any]:
        self._catalogue.lease(version, lease)
        layout, memory = version.assembly.layout.to_wire(), self._segments.described(version.memory)
        return [version.number, layout, memory, self._segments.live, version.serial]

    def read(self, who: list[Any], ticket: int, blocks: list[list[Any]]) -> list[Tensor]:
        """Return blocks of a version that the caller has a lease of."""
        with self._lock:
            version = self._catalogue.leased(Lease(self._who(who), ticket))
            found = [box_from_wire(box).of(self._tensor(version, name)) for name, box in blocks]
            self._figures.sent += sum(each.nbytes for each in found)
        return [each.contiguous() for each in found]

    def changes(self, who: list[Any], ticket: int, have: int) -> list[list[Any]] | None:
        """Return in which elements of which tensors a leased version differs from another one, for a host's
        copy that has that; None if the other one is gone, or too much differs.
        """
        between = Lease(self.own, new_id())
        with self._changing():
            version = self._catalogue.leased(Lease(self._who(who), ticket))
            base = self._catalogue.by_serial(have)
            if base is None or base.assembly.layout.specs != version.assembly.layout.specs:
                return None
            self._catalogue.lease(base, between)
            pairs = [
                (name, self._tensor(base, name), self._tensor(version, name))
                for name in base.assembly.layout.specs
            ]
        key, known = (have, version.serial), self._changes_between
        try:
            size = version.assembly.layout.bytes
            found = known[key] if key in known else delta.changes(pairs, size // _LEAST_GAIN)
        finally:
            with self._changing():
                self._catalogue.release(between, used=False)
        with self._lock:
            _note(known, key, found, _MOST_CHANGES)
            if found is not None:
                sent = sum(gaps.nbytes + bits.nbytes for _, gaps, bits in found)
                self._figures.sent += sent
                self._figures.saved += size - sent
        return found

    def source(self, serial: int, who: list[Any], copy: int, failed: list[int]) -> list[Any] | None:
        """Return the worker and the id of the copy from which another one gets a version; None: from here.
        See ``Hosts.source``.
        """
        with self._lock:
            there = {each.serial for each in self._catalogue.there()}
            return self._described(self._hosts.source(serial, (who[1], copy), failed, there))

    def copy_at(self, host: str, who: list[Any], copy: int, failed: int | None) -> list[Any] | None:
        """Return the worker that keeps the copy of a host, and the copy's id. See ``Hosts.copy_at``."""
        with self._lock:
            second = None if self._second is None else self._second.on_host(host)
            return self._described(self._hosts.copy_at(host, (who[1], copy), failed, second))

    def _described(self, place: Place | None) -> list[Any] | None:
        member = None if place is None else self._members.find(place[0])
        return None if place is None or member is None else [member.to_wire(), place[1]]

    def release(self, who: list[Any], ticket: int, used: bool) -> None:
        """End a lease."""
        with self._changing():
            self._catalogue.release(Lease(self._who(who), ticket), used=used)

    # ---- versions

    def tag(self, name: str, number: int | None) -> None:
        """Give a tag to a version, or take it away."""
        with self._changing():
            self._catalogue.tag(name, number)

    def metadata(self, number: int | str | None) -> dict[str, Any]:
        """Return the metadata of a version."""
        with self._lock:
            version = self._catalogue.find(number, None)
            if version is None:
                what = "version" if number is None else f"version {number!r}"
                raise WeightsError(f"store '{self.name}' has no {what}: {self._why(None)}")
            return dict(version.metadata)

    def drop(self, number: int) -> None:
        """Remove a version."""
        with self._changing():
            self._catalogue.drop(number)

    def versions(self) -> list[int]:
        """Return the numbers of the whole versions, the newest last."""
        with self._lock:
            return list(self._catalogue.whole)

    def usage(self) -> dict[str, Any]:
        """Return what the store has and uses now."""
        with self._lock:
            return self._figures.usage(self._segments.bytes, self._number_of_copies())

    def observed(self) -> dict[str, Any]:
        """Return what ``farcall ps``, the page and the metrics show."""
        with self._lock:
            return self._figures.observed(self._segments.bytes, self._number_of_copies())

    def _number_of_copies(self) -> int:
        return 1 + (self._second is not None and self._second.is_whole())

    def _why(self, number: int | str | None) -> str:
        """Describe why a reader has to wait."""
        waited = [each for each in self._catalogue.open.values() if number in (None, each.number)]
        missing = "".join(f"; of version {each.number} {each.missing()}" for each in waited)
        return f"it has {list(self._catalogue.whole) or 'none'}{missing}"

    # ---- waits

    def wait(self, state: int, who: list[Any], ticket: int) -> torch.futures.Future[int]:
        """Return a future that is completed once there are other versions than in ``state``, or the wait has
        been given up, or its worker is lost.
        """
        future: torch.futures.Future[int] = torch.futures.Future()
        lease = Lease(self._who(who), ticket)
        with self._lock:
            ended = self._closed or lease in self._given_up or self._catalogue.has_lost(lease.holder)
            if self._state == state and not ended:
                self._waiting[lease] = future
            else:
                future.set_result(self._state)
        return future

    def give_up(self, who: list[Any], ticket: int) -> None:
        """End a wait, which may come later."""
        lease = Lease(self._who(who), ticket)
        with self._lock:
            _note(self._given_up, lease, None, _MOST_GIVEN_UP)
            self._answer([lease])

    def _wake(self) -> None:
        self._state += 1
        self._answer(list(self._waiting))

    def _answer(self, leases: Iterable[Lease]) -> None:
        answered = [self._waiting.pop(lease) for lease in leases if lease in self._waiting]
        if answered:
            self._run_soon([(future.set_result, self._state) for future in answered])

    # ---- inside

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock; afterwards free memory, wake waiting readers if the newest version or a tag is
        another one, and writers if an open version has ended, and tell the second copy.
        """
        with self._lock:
            if self._closed:
                raise self._closed_error()
            catalogue = self._catalogue
            before, open_before = list(catalogue.whole.values()), set(catalogue.open)
            tags = dict(catalogue.tags)
            try:
                yield
            finally:
                after = list(catalogue.whole.values())
                segments = len(after[-1].memory) if after else 1
                self._segments.free(catalogue.freed(), (catalogue.keep + 1) * segments)
                for version in catalogue.take_given_up():
                    text = "version %d of store '%s' is given up: %s"
                    logger.warning(text, version.number, self.name, version.missing())
                is_tagged = tags != catalogue.tags
                if after[-1:] != before[-1:] or is_tagged or open_before - catalogue.open.keys():
                    self._wake()
                if (after != before or is_tagged) and self._second is not None:
                    self._second.update(self._listing())

    def _closed_error(self) -> RpcError:
        return WorkerLostError(f"the worker that keeps store '{self.name}' is leaving its group")

    def _tensor(self, version: Version, name: str) -> Tensor:
        """Return a tensor of a version."""
        if name not in version.assembly.layout.entries:
            raise WeightsError(f"version {version.number} of store '{self.name}' has no tensor {name!r}")
        return version.assembly.layout.tensor(self._segments.tensors(version.memory), name)

    def _who(self, wire: list[Any]) -> Who:
        """Return a caller of what has travelled: name, incarnation, and its process if that can use memory of
        this one; None if it cannot. One that has ever used it may use it still.
        """
        name, incarnation, *process = wire
        if process and (process[0] is not None or incarnation not in self._processes):
            self._processes[incarnation] = process[0]
        return Who(name, incarnation)

    def _peer_gone(self, peer: Peer, reason: str) -> None:
        who = Who(peer.member.name, peer.incarnation)
        if self._second is not None:
            self._second.lost(peer.incarnation)
        # not on the loop's thread, which must not wait for the lock
        self._run_soon([(self._lose, (who, reason))])

    def _lose(self, lost: tuple[Who, str]) -> None:
        who, reason = lost
        process = self._processes.pop(who.incarnation, _UNKNOWN)
        lives = process is not None and not has_ended(process)
        with contextlib.suppress(WorkerLostError, WeightsError), self._changing():  # raised after ``close``
            incomplete = self._catalogue.lost(who, lives=lives)
            self._answer([lease for lease in self._waiting if lease.holder == who])
            if incomplete:
                self._wake()  # a writer that waits for room may have it now
            for version in incomplete:
                text = "version %d of store '%s' is not shown: %s (%s)"
                logger.warning(text, version.number, self.name, version.missing(), reason)

    def close(self) -> None:
        """Release all memory: the agent has left its group."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.agent.lifecycle.hooks.gone.remove(self._peer_gone)
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.set_result(self._state)
        if self._second is not None:
            self._second.close()
        self._segments.close()

    def abandon(self) -> None:
        """Close the descriptors in a forked child."""
        self._segments.abandon()


def _note(noted: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Add to a dictionary, which has the last ``most`` keys."""
    noted.pop(key, None)
    noted[key] = value
    if len(noted) > most:
        del noted[next(iter(noted))]
