"""What a process has to do with one keeper of a store: the calls, and the memory that both share.

A handle belongs to one keeper for its whole life. ``Store`` has one, and gets another one if the store's
second copy takes over.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, Final

from torch import Tensor

from farcall.weights import copies, keeper, successors
from farcall.weights.blocks import Box, Piece
from farcall.weights.errors import WeightsError
from farcall.weights.layout import Layout, Spec
from farcall.weights.memory import AVAILABLE, Access, Mapped, fetch_descriptor, map_segment
from farcall.weights.pieces import batches, box_from_wire, box_to_wire
from farcall.weights.replication import Key
from rpc.agent.agent import Agent
from rpc.errors import NoMemoryError, RpcError, RpcTimeoutError, WorkerLostError
from rpc.group.workers import Member
from rpc.lifecycle.own_backend import admit
from rpc.rendezvous.address import host_identity
from rpc.runtime.blocking import this_thread

__all__ = ["Handle", "Held", "Wanted"]

logger = logging.getLogger(__name__)

_WAIT_SECONDS: Final = 20.0
"""Maximum time in seconds of one call that waits for a version; longer ones would be reported as slow."""

_OTHERS_SECONDS: Final = 60.0
"""How long a writer that is two versions ahead waits for the others, before it gives up their versions."""

Batch = list[tuple[str, Box, Tensor]]
"""Names and blocks of whole tensors, and local memory."""

_WINDOW: Final = 6
"""Number of calls with blocks under way."""

_MOST_UNREACHABLE: Final = 256
"""Maximum number of workers that are remembered as unreachable."""

_ATTEMPTS: Final = 4
"""Maximum number of processes that a reader asks for this host's copy, one after another."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The version that a reader asks for.

    Attributes:
        version: its number or tag; None: the newest.
        newer_than: number of a version that it has to be newer than.
        serial: the place in the order of that one, if it is known.
        timeout: how long to wait for it, in seconds; None: no limit.
        deadline: when that time ends.
    """

    version: int | str | None
    newer_than: int | None
    serial: int | None
    timeout: float | None
    deadline: float


class Handle:
    """A handle of one keeper. From any thread.

    Args:
        agent: the agent that calls it.
        scope: the group of stores that the store belongs to.
        name: of the store.
        on: the worker that keeps it, by name.
        keep, copies: see ``Store``.
        home: the worker from which ``on`` has taken the store over, if it has.
    """

    def __init__(
        self,
        agent: Agent,
        scope: str,
        name: str,
        on: str,
        keep: int | None = None,
        copies: int = 1,
        home: str | None = None,
    ) -> None:
        self.agent = agent
        self.name = name
        self.on = on
        self.home = on if home is None else home
        self._scope = scope if home is None else successors.scope_of(home)
        self._who = [agent.info.name, agent.incarnation]
        self._maps: dict[tuple[int, Access], Mapped] = {}
        self._copy: Handle | None = None
        self._copy_keeper: int | None = None
        self._copy_failed: int | None = None
        self._unreachable: list[int] = []
        """Workers whose copies this one has lost, or never reached."""
        self._lock = threading.RLock()  # a finalizer that runs while it is held may use the store
        self._waits: set[int] = set()
        """Tickets of the waits that a shutdown ends."""
        answer = self.call(successors.opened, name, keep, copies)
        if isinstance(answer, str):  # another worker has taken over from that one
            self.on, self._scope = answer, successors.scope_of(on)
            answer = self.call(successors.opened, name, keep, copies)
        self._take(answer)

    def _take(self, answer: Any) -> None:
        self.epoch, host, channel, self.copies = answer
        self._channel: list[Any] | None = channel if host == host_identity() else None
        if self.copies > 1 and self.on != self.agent.info.name:
            key = self.home, self.name, self.epoch, self.agent.incarnation
            successors.be_ready(key, self.agent, lambda: self._make_follower(key))
            self.ask("offer", self._who, host_identity())

    def _make_follower(self, key: Key) -> successors.Follower:
        where = self._where_copy_is(self.agent.incarnation)

        def make() -> copies.HostCopy:
            copies.offer(self.name, self.epoch, self.agent, self)
            return copies.copy_of(*where)

        return successors.Follower(key, self.agent, self.is_there, make, lambda: copies.release(*where))

    def _where_copy_is(self, incarnation: int) -> tuple[str, str, str, int, int]:
        store = self.name, self.epoch, incarnation
        return f"copy {self._scope}", "@".join(map(str, store)), *store

    def is_there(self) -> bool:
        """Whether the worker has this very store still."""
        try:
            self.ask("versions")
        except RpcError:
            return False
        return True

    # ---- writing

    def put(
        self,
        number: int,
        part: tuple[int, int],
        pieces: Mapping[str, Sequence[Piece]],
        specs: Mapping[str, Spec],
        metadata: dict[str, Any],
    ) -> bool:
        """Write a part of a version; returns whether it is whole. With two copies, both have it then."""
        index, count = part
        tensors = [
            [name, spec.dtype, list(spec.shape), [box_to_wire(piece.box) for piece in pieces[name]]]
            for name, spec in specs.items()
        ]
        answer = self._begin(number, [index, count], tensors)
        if answer is None:
            self._check_same(number, pieces)
            whole = True
        else:
            wire, segments, live, writes = answer
            chosen = {name: {box_from_wire(box) for box in boxes} for name, boxes in writes}
            mine = {
                name: [piece for piece in pieces[name] if piece.box in boxes]
                for name, boxes in chosen.items()
            }
            layout = Layout.from_wire(wire)
            mapped = self.mapped(segments, live, Access.WRITE)
            if mapped is None:
                self._send(number, index, mine)
            else:
                for name, own in mine.items():
                    tensor = layout.tensor([each.data for each in mapped], name)
                    for piece in own:
                        piece.box.of(tensor).copy_(piece.local)
            whole = bool(self.ask("written", number, index, self._who, metadata))
        if whole and self.copies > 1:
            self._wait_for_second_copy(number)
        return whole

    def _wait_for_second_copy(self, number: int) -> None:
        while True:
            with contextlib.suppress(RpcTimeoutError):
                self.call(keeper.copied, self.name, self.epoch, number, timeout=_WAIT_SECONDS)
                return

    def _begin(self, number: int, part: list[int], tensors: list[Any]) -> Any:
        """Declare a part; waits while other writers have not finished earlier versions."""
        deadline = monotonic() + _OTHERS_SECONDS
        while True:
            left = deadline - monotonic()
            answer = self.ask("begin", number, part, tensors, self._who, left <= 0)
            if not isinstance(answer, int):
                return answer
            ticket = _ticket()
            self._wait_for_change(answer, ticket, left)
            self._release(ticket, used=False)

    def _send(self, number: int, part: int, pieces: Mapping[str, Sequence[Piece]]) -> None:
        """Send the blocks of a part to another host."""

        def call(batch: list[tuple[str, Box, Tensor]]) -> Any:
            blocks = [[name, box_to_wire(box)] for name, box, _ in batch]
            data = [local.cpu().contiguous() for *_, local in batch]
            return self.ask_later("write", number, part, self._who, blocks, data)

        for _ in self._in_window(call, batches(pieces)):
            pass

    def _check_same(self, number: int, pieces: Mapping[str, Sequence[Piece]]) -> None:
        digests = [
            [name, box_to_wire(piece.box), keeper.digest(piece.local)]
            for name, own in pieces.items()
            for piece in own
        ]
        other = self.ask("compare", number, digests)
        if other is not None:
            raise WeightsError(
                f"version {number} of store '{self.name}' is whole already, with other values of {other!r}. "
                "A version never changes: give another number, or drop() this one before."
            )

    # ---- reading

    @contextlib.contextmanager
    def leased(self, wanted: Wanted, used: Callable[[], bool] = lambda: False) -> Iterator[Held]:
        """Have a lease of a version inside the block; ``used``: whether its memory is used after it."""
        ticket = _ticket()
        try:
            yield Held.of(ticket, self._wait(wanted, ticket))
        finally:
            self._release(ticket, used=used())

    def _wait(self, wanted: Wanted, ticket: int) -> list[Any]:
        version, newer_than, serial = wanted.version, wanted.newer_than, wanted.serial
        while True:
            answer: list[Any] = self.ask("open", version, newer_than, self._who, ticket, serial)
            if answer[0] is not None:
                return answer
            left = wanted.deadline - monotonic()
            if left <= 0:
                what = "version" if version is None else f"version {version!r}"
                what += "" if newer_than is None else f" newer than {newer_than}"
                raise RpcTimeoutError(
                    f"store '{self.name}' on worker '{self.on}' had no {what} within {wanted.timeout:g} s: "
                    f"{answer[2]}"
                )
            self._wait_for_change(answer[1], ticket, left)

    def _wait_for_change(self, state: int, ticket: int, seconds: float) -> None:
        timeout = max(min(seconds, _WAIT_SECONDS), 0.001)
        if not this_thread.runs_callees:  # a graceful shutdown goes on with what others have called here
            with self._lock:
                self._waits.add(ticket)
            if _Leaving.has_begun(self):
                with self._lock:
                    self._waits.discard(ticket)
                raise RpcError(f"this worker is shutting down: it waits for store '{self.name}' no more")
        try:
            with contextlib.suppress(RpcTimeoutError):
                self.call(keeper.changed, self.name, self.epoch, state, self._who, ticket, timeout=timeout)
        finally:
            with self._lock:
                self._waits.discard(ticket)

    def end_waits(self) -> None:
        """End the waits of this process's own threads: a graceful shutdown waits for calls."""
        with self._lock:
            waits = list(self._waits)
        for ticket in waits:
            with contextlib.suppress(RpcError):
                self.ask_later("release", self._who, ticket, False)

    def _end(self, ticket: int, used: Callable[[], bool]) -> None:
        self._release(ticket, used=used())

    def _release(self, ticket: int, *, used: bool) -> None:
        with contextlib.suppress(RpcError):  # the worker is gone, and the lease with it
            self.ask("release", self._who, ticket, used)

    def fetch(self, ticket: int, pieces: Mapping[str, Sequence[Piece]]) -> None:
        """Get blocks from another host; all of them, before the first one is copied into local memory."""
        for local, data in list(self._arriving(ticket, pieces)):
            local.copy_(data)

    def _arriving(
        self, ticket: int, pieces: Mapping[str, Sequence[Piece]]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Get blocks from another host; yields local memory, and what is to be copied into it."""
        for batch, data in self._in_window(partial(self._read, ticket), batches(pieces)):
            self._check(batch, data)
            for (*_, local), tensor in zip(batch, data, strict=True):
                yield local, tensor

    def _read(self, ticket: int, batch: Batch) -> Any:
        return self.ask_later("read", self._who, ticket, [[name, box_to_wire(box)] for name, box, _ in batch])

    def _check(self, batch: Batch, data: Any) -> None:
        for (name, _, local), tensor in zip(batch, data, strict=True):
            if tensor.shape != local.shape or tensor.dtype != local.dtype:
                raise WeightsError(f"store '{self.name}' sent another block of {name!r} than was asked for")

    def get_missing(self, arrival: copies.Arrival, call: Callable[[int], Any]) -> None:
        """Get the blocks that have not arrived; ``call`` asks for one, by its index."""
        for index, data in self._in_window(call, iter(arrival.missing())):
            self._check(arrival.blocks[index], data)
            arrival.put(index, data)

    @contextlib.contextmanager
    def relaying(self, source: Any, serial: int) -> Iterator[Callable[[int], Any]]:
        """Have another host's copy keep a version; the value asks it for blocks."""
        member = self._admitted(source)
        scope, name, *store = self._where_copy_is(member.incarnation)
        copy = Handle(self.agent, scope, name, member.name)
        ticket = _ticket()
        try:
            copy.call(copies.relay, *store, serial, self._who, ticket)
            yield lambda index: self.agent.call_async(
                member.name, copies.block, (scope, *store, serial, index), {}, 0.0
            )
        finally:
            copy._release(ticket, used=False)
            copy.close()

    def _admitted(self, wire: Any) -> Member:
        member = Member.from_wire(wire)
        if not keeper.is_of_group(self._scope) and member.incarnation != self.agent.incarnation:
            admit(self.agent, member)
        return member

    @staticmethod
    def _in_window(call: Callable[[Any], Any], batches: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
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

    # ---- memory of this host

    def view(
        self,
        held: Held,
        access: Access,
        stack: contextlib.ExitStack,
        used: Callable[[], bool] = lambda: False,
    ) -> tuple[Layout, list[Mapped]] | None:
        """Return a leased version in memory of this host, the store's or that of this host's copy, until
        ``stack`` ends; None if there is none, or its process is busy or has no memory.
        """
        mapped = self.mapped(held.segments, held.live, access)
        if mapped is not None:
            return held.layout, mapped
        if self._channel is not None:  # the store is on this host, which needs no copy of its own
            return None
        for _ in range(_ATTEMPTS):
            try:
                copy = self._find_copy()
                if copy is None:
                    return None
                ticket = _ticket()
                stack.callback(copy._end, ticket, used)
                store = self.name, self.epoch, self._copy_keeper
                answer = copy.call(copies.bring, *store, held.serial, copy._who, ticket)
            except WorkerLostError as error:
                if error.worker in ("", self.on):
                    raise
                self._copy, self._copy_failed = None, self._copy_keeper  # another process takes its place
            except NoMemoryError as error:
                logger.warning("this host has no copy of store '%s': %s", self.name, error)
                return None
            except WeightsError:  # its process has closed its handle
                self._copy = None
                return None
            else:
                brought = Held.of(ticket, answer)
                there = copy.mapped(brought.segments, brought.live, access)
                return None if there is None else (brought.layout, there)
        return None

    def _find_copy(self) -> Handle | None:
        """Return a handle of this host's copy, which this process may have to keep."""
        if self._copy is None and AVAILABLE:
            copies.offer(self.name, self.epoch, self.agent, self)
            wire = self.ask("copy_at", host_identity(), self._who, self._copy_failed)
            member = self._admitted(wire)
            self._copy_keeper = member.incarnation
            scope, name, *store = self._where_copy_is(member.incarnation)
            self.agent.call(member.name, copies.prepare, (scope, name, *store), {}, 0.0)
            self._copy = Handle(self.agent, scope, name, member.name)
        return self._copy

    @contextlib.contextmanager
    def reading(self, serial: int) -> Iterator[_Reading]:
        """See ``copies.Source``."""
        ticket = _ticket()
        try:
            held = Held.of(ticket, self.ask("open_serial", serial, self._who, ticket))
            yield _Reading(self, held)
        finally:
            self._release(ticket, used=False)

    def mapped(self, segments: list[Any], live: list[Any], access: Access) -> list[Mapped] | None:
        """Return segments in this process; None if they are another host's, or their process is busy."""
        with self._lock:
            for key in [key for key in self._maps if key[0] not in live]:
                del self._maps[key]
            found = []
            for number, size in segments:
                mapped = self._maps.get((number, access)) or self._map(number, size, access)
                if mapped is None:
                    return None
                if access is not Access.COPY:
                    self._maps[number, access] = mapped
                found.append(mapped)
            return found

    def _map(self, number: int, size: int, access: Access) -> Mapped | None:
        if self._channel is None:
            return None
        try:
            descriptor = fetch_descriptor(self._channel[0], self._channel[1], number, size)
        except (TimeoutError, BlockingIOError) as error:
            logger.warning("a version of store '%s' goes through calls this time: %s", self.name, error)
            return None
        except OSError as error:
            logger.warning(
                "weights of store '%s' go through calls, not through shared memory: %s", self.name, error
            )
            self._channel = None
            return None
        try:
            return map_segment(descriptor, size, access)
        except OSError as error:
            raise NoMemoryError(
                f"{size} bytes of store '{self.name}' cannot be mapped here: {error.strerror}"
            ) from error
        finally:
            os.close(descriptor)

    def end_copy(self) -> None:
        """Keep no copy here any more: another worker has taken the store over."""
        where = self._where_copy_is(self.agent.incarnation)
        successors.end((self.home, self.name, self.epoch, self.agent.incarnation))
        copies.release(*where)

    def close(self) -> None:
        """Release the memory that this handle uses."""
        if self._copy is not None:
            self._copy.close()
        with self._lock:
            self._maps.clear()

    # ---- calls

    def ask(self, what: str, *args: Any) -> Any:
        """Call a method of the keeper."""
        return self.call(keeper.ask, self.name, self.epoch, what, list(args))

    def ask_later(self, what: str, *args: Any) -> Any:
        """Like ``ask``, but return a future."""
        called = (self._scope, self.name, self.epoch, what, list(args))
        return self.agent.call_async(self.on, keeper.ask, called, {}, 0.0)

    def call(self, function: Callable[..., Any], *args: Any, timeout: float = 0.0) -> Any:
        """Call a function of ``keeper`` or a module above it at the keeper's worker."""
        try:
            return self.agent.call(self.on, function, (self._scope, *args), {}, timeout)
        except WorkerLostError as error:
            if error.worker != self.on:
                raise
            raise WorkerLostError(
                f"store '{self.name}' is gone with worker '{self.on}', which kept it ({error.reason}). "
                "What has been read stays as it is; a new store begins without versions.",
                self.on,
                error.reason,
            ) from error


class _Leaving:
    """The handles whose waits end when an agent's graceful shutdown begins."""

    def __init__(self, agent: Agent) -> None:
        self.begun = False
        self.handles: weakref.WeakSet[Handle] = weakref.WeakSet()
        agent.lifecycle.hooks.leaving.append(self._leave)

    @staticmethod
    def has_begun(handle: Handle) -> bool:
        """Whether the shutdown has begun; if not, the handle's waits will end when it does."""
        with _lock:
            extensions = handle.agent.extensions
            found: _Leaving | None = extensions.get(_LEAVING)
            if found is None:
                found = extensions[_LEAVING] = _Leaving(handle.agent)
            found.handles.add(handle)
            return found.begun or handle.agent.lifecycle.departure.begun

    def _leave(self) -> None:
        with _lock:
            self.begun = True
            handles = list(self.handles)
        for handle in handles:
            handle.end_waits()


_LEAVING: Final = "waits for weights"
"""Key of the ``_Leaving`` in an agent's extensions."""

_lock: Final = threading.Lock()


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


class _Reading:
    """See ``copies.Reading``."""

    def __init__(self, handle: Handle, held: Held) -> None:
        self.layout = held.layout
        self._handle = handle
        self._ticket = held.ticket
        self._serial = held.serial

    def changes(self, have: int) -> Sequence[tuple[str, Tensor, Tensor]] | None:
        """See ``copies.Reading``."""
        found: Sequence[tuple[str, Tensor, Tensor]] | None = self._handle.ask(
            "changes", self._handle._who, self._ticket, have
        )
        return found

    def fill(self, arrival: copies.Arrival) -> None:
        """See ``copies.Reading``."""
        handle, failed = self._handle, list(self._handle._unreachable)
        while arrival.missing():
            source = handle.ask("source", self._serial, handle._who, failed)
            if source is None:
                handle.get_missing(arrival, lambda index: handle._read(self._ticket, arrival.blocks[index]))
                return
            try:
                with handle.relaying(source, self._serial) as ask:
                    handle.get_missing(arrival, ask)
            except RpcError as error:
                failed.append(Member.from_wire(source).incarnation)
                if isinstance(error, WorkerLostError):  # or it cannot be reached from here
                    handle._unreachable = failed[-_MOST_UNREACHABLE:]
                logger.info("another source of store '%s' is asked: %s", handle.name, error)


def _ticket() -> int:
    """Return a number for a lease, which no other handle of this process uses."""
    return secrets.randbits(53)
