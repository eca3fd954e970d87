"""The process that keeps a store: its versions and their memory, and what other workers ask of it.

Readers and writers of this host map the memory and copy by themselves; what they ask here are a few small
questions. Those of other hosts send and get blocks in calls. All of it is texts, numbers, lists and tensors,
so it works in safe mode as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any, Final

import torch
from torch import Tensor

from farcall.weights import delta
from farcall.weights.blocks import Box
from farcall.weights.catalogue import Catalogue, Lease, Version, Who
from farcall.weights.errors import WeightsError
from farcall.weights.layout import Spec, spec_from_wire
from farcall.weights.memory import AVAILABLE, DescriptorServer, Segment
from farcall.weights.replication import Listing, SecondCopy
from rpc.agent.agent import Agent
from rpc.errors import NoMemoryError, WorkerLostError
from rpc.functions import async_execution
from rpc.group.peer import Peer
from rpc.rendezvous.address import host_identity
from rpc.runtime.current import current_agent
from rpc.serialization.settings import allow_function

__all__ = [
    "GROUP",
    "TAKEN_OVER",
    "Keeper",
    "ask",
    "changed",
    "copied",
    "digest",
    "enter",
    "forget",
    "is_of_group",
    "keep",
    "keepers",
    "opened",
    "server",
]

logger = logging.getLogger(__name__)

GROUP: Final = ""
"""The scope of the stores of this process's RPC group."""

TAKEN_OVER: Final = "taken over from "
"""The scope of stores that this process has taken over begins with it; the name of their worker follows."""


def is_of_group(scope: str) -> bool:
    """Whether stores of a scope are those of an RPC group."""
    return scope == GROUP or scope.startswith((TAKEN_OVER, f"copy {TAKEN_OVER}")) or scope == f"copy {GROUP}"


class Keeper:
    """Keeps one store, in the process of an agent. From any thread.

    Attributes:
        epoch: distinguishes it from earlier keepers of the same name.
        agent: the agent, by which others ask.
        own: that agent, as writers and readers are named.
    """

    def __init__(self, name: str, agent: Agent) -> None:
        self.name = name
        self.epoch = secrets.randbits(53)
        self._catalogue = Catalogue(name)
        self._keep = 0
        self._lock = threading.RLock()  # a finalizer that runs while it is held may release a lease
        self._growing = threading.Lock()
        """Held while memory is allocated, so that parts are declared one after another."""
        self._segments: dict[int, Segment] = {}
        self._spare: list[Segment] = []
        self._numbers = 0
        self._waiting: dict[Lease, torch.futures.Future[int]] = {}
        self._changes = 0
        self._compared = 0
        self._second: SecondCopy | None = None
        self._copies: dict[str, list[int]] = {}
        """For each other host, the incarnations of workers that can keep its copy."""
        self._chains: dict[int, list[int]] = {}
        """For each version, by serial, the workers whose hosts' copies get it one from another."""
        self._changes_between: dict[tuple[int, int], list[list[Any]] | None] = {}
        self._sent_bytes = self._received_bytes = self._saved_bytes = 0
        self._whole_at: dict[int, float] = {}
        """When versions became whole, by serial, on the monotonic clock."""
        self._readers: dict[str, int] = {}
        """For each worker, by name, the serial of the version that it has read last."""
        self._closed = False
        self._server = DescriptorServer(self._duplicate) if AVAILABLE else None
        self.agent = agent
        self._run_soon = agent.calls.completions.run_soon
        self.own = Who(agent.info.name, agent.incarnation)
        hooks = agent.lifecycle.hooks
        hooks.gone.append(self._peer_gone)
        hooks.closed.append(self.close)
        hooks.forked.append(self._abandon)

    # ---- what other workers ask; see ``ask``

    def describe(self, keep: int | None, home: str = "", copies: int = 1) -> list[Any]:
        """Return what a handle needs. The largest ``keep`` and ``copies`` of all handles that have one count.
        ``home`` is the worker on which the store was made.
        """
        with self._lock:
            if keep is not None:
                self._keep = self._catalogue.keep = max(self._keep, keep)
            if copies > 1 and self._second is None:
                self._second = SecondCopy(self.agent, (home, self.name, self.epoch), host_identity())
                self._second.update(self._listing())
        number = 1 if self._second is None else 2
        return [self.epoch, host_identity(), None if self._server is None else self._server.address, number]

    def offer(self, who: list[Any], host: str) -> None:
        """A worker can keep the second copy."""
        if self._second is not None:
            self._second.offer(who[1], host)

    def copied(self, number: int) -> torch.futures.Future[None]:
        """Return a future that is completed once the second copy has a version, if it can."""
        with self._lock:
            version = self._catalogue.whole.get(number)
        if version is not None and self._second is not None:
            return self._second.wait(version.serial)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def take_over(self, name: str, listing: Listing) -> None:
        """Keep a store of which this has been the second copy: see ``Catalogue.take_over``."""
        with self._changing():
            self.name = name
            self._keep = listing.keep
            self._catalogue.take_over(name, *listing)

    def _listing(self) -> Listing:
        whole = self._catalogue.whole.values()
        versions = [[each.number, each.serial, each.metadata] for each in whole]
        return Listing(self._catalogue.keep, versions, dict(self._catalogue.tags), self._catalogue.after)

    def begin(
        self, number: int, part: list[int], tensors: list[list[Any]], who: list[Any], insist: bool
    ) -> list[Any] | int | None:
        """Declare a part of a version. Returns the layout, its segments, all segments that there are, and for
        each tensor the blocks that the caller has to write; None if the version is whole, and has this part;
        or a state that ``changed`` waits to change, since other versions have to become whole before. With
        ``insist`` they are given up instead.
        """
        specs: dict[str, Spec] = {}
        blocks: dict[str, list[Box]] = {}
        for name, dtype, shape, boxes in tensors:
            specs[name] = spec_from_wire(dtype, shape)
            blocks[name] = [Box(tuple(offset), tuple(sizes)) for offset, sizes in boxes]
        with self._growing:
            with self._changing():
                if not self._catalogue.make_room(number, Who(*who), insist=insist):
                    return self._changes
                index, count = part
                version, sizes = self._catalogue.begin(number, index, count, specs, blocks, Who(*who))
                if version.whole:
                    return None
            if sizes:
                self._grow(version, part[0], sizes)
            with self._lock:
                writes = version.assembly.writes(part[0])
                return [
                    version.assembly.layout.to_wire(),
                    self._segments_of(version),
                    self._live(),
                    [[name, [list(box) for box in boxes]] for name, boxes in writes.items() if boxes],
                ]

    def write(
        self, number: int, part: int, who: list[Any], blocks: list[list[Any]], data: list[Tensor]
    ) -> None:
        """Write blocks of a part, for a writer of another host."""
        with self._lock:
            version = self._catalogue.check_open(number, part, Who(*who))
            targets = [self._tensor(version, name, version.memory_of(part)) for name, _ in blocks]
            writes = version.assembly.writes(part)
            self._received_bytes += sum(each.nbytes for each in data)
        for target, (name, box), local in zip(targets, blocks, data, strict=True):
            where = Box(*map(tuple, box))
            if not any(_contains(own, where) for own in writes.get(name, ())):
                raise WeightsError(f"a block of {name!r} does not belong to part {part} of version {number}")
            where.of(target).copy_(local)

    def written(self, number: int, part: int, who: list[Any], metadata: dict[str, Any] | None = None) -> bool:
        """A part has been written; returns whether the version is whole now."""
        with self._changing():
            whole = self._catalogue.written(number, part, Who(*who), metadata)
            if whole:
                version = self._catalogue.whole[number]
                self._copy_earlier(version)
                self._whole_at[version.serial] = monotonic()
                if len(self._whole_at) > _MOST_NOTED:
                    del self._whole_at[next(iter(self._whole_at))]
            return whole

    def _copy_earlier(self, version: Version) -> None:
        """Copy the parts of a version that lie in memory that it has left, before anyone sees it."""
        for part, memory in version.earlier.items():
            for name, boxes in version.assembly.writes(part).items():
                source, target = self._tensor(version, name, memory), self._tensor(version, name)
                for box in boxes:
                    box.of(target).copy_(box.of(source))
        version.earlier = {}

    def compare(self, number: int, digests: list[list[Any]]) -> str | None:
        """Return the name of the first tensor of a whole version that has other values than the caller's;
        None if all are equal. ``digests`` has name, block and digest.
        """
        with self._lock:
            version = self._catalogue.find(number, None)
            if version is None:
                raise WeightsError(f"store '{self.name}' has no version {number} any more")
            self._compared += 1
            lease = Lease(self.own, self._compared)
            self._catalogue.lease(version, lease)
            tensors = [self._tensor(version, name) for name, *_ in digests]
        try:
            for tensor, (name, box, expected) in zip(tensors, digests, strict=True):
                if digest(Box(*map(tuple, box)).of(tensor)) != expected:
                    return str(name)
            return None
        finally:
            with self._changing():
                self._catalogue.release(lease, used=False)

    def tag(self, name: str, number: int | None) -> None:
        """Give a tag to a version, or take it away."""
        with self._changing():
            tags = dict(self._catalogue.tags)
            self._catalogue.tag(name, number)
            if self._catalogue.tags != tags:
                self._wake()

    def metadata(self, number: int | str | None) -> dict[str, Any]:
        """Return the metadata of a version, and its number and tags."""
        with self._lock:
            version = self._catalogue.find(number, None)
            if version is None:
                what = "version" if number is None else f"version {number!r}"
                raise WeightsError(f"store '{self.name}' has no {what}: {self._why(None)}")
            return dict(version.metadata)

    def open(
        self,
        number: int | str | None,
        newer_than: int | None,
        who: list[Any],
        ticket: int,
        serial: int | None = None,
    ) -> list[Any]:
        """Return a version, which the caller has a lease of from now on; or a state that ``changed`` waits to
        change, and why there is no such version. ``serial``: see ``Catalogue.find``.
        """
        with self._changing():
            version = self._catalogue.find(number, newer_than, serial)
            if version is None:
                return [None, self._changes, self._why(number)]
            self._catalogue.lease(version, Lease(Who(*who), ticket))
            self._readers[who[0]] = version.serial
            if len(self._readers) > _MOST_NOTED:
                del self._readers[next(iter(self._readers))]
            return self._opened(version)

    def _opened(self, version: Version) -> list[Any]:
        return [
            version.number,
            version.assembly.layout.to_wire(),
            self._segments_of(version),
            self._live(),
            version.serial,
        ]

    def _live(self) -> list[int]:
        """Return the segments that versions use or will use again, so that others need not map them anew."""
        return [*self._segments, *(each.number for each in self._spare)]

    def open_serial(self, serial: int, who: list[Any], ticket: int) -> list[Any]:
        """Return the version that became whole as the ``serial``-th, as ``open`` does, for a host's copy."""
        with self._changing():
            version = self._catalogue.by_serial(serial)
            if version is None:
                raise WeightsError(f"store '{self.name}' has that version no longer")
            self._catalogue.lease(version, Lease(Who(*who), ticket))
            return self._opened(version)

    def changes(self, who: list[Any], ticket: int, have: int) -> list[list[Any]] | None:
        """Return in which elements of which tensors a leased version differs from another one, for a host's
        copy that has that; None if the other one is gone, or too much differs.
        """
        with self._lock:
            version = self._catalogue.leased(Lease(Who(*who), ticket))
            base = self._catalogue.by_serial(have)
            if base is None or base.assembly.layout.specs != version.assembly.layout.specs:
                return None
            known: Any = self._changes_between.get((have, version.serial), _UNKNOWN)
            if known is _UNKNOWN:
                self._compared += 1
                lease = Lease(self.own, self._compared)
                self._catalogue.lease(base, lease)
                pairs = [
                    (name, self._tensor(base, name), self._tensor(version, name))
                    for name in base.assembly.layout.specs
                ]
        if known is _UNKNOWN:
            try:
                known = _changes(pairs, version.assembly.layout.bytes // _LEAST_GAIN)
            finally:
                with self._changing():
                    self._catalogue.release(lease, used=False)
        with self._lock:
            self._changes_between = {(have, version.serial): known, **self._changes_between}
            while len(self._changes_between) > _MOST_CHANGES:
                self._changes_between.popitem()
            found: list[list[Any]] | None = known
            if found is not None:
                self._saved_bytes += version.assembly.layout.bytes
            for _, gaps, bits in found or ():
                self._sent_bytes += gaps.nbytes + bits.nbytes
                self._saved_bytes -= gaps.nbytes + bits.nbytes
        return found

    def source(self, serial: int, who: list[Any], failed: list[int]) -> list[Any] | None:
        """Return the description of the worker from which a host's copy gets a version; None: from here. The
        copies form a chain, in the order in which they ask. Those that have ``failed`` are passed over.
        """
        with self._lock:
            catalogue = self._catalogue
            there = {each.serial for each in (*catalogue.whole.values(), *catalogue.leases.values())}
            self._chains = {each: chain for each, chain in self._chains.items() if each in there}
            chain = self._chains.setdefault(serial, [])
            if who[1] not in chain:
                chain.append(who[1])
            before = [each for each in chain[: chain.index(who[1])] if each not in failed]
            found = map(self.agent.group.peers.view.find, reversed(before))
            return next((each.to_wire() for each in found if each is not None), None)

    def lease(self, number: int, who: list[Any], ticket: int) -> None:
        """Keep a version, which need not be whole."""
        with self._changing():
            version = self._catalogue.whole.get(number) or self._catalogue.open.get(number)
            if version is None:
                raise WeightsError(f"store '{self.name}' has no version {number}")
            self._catalogue.lease(version, Lease(Who(*who), ticket))

    def copy_at(self, host: str, who: list[Any], failed: int | None) -> list[Any]:
        """Return the description of the worker that keeps the copy of a host: of those that have asked, the
        first one that lives.
        """
        with self._lock:
            second = None if self._second is None else self._second.host_of()
            there = self._copies.setdefault(host, [second[0]] if second and second[1] == host else [])
            members = self.agent.group.peers.view
            there[:] = [each for each in there if each != failed and members.find(each) is not None]
            if who[1] not in there:
                there.append(who[1])
            found = members.find(there[0])
            assert found is not None
            return found.to_wire()

    def tensors(self, number: int) -> dict[str, Tensor]:
        """Return the whole tensors of a version of this process's own."""
        with self._lock:
            version = self._catalogue.whole.get(number) or self._catalogue.open[number]
            return {name: self._tensor(version, name) for name in version.assembly.layout.specs}

    def read(self, who: list[Any], ticket: int, blocks: list[list[Any]]) -> list[Tensor]:
        """Return blocks of a version that the caller has a lease of."""
        with self._lock:
            version = self._catalogue.leased(Lease(Who(*who), ticket))
            found = [Box(*map(tuple, box)).of(self._tensor(version, name)) for name, box in blocks]
            self._sent_bytes += sum(each.nbytes for each in found)
        return [each.contiguous() for each in found]

    def release(self, who: list[Any], ticket: int, used: bool) -> None:
        """End a lease, or the wait for one."""
        lease = Lease(Who(*who), ticket)
        with self._changing():
            self._catalogue.release(lease, used=used)
            self._answer([lease])

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
            catalogue = self._catalogue
            return {
                "versions": list(catalogue.whole),
                "open": {number: version.missing() for number, version in catalogue.open.items()},
                "tags": dict(catalogue.tags),
                "keep": catalogue.keep,
                "bytes": sum(each.size for each in (*self._segments.values(), *self._spare)),
                "leases": len(catalogue.leases),
                "holders": sorted({lease.holder.name for lease in catalogue.leases}),
                "copies": 1 + (self._second is not None and self._second.is_whole()),
                "sent_bytes": self._sent_bytes,
                "received_bytes": self._received_bytes,
                "saved_bytes": self._saved_bytes,
                "ages": {
                    each.number: monotonic() - self._whole_at.get(each.serial, monotonic())
                    for each in catalogue.whole.values()
                },
                "readers": {
                    name: each.number
                    for name, serial in self._readers.items()
                    for each in catalogue.whole.values()
                    if each.serial == serial
                },
            }

    def observed(self) -> dict[str, Any]:
        """Return what ``farcall ps``, the page and the metrics show."""
        with self._lock:
            catalogue = self._catalogue
            return {
                "name": self.name,
                "copies": 1 + (self._second is not None and self._second.is_whole()),
                "versions": [
                    {
                        "number": each.number,
                        "since": self._whole_at.get(each.serial, monotonic()),
                        "bytes": each.assembly.layout.bytes,
                        "tags": [name for name, number in catalogue.tags.items() if number == each.number],
                        "leases": sorted({lease.holder.name for lease in each.leases})[:_MOST_SHOWN],
                        "readers": sorted(
                            name for name, serial in self._readers.items() if serial == each.serial
                        )[:_MOST_SHOWN],
                    }
                    for each in list(catalogue.whole.values())[-_MOST_SHOWN:]
                ],
                "open": {str(number): version.missing() for number, version in catalogue.open.items()},
                "bytes": sum(each.size for each in (*self._segments.values(), *self._spare)),
                "sent": self._sent_bytes,
                "received": self._received_bytes,
                "saved": self._saved_bytes,
            }

    def wait(self, state: int, lease: Lease) -> torch.futures.Future[int]:
        """Return a future that is completed once the versions are others than in ``state``, or the wait for
        the lease has been given up.
        """
        future: torch.futures.Future[int] = torch.futures.Future()
        with self._lock:
            self._answer([lease])
            if self._changes == state and not self._closed:
                self._waiting[lease] = future
            else:
                future.set_result(self._changes)
        return future

    # ---- inside

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock; afterwards free memory, and wake those that wait if the newest version is another
        one, or an open one has ended.
        """
        with self._lock:
            if self._closed:
                raise WorkerLostError(f"the worker that keeps store '{self.name}' is leaving its group")
            before, open_before = list(self._catalogue.whole.values()), set(self._catalogue.open)
            tags = self._catalogue.tags.copy()
            try:
                yield
            finally:
                self._settle()
                self._report(self._catalogue.given_up)
                self._catalogue.given_up = []
                after = list(self._catalogue.whole.values())
                if after[-1:] != before[-1:] or open_before - self._catalogue.open.keys():
                    self._wake()
                if (after != before or tags != self._catalogue.tags) and self._second is not None:
                    self._second.update(self._listing())

    def _newest(self) -> Version | None:
        return next(reversed(self._catalogue.whole.values()), None)

    def _settle(self) -> None:
        """Close memory that no version uses, or keep it for the next one."""
        closed: list[Segment] = []
        for memory, reusable in self._catalogue.freed():
            segment = self._segments.pop(memory)
            (self._spare if reusable else closed).append(segment)
        while len(self._segments) + len(self._spare) > self._most_segments() and self._spare:
            closed.append(self._spare.pop(0))
        if closed:
            self._run_soon([(_close_all, closed)])  # the system may take long to free it

    def _most_segments(self) -> int:
        """Return how many segments ``keep`` versions and one more have, if they are as the newest."""
        newest = self._newest()
        return (self._catalogue.keep + 1) * (len(newest.memory) if newest else 1)

    def _grow(self, version: Version, part: int, sizes: Iterable[int]) -> None:
        """Add memory to a version for a part that has just been declared."""
        segments: list[Segment] = []
        try:
            for size in sizes:
                segments.append(self._take(size))  # noqa: PERF401  # those before an error are kept
        except NoMemoryError as error:
            with self._changing():
                self._spare += segments
                if self._catalogue.open.get(version.number) is version:
                    self._catalogue.withdraw(version, part)
            raise NoMemoryError(
                f"there is no memory for part {part} of version {version.number} of store "
                f"'{self.name}': {error}. The versions before are still there; keep fewer (keep=), or "
                "release leases."
            ) from None
        with self._changing():
            if self._catalogue.open.get(version.number) is version:
                self._segments |= {each.number: each for each in segments}
                version.memory += [each.number for each in segments]
                return
            self._spare += segments
        raise WeightsError(f"version {version.number} of store '{self.name}' was given up meanwhile")

    def _take(self, size: int) -> Segment:
        with self._lock:
            fitting = [each for each in self._spare if size <= each.size <= size + (size >> 3)]
            if fitting:
                self._spare.remove(fitting[0])
                return fitting[0]
            closed, self._spare = self._spare, []
            self._numbers += 1
            number = self._numbers
        _close_all(closed)
        return Segment(number, size)

    def _segments_of(self, version: Version) -> list[list[int]]:
        return [[number, self._segments[number].size] for number in version.memory]

    def _tensor(self, version: Version, name: str, memory: Sequence[int] | None = None) -> Tensor:
        """Return a tensor of a version; ``memory``: that it lies in, if the version has left it."""
        if name not in version.assembly.layout.entries:
            raise WeightsError(f"version {version.number} of store '{self.name}' has no tensor {name!r}")
        memory = version.memory if memory is None else memory
        return version.assembly.layout.tensor([self._segments[each].tensor for each in memory], name)

    def _duplicate(self, number: int) -> int:
        with self._lock:
            segment = self._segments.get(number)
            return -1 if segment is None else segment.duplicate()

    def _why(self, number: int | str | None) -> str:
        """Describe why a reader has to wait."""
        waited = [each for each in self._catalogue.open.values() if number in (None, each.number)]
        missing = "".join(f"; of version {each.number} {each.missing()}" for each in waited)
        return f"it has {list(self._catalogue.whole) or 'none'}{missing}"

    def _wake(self) -> None:
        self._changes += 1
        self._answer(list(self._waiting))

    def _answer(self, leases: Iterable[Lease]) -> None:
        """End the waits for leases."""
        answered = [self._waiting.pop(lease) for lease in leases if lease in self._waiting]
        if answered:
            self._run_soon([(future.set_result, self._changes) for future in answered])

    def _peer_gone(self, peer: Peer, reason: str) -> None:
        who = Who(peer.member.name, peer.incarnation)
        incomplete: list[Version] = []
        if self._second is not None:
            self._second.lost(peer.incarnation)
        with contextlib.suppress(WorkerLostError), self._changing():  # raised after ``close``
            incomplete = self._catalogue.lost(who)
            self._answer([lease for lease in self._waiting if lease.holder == who])
            if incomplete:
                self._wake()  # a writer that waits for room may have it now
        for version in incomplete:
            text = "version %d of store '%s' is not shown: %s (%s)"
            logger.warning(text, version.number, self.name, version.missing(), reason)

    def _report(self, given_up: Iterable[Version]) -> None:
        for version in given_up:
            logger.warning(
                "version %d of store '%s' is given up: %s", version.number, self.name, version.missing()
            )

    def close(self) -> None:
        """Release all memory: the agent has left its group."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            waiting, self._waiting = self._waiting, {}
            segments = [*self._segments.values(), *self._spare]
            self._segments, self._spare = {}, []
        for future in waiting.values():
            future.set_result(self._changes)
        if self._second is not None:
            self._second.close()
        if self._server is not None:
            self._server.close()
        _close_all(segments)

    def _abandon(self) -> None:
        """Close the descriptors in a forked child."""
        if self._server is not None:
            self._server.abandon()
        _close_all([*self._segments.values(), *self._spare])


class _Observed:
    """The stores that an agent keeps, as one of its extensions; see ``farcall.observe``."""

    def __init__(self) -> None:
        self.keepers: list[tuple[str, Keeper]] = []

    def observed(self) -> list[dict[str, Any]]:
        """Return what each keeper shows; those that have been closed show nothing."""
        found = []
        for scope, keeper in self.keepers[:_MOST_SHOWN]:
            shown = keeper.observed()
            if scope.startswith("copy ") and "@" in keeper.name:  # its versions have other numbers
                shown |= {"name": keeper.name.split("@")[0], "copy": True, "versions": [], "open": {}}
            found.append(shown)
        return found


_MOST_NOTED: Final = 4096
"""Maximum number of versions whose times are noted, and of readers."""

_MOST_SHOWN: Final = 64
"""Maximum number of stores, of their versions, and of workers that have one, in a worker's state file."""

_UNKNOWN: Final[Any] = object()

_LEAST_GAIN: Final = 4
"""Differences are sent if they take at most this fraction of a version, as they cost time on both hosts."""

_MOST_CHANGES: Final = 2
"""Maximum number of pairs of versions whose differences are kept for copies of further hosts."""


def _changes(pairs: Iterable[tuple[str, Tensor, Tensor]], most: int) -> list[list[Any]] | None:
    """Return name, gaps and bits of the tensors that differ; None if they take more than ``most`` bytes."""
    found: list[list[Any]] = []
    for name, old, new in pairs:
        encoded = delta.encode(old, new, most)
        if encoded is None:
            return None
        most -= sum(map(len, encoded))
        if len(encoded[0]):
            found.append([name, *encoded])
    return found


def _close_all(segments: Sequence[Segment]) -> None:
    for segment in segments:
        segment.close()


def _contains(outer: Box, inner: Box) -> bool:
    return len(outer.offset) == len(inner.offset) and all(
        first <= begin and begin + size <= first + length
        for first, length, begin, size in zip(*outer, *inner, strict=True)
    )


def digest(tensor: Tensor) -> bytes:
    """Return a digest of the bits of a tensor."""
    data = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    bits: Any = data.numpy()
    return hashlib.blake2b(bits, digest_size=16).digest()


# ---- the keepers of this process

_lock: Final = threading.Lock()
keepers: dict[tuple[str, str], Keeper] = {}


def keep(scope: str, name: str, agent: Agent) -> Keeper:
    """Return the keeper of a store in this process; the first call makes it."""
    with _lock:
        known = keepers.get((scope, name))
        if known is None:
            known = keepers[scope, name] = Keeper(name, agent)
            agent.extensions.setdefault("weights", _Observed()).keepers.append((scope, known))
            agent.lifecycle.hooks.closed.append(partial(forget, scope, name, known))
            agent.lifecycle.hooks.forked.append(keepers.clear)
        return known


def forget(scope: str, name: str, keeper: Keeper) -> None:
    """Have the next ``keep`` make another keeper."""
    with _lock:
        if keepers.get((scope, name)) is keeper:
            del keepers[scope, name]
        observed = keeper.agent.extensions.get("weights")
        if observed is not None:
            observed.keepers = [each for each in observed.keepers if each[1] is not keeper]


def enter(scope: str, name: str, keeper: Keeper) -> None:
    """Let a keeper be found under another name, too, until its agent ends."""
    with _lock:
        keepers[scope, name] = keeper
    keeper.agent.lifecycle.hooks.closed.append(partial(forget, scope, name, keeper))


@allow_function
def opened(scope: str, name: str, versions: int | None, copies: int = 1) -> list[Any]:
    """Called at the keeper: open a store. Those of an RPC group are made here if they are not there."""
    if scope == GROUP:
        keeper = keep(scope, name, current_agent())
        return keeper.describe(versions, keeper.agent.info.name, copies)
    return _find(scope, name, None).describe(versions, scope.removeprefix(TAKEN_OVER), copies)


@allow_function
def server(scope: str, name: str) -> list[Any]:
    """Called at the keeper: return the description of its worker."""
    return _find(scope, name, None).agent.group.peers.view.me.to_wire()


@allow_function
def ask(scope: str, name: str, epoch: int, what: str, args: list[Any]) -> Any:
    """Called at the keeper: one of its methods."""
    return _ASKED[what](_find(scope, name, epoch), *args)


@allow_function
@async_execution
def changed(
    scope: str, name: str, epoch: int, state: int, who: list[Any], ticket: int
) -> torch.futures.Future[int]:
    """Called at the keeper: answered once there are other versions than in ``state``."""
    return _find(scope, name, epoch).wait(state, Lease(Who(*who), ticket))


@allow_function
@async_execution
def copied(scope: str, name: str, epoch: int, number: int) -> torch.futures.Future[None]:
    """Called at the keeper: answered once the second copy has a version."""
    return _find(scope, name, epoch).copied(number)


def _find(scope: str, name: str, epoch: int | None) -> Keeper:
    keeper = keepers.get((scope, name))
    if keeper is None or epoch not in (None, keeper.epoch):
        again = (
            "was started again since, and its versions are gone: open it again" if keeper else "is not here"
        )
        raise WeightsError(f"store '{name}' {again}")
    return keeper


_ASKED: Final[Mapping[str, Callable[..., Any]]] = {
    method.__name__: method
    for method in (
        Keeper.begin,
        Keeper.write,
        Keeper.written,
        Keeper.compare,
        Keeper.open,
        Keeper.open_serial,
        Keeper.changes,
        Keeper.copy_at,
        Keeper.source,
        Keeper.offer,
        Keeper.tag,
        Keeper.metadata,
        Keeper.read,
        Keeper.release,
        Keeper.drop,
        Keeper.versions,
        Keeper.usage,
    )
}
