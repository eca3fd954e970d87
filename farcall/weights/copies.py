"""The copy that another host has of a store: its processes share it, and fetch each version once.

The store's worker names one process for each host that asks, the first one; that one keeps the copy, as a
keeper of its own (``keeper.py``), which has the versions under the numbers of their order. A reader of the
host holds a lease of a version at the store, has the copy bring it, and reads it from the copy's memory. The
copy gets the blocks, or only what has changed since the version that it has. If its process dies, the store
names another one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from torch import Tensor

from farcall.weights import delta
from farcall.weights.blocks import Box, Piece
from farcall.weights.errors import WeightsError
from farcall.weights.keeper import Keeper
from farcall.weights.keeper import forget as forget_store
from farcall.weights.keeper import keep as keep_store
from farcall.weights.layout import Layout
from farcall.weights.replication import Listing
from rpc.agent.agent import Agent
from rpc.serialization.settings import allow_function

__all__ = ["HostCopy", "Reading", "Source", "bring", "copy_of", "offer", "prepare", "release"]


class Reading(Protocol):
    """A version of the store, while the copy brings it."""

    layout: Layout

    def changes(self, have: int) -> Sequence[tuple[str, Tensor, Tensor]] | None:
        """Return what has changed since another version, by tensor; None if the whole takes less."""

    def fill(self, pieces: Mapping[str, Sequence[Piece]]) -> None:
        """Copy blocks of it into local memory."""


class Source(Protocol):
    """The store, as its copy uses it: a handle of this process."""

    def reading(self, serial: int) -> contextlib.AbstractContextManager[Reading]:
        """Have a lease of a version inside the block."""


class HostCopy:
    """The copy that this process keeps. From any thread.

    Args:
        keeper: has the versions, by the numbers of their order.
        source: the store.
    """

    def __init__(self, keeper: Keeper, source: Source) -> None:
        keeper.describe(1)
        self.keeper = keeper
        self._source = source
        self._bringing = threading.Lock()
        """Held while a version is brought, so that each comes once."""
        self._ended = False

    def bring(self, serial: int, who: list[Any], ticket: int) -> list[Any]:
        """Get a version unless it is here, and return it as ``Keeper.open`` does, with a lease."""
        with self._bringing:
            self._get(serial)
            return self.keeper.open(serial, None, who, ticket)

    def follow(self, keep: int, serials: Sequence[int]) -> None:
        """Have these versions of the store, and no others. ``keep`` of them stay, besides those with tags."""
        with self._bringing:
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
            self._ended = True
            self.keeper.take_over(name, listing)
            return self.keeper

    def _get(self, serial: int) -> None:
        if self._ended:
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
        changes = None if have is None else version.changes(have)
        if have is None or changes is None:
            version.fill(
                {
                    name: [Piece(tensor, Box((0,) * tensor.dim(), tuple(tensor.shape)))]
                    for name, tensor in new.items()
                    if tensor.numel()
                }
            )
        else:
            for name, old in self.keeper.tensors(have).items():
                new[name].copy_(old)
            for name, gaps, bits in changes:
                delta.apply(gaps, bits, new[name])
        self.keeper.written(serial, 0, own)


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
    """Keep that copy no longer."""
    with _lock:
        copy = _copies.pop((store, epoch, incarnation), None)
    if copy is not None:
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
    copy = _copies.get((store, epoch, incarnation))
    if copy is None:
        raise WeightsError(f"this process keeps no copy of store '{store}'")
    return copy.bring(serial, who, ticket)
