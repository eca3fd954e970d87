"""Blocks of a version: in the memory of this host, or in calls, and from other hosts' copies."""

from __future__ import annotations

import collections
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from torch import Tensor

from farcall.weights.blocks import Box, Piece
from farcall.weights.copies import Arrival
from farcall.weights.errors import WeightsError
from farcall.weights.layout import Layout
from farcall.weights.memory import Mapped
from farcall.weights.node import ask, new_id
from rpc.agent.agent import Agent
from rpc.errors import RpcError
from rpc.group.workers import Member

__all__ = ["Batch", "Held", "Reading", "Serving", "blocks_of", "check", "in_window"]

logger = logging.getLogger(__name__)

Batch = list[tuple[str, Box, Tensor]]
"""Names and blocks of whole tensors, and local memory."""

_WINDOW: Final = 6
"""Number of calls with blocks under way."""


@dataclass(frozen=True, slots=True)
class Held:
    """A version that this process has a lease of, with this ticket."""

    ticket: int
    number: int
    layout: Layout
    segments: list[Any]
    live: list[Any]
    serial: int

    @classmethod
    def of(cls, ticket: int, answer: Any) -> Held:
        """Return what ``Keeper.open`` has described."""
        number, wire, segments, live, serial = answer
        return cls(ticket, number, Layout.from_wire(wire), segments, live, serial)


def blocks_of(
    layout: Layout, mapped: Sequence[Mapped], pieces: Mapping[str, Sequence[Piece]]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name, local memory, and the block of a version in the memory of this host, of each piece."""
    data = [each.data for each in mapped]
    for name, own in pieces.items():
        whole = layout.tensor(data, name)
        for piece in own:
            yield name, piece.local, piece.box.of(whole)


def in_window(call: Callable[[Any], Any], batches: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
    """Make a call for each batch, several at a time; yields the batches with their answers."""
    under_way: collections.deque[tuple[Any, Any]] = collections.deque()
    try:
        for batch in batches:
            under_way.append((batch, call(batch)))
            if len(under_way) >= _WINDOW:
                done, future = under_way.popleft()
                yield done, future.wait()
        while under_way:
            done, future = under_way.popleft()
            yield done, future.wait()
    finally:  # after an error, no block may be written later than those of another attempt
        for _, future in under_way:
            with contextlib.suppress(Exception):
                future.wait()


def check(store: str, batch: Batch, data: Any) -> None:
    """Raise ``WeightsError`` if these are not the blocks that were asked for."""
    for (name, _, local), tensor in zip(batch, data, strict=True):
        if tensor.shape != local.shape or tensor.dtype != local.dtype:
            raise WeightsError(f"store '{store}' sent another block of {name!r} than was asked for")


class Serving(Protocol):
    """A handle of the store, as ``Reading`` uses it."""

    agent: Agent
    name: str

    def ask(self, what: str, *args: Any) -> Any:
        """Call a method of the keeper."""

    def read(self, ticket: int, batch: Batch) -> Any:
        """Ask for blocks of a leased version; returns a future."""

    def admitted(self, wire: Any) -> Member:
        """Return a worker that the store has named, to which calls can be made."""


class Reading:
    """A version of the store while this host's copy brings it; see ``copies.Reading``."""

    def __init__(self, handle: Serving, held: Held, copy_id: int) -> None:
        self.layout = held.layout
        self._handle = handle
        self._held = held
        self._copy_id = copy_id
        self._who = [handle.agent.info.name, handle.agent.incarnation]

    def changes(self, have: int) -> Sequence[tuple[str, Tensor, Tensor]] | None:
        """See ``copies.Reading``."""
        found: Sequence[tuple[str, Tensor, Tensor]] | None = self._handle.ask(
            "changes", self._who, self._held.ticket, have
        )
        return found

    def fill(self, arrival: Arrival) -> None:
        """See ``copies.Reading``."""
        handle, held, failed = self._handle, self._held, list[int]()
        while arrival.missing():
            source = handle.ask("source", held.serial, self._who, self._copy_id, failed)
            if source is None:
                self._get(arrival, lambda index: handle.read(held.ticket, arrival.blocks[index]))
                return
            member = handle.admitted(source[0])
            try:
                with self._relaying(member, source[1]) as block:
                    self._get(arrival, block)
            except RpcError as error:
                failed.append(member.incarnation)
                logger.info("another source of store '%s' is asked: %s", handle.name, error)

    def _get(self, arrival: Arrival, call: Callable[[int], Any]) -> None:
        """Get the blocks that have not arrived; ``call`` asks for one, by its index."""
        for index, data in in_window(call, iter(arrival.missing())):
            check(self._handle.name, arrival.blocks[index], data)
            arrival.put(index, data)

    @contextlib.contextmanager
    def _relaying(self, member: Member, copy_id: int) -> Iterator[Callable[[int], Any]]:
        """Have another host's copy keep the version; the value asks it for blocks."""
        agent, serial, ticket = self._handle.agent, self._held.serial, new_id()
        who = [*self._who, None]  # this process uses no memory of the other host

        def later(what: str, *args: Any) -> Any:
            called = member.incarnation, copy_id, self._handle.name, what, list(args)
            return agent.call_async(member.name, ask, called, {}, 0.0)

        try:
            later("relay", serial, who, ticket).wait()
            yield partial(later, "block", serial)
        finally:
            with contextlib.suppress(RpcError):  # it is gone, and the lease with it
                later("release", who, ticket, False)
