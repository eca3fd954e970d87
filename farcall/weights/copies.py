"""The copy that another host has of a store: its processes share it, and fetch each version once.

The store's worker names one process for each host that asks, the first one; that one keeps the copy, as a
keeper of its own (``keeper.py``), which has the versions under the numbers of their order. A reader of the
host holds a lease of a version at the store, has the copy bring it, and reads it from the copy's memory. The
copy gets the blocks, or only what has changed since the version that it has. If its process dies, the store
names another one.

Blocks come from the copy of the host that has asked for the version before, if there is one, as soon as they
are there; so a version goes from the store's host once, and on from host to host (``Keeper.source``).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from farcall.weights import delta
from farcall.weights.blocks import Box, Piece
from farcall.weights.errors import WeightsError
from farcall.weights.keeper import Keeper
from farcall.weights.keeper import forget as forget_store
from farcall.weights.keeper import keep as keep_store
from farcall.weights.layout import Layout
from farcall.weights.pieces import batches
from farcall.weights.replication import Listing
from rpc.agent.agent import Agent
from rpc.functions import async_execution
from rpc.serialization.settings import allow_function

__all__ = [
    "Arrival",
    "HostCopy",
    "Reading",
    "Source",
    "block",
    "bring",
    "copy_of",
    "offer",
    "prepare",
    "relay",
    "release",
]


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
        wholes = {
            name: [Piece(tensor, Box((0,) * tensor.dim(), tuple(tensor.shape)))]
            for name, tensor in tensors.items()
            if tensor.numel()
        }
        self.blocks = list(batches(wholes))
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


class Reading(Protocol):
    """A version of the store, while the copy brings it."""

    layout: Layout

    def changes(self, have: int) -> Sequence[tuple[str, Tensor, Tensor]] | None:
        """Return what has changed since another version, by tensor; None if the whole takes less."""

    def fill(self, arrival: Arrival) -> None:
        """Get the blocks of it."""


class Source(Protocol):
    """The store, as its copy uses it: a handle of this process."""

    def reading(self, serial: int) -> contextlib.AbstractContextManager[Reading]:
        """Have a lease of a version inside the block."""


class HostCopy:
    """The copy that this process keeps. From any thread.

    Args:
        keeper: has the versions, by the numbers of their order.
        source: the store.

    Attributes:
        ended: whether it is the store itself by now.
    """

    def __init__(self, keeper: Keeper, source: Source) -> None:
        keeper.describe(1)
        self.keeper = keeper
        self._source = source
        self._bringing = threading.Lock()
        """Held while a version is brought, so that each comes once."""
        self.ended = False
        self._follows = False
        self._arrivals: dict[int, Arrival] = {}
        """The version that is brought, or was brought last."""

    def bring(self, serial: int, who: list[Any], ticket: int) -> list[Any]:
        """Get a version unless it is here, and return it as ``Keeper.open`` does, with a lease."""
        with self._bringing:
            if self._follows:  # an older version must not take the place of one that is listed
                self.keeper.describe(len({*self.keeper.versions(), serial}))
            self._get(serial)
            return self.keeper.open(serial, None, who, ticket)

    def follow(self, keep: int, serials: Sequence[int]) -> None:
        """Have these versions of the store, and no others. ``keep`` of them stay, besides those with tags."""
        with self._bringing:
            self._follows = True
            self.keeper.describe(max(keep, len(serials)))
            here = self.keeper.versions()
            others = [each for each in here if each not in serials]
            base = others[-1:] if len(others) == len(here) else []  # what has changed since it is less
            for serial in others[: len(others) - len(base)]:
                self.keeper.drop(serial)
            for serial in serials:
                self._get(serial)
            for serial in base:
                if serial in self.keeper.versions():
                    self.keeper.drop(serial)

    def take_over(self, name: str, listing: Listing) -> Keeper:
        """Make the copy the store, and return its keeper."""
        with self._bringing:
            self.ended = True
            self.keeper.take_over(name, listing)
            return self.keeper

    def _get(self, serial: int) -> None:
        if self.ended:
            raise WeightsError("this copy is the store itself by now")
        if serial not in self.keeper.versions():
            with self._source.reading(serial) as version:
                self._bring(serial, version)

    def _bring(self, serial: int, version: Reading) -> None:
        tensors = [
            [name, spec.dtype, list(spec.shape), [[[0] * len(spec.shape), list(spec.shape)]]]
            for name, spec in version.layout.specs.items()
        ]
        have = next(reversed(self.keeper.versions()), None)
        own = list(self.keeper.own)
        self.keeper.begin(serial, [0, 1], tensors, own, True)
        new = self.keeper.tensors(serial)
        arrival = self._arrivals[serial] = Arrival(new)
        try:
            changes = None if have is None else version.changes(have)
            if have is None or changes is None:
                version.fill(arrival)
            else:
                for name, old in self.keeper.tensors(have).items():
                    new[name].copy_(old)
                for name, gaps, bits in changes:
                    delta.apply(gaps, bits, new[name])
            self.keeper.written(serial, 0, own)
        except Exception as error:
            del self._arrivals[serial]
            arrival.fail(error)
            raise
        arrival.finish()
        for each in list(self._arrivals):
            if each != serial:
                del self._arrivals[each]

    def relay(self, serial: int, who: list[Any], ticket: int) -> None:
        """Keep a version that is here, or is being brought, for the copy of another host."""
        if serial not in self._arrivals:
            raise WeightsError("this copy does not have that version")
        self.keeper.lease(serial, who, ticket)

    def block(self, serial: int, index: int) -> torch.futures.Future[list[Tensor]]:
        """Return a future of blocks of that version."""
        arrival = self._arrivals.get(serial)
        if arrival is None or not 0 <= index < len(arrival.blocks):
            raise WeightsError("this copy does not have that version")
        return arrival.wait(index)


Key = tuple[str, int, int]
"""The name and epoch of a store, and the incarnation of the agent by which the copy is kept."""

_lock: Final = threading.Lock()
_sources: Final[dict[Key, tuple[Agent, Source]]] = {}
"""Handles of this process for stores of other hosts."""
_copies: Final[dict[Key, HostCopy]] = {}
"""The copies that this process keeps."""


def offer(store: str, epoch: int, agent: Agent, source: Source) -> None:
    """Let the store choose this process to keep its host's copy, until the agent ends."""
    key = store, epoch, agent.incarnation
    with _lock:
        if key not in _sources:
            _sources[key] = agent, source
            agent.lifecycle.hooks.closed.append(lambda: _forget(key))
            agent.lifecycle.hooks.forked.append(lambda: _forget(key))


def _forget(key: Key) -> None:
    _sources.pop(key, None)
    _copies.pop(key, None)


@allow_function
def prepare(scope: str, name: str, store: str, epoch: int, incarnation: int) -> None:
    """Called at the process that the store has chosen: keep the copy, under this name of a keeper."""
    copy_of(scope, name, store, epoch, incarnation)


def release(scope: str, name: str, store: str, epoch: int, incarnation: int) -> None:
    """Keep that copy no longer, unless it is the store itself by now."""
    with _lock:
        copy = _copies.pop((store, epoch, incarnation), None)
    if copy is not None and not copy.ended:
        forget_store(scope, name, copy.keeper)
        copy.keeper.close()


def copy_of(scope: str, name: str, store: str, epoch: int, incarnation: int) -> HostCopy:
    """Return the copy that this process keeps; the first call makes it."""
    key = store, epoch, incarnation
    with _lock:
        if key not in _copies:
            if key not in _sources:
                raise WeightsError(f"this process does not use store '{store}' any more")
            agent, source = _sources[key]
            _copies[key] = HostCopy(keep_store(scope, name, agent), source)
        return _copies[key]


@allow_function
def bring(
    _scope: str, store: str, epoch: int, incarnation: int, serial: int, who: list[Any], ticket: int
) -> list[Any]:
    """Called at that process; see ``HostCopy.bring``."""
    return _find(store, epoch, incarnation).bring(serial, who, ticket)


@allow_function
def relay(
    _scope: str, store: str, epoch: int, incarnation: int, serial: int, who: list[Any], ticket: int
) -> None:
    """Called at that process, by the copy of another host; see ``HostCopy.relay``."""
    _find(store, epoch, incarnation).relay(serial, who, ticket)


@allow_function
@async_execution
def block(
    _scope: str, store: str, epoch: int, incarnation: int, serial: int, index: int
) -> torch.futures.Future[list[Tensor]]:
    """Called at that process, by the copy of another host; see ``HostCopy.block``."""
    return _find(store, epoch, incarnation).block(serial, index)


def _find(store: str, epoch: int, incarnation: int) -> HostCopy:
    copy = _copies.get((store, epoch, incarnation))
    if copy is None:
        raise WeightsError(f"this process keeps no copy of store '{store}'")
    return copy
