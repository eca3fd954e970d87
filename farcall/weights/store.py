"""Handles of a store: what readers and writers call."""

from __future__ import annotations

import atexit
import collections
import contextlib
import logging
import operator
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final, Self

import torch
from torch import Tensor

from farcall.weights import copies, keeper
from farcall.weights.blocks import Block, Box, Piece, cut, part_of, pieces_of
from farcall.weights.catalogue import MOST_PARTS
from farcall.weights.errors import WeightsError
from farcall.weights.layout import Layout, Spec, difference, name_of_dtype
from farcall.weights.memory import AVAILABLE, Access, Mapped, fetch_descriptor, map_segment
from rpc.agent.agent import Agent
from rpc.api import get_worker_info
from rpc.errors import NoMemoryError, RpcError, RpcTimeoutError, WorkerLostError
from rpc.group.membership import WorkerReference
from rpc.group.workers import Member
from rpc.lifecycle.own_backend import admit
from rpc.rendezvous.address import host_identity
from rpc.runtime.current import current_agent

__all__ = ["Lease", "Store"]

logger = logging.getLogger(__name__)

_WAIT_SECONDS: Final = 20.0
"""Maximum time in seconds of one call that waits for a version; longer ones would be reported as slow."""

_OTHERS_SECONDS: Final = 60.0
"""How long a writer that is two versions ahead waits for the others, before it gives up their versions."""

_MESSAGE_BYTES: Final = 8 << 20
"""Maximum size in bytes of blocks that go in one call; a longer row of a tensor is cut."""

_WINDOW: Final = 6
"""Number of calls with blocks under way."""

_ATTEMPTS: Final = 4
"""Maximum number of processes that a reader asks for this host's copy, one after another."""

_MAX_NUMBER: Final = 1 << 63


class Store:
    """A handle of a weight store. Any worker of the group opens the store by its name; the first to do so
    makes it. From any thread.

    Args:
        name: of the store, on its worker.
        on: the worker that keeps the versions, by name, id or ``WorkerInfo``.
        keep: number of whole versions that stay, besides those that are leased (default 2). If several
            handles give one, the largest counts.
        copies: number of hosts that have the versions; only 1 is possible.

    Raises:
        UnknownWorkerError: there is no such worker.
        WorkerLostError: it is gone.
        WeightsError: an argument is wrong.

    Example::

        store = weights.Store("policy", on="trainer0", keep=3)
        store.put(step, model.state_dict())                          # on each trainer
        version = store.get(model.state_dict(), newer_than=version)  # on each reader
    """

    def __init__(self, name: str, on: WorkerReference, keep: int | None = None, copies: int = 1) -> None:
        if copies != 1:
            raise WeightsError(
                f"copies={copies!r} is not possible: a store has its versions on one host (docs/weights.md)"
            )
        if not isinstance(name, str) or not name:  # type: ignore[redundant-expr]
            raise WeightsError(f"a store's name is a text, not {name!r}")
        if keep is not None and (type(keep) is not int or keep < 1):
            raise WeightsError(f"keep is a number of versions from 1 on, not {keep!r:.80}")
        agent = current_agent()
        if not isinstance(agent, Agent):
            raise WeightsError("a store needs an agent of farcall's own backends")
        self._open(name, get_worker_info(on).name, agent, keeper.GROUP, keep)

    @classmethod
    def of_agent(cls, name: str, on: str, agent: Agent, scope: str) -> Store:
        """Open a store by an agent of its own, which ``close`` ends."""
        store = cls.__new__(cls)
        store._open(name, on, agent, scope, None)
        store._owned = agent
        atexit.register(store.close)
        return store

    def _open(self, name: str, on: str, agent: Agent, scope: str, keep: int | None) -> None:
        self.name = name
        self.on = on
        self._agent = agent
        self._owned: Agent | None = None
        self._scope = scope
        self._who = [agent.info.name, agent.incarnation]
        self._maps: dict[tuple[int, Access], Mapped] = {}
        self._last: tuple[int | None, int | None] = None, None
        """Number and serial of the version that this handle has read last."""
        self._copy: Store | None = None
        self._copy_keeper: int | None = None
        self._copy_failed: int | None = None
        self._lock = threading.RLock()  # a finalizer that runs while it is held may use the store
        self._epoch, host, channel = self._call(keeper.opened, name, keep)
        self._channel: list[Any] | None = channel if host == host_identity() else None

    def __repr__(self) -> str:
        return f"<weights.Store '{self.name}' on '{self.on}'>"

    # ---- writing

    @torch.no_grad()
    def put(self, number: int, state: Mapping[str, Any], part: tuple[int, int] | None = None) -> bool:
        """Copy tensors into a version. They are the caller's again when this returns.

        Readers see the version once all its parts have been put. A writer that is two versions ahead of
        others waits for them, for up to a minute; then the oldest incomplete version is given up. A part that
        is given twice does no harm. A version never changes once it is whole: to put it again with other
        values, ``drop`` it before.

        Args:
            number: number of the version; any order of numbers is possible.
            state: tensors by name, such as a ``state_dict``. DTensors know their blocks; other tensors are
                wholes, or ``Block`` objects.
            part: which part of the version this is, and the number of parts. Default: the position in the
                largest mesh of the DTensors, and its size; ``(0, 1)`` without DTensors.

        Returns:
            Whether the version is whole now.

        Raises:
            WeightsError: the part does not fit to the others: they overlap, have another type or shape, or
                elements are missing; the text names the tensor. The version stays open, and takes the right
                part. Or the version is whole, with other values.
            NoMemoryError: there is no memory for it; earlier versions stay.
            WorkerLostError: the worker that keeps the store is gone.
        """
        number = _number(number)
        index, count = _part(part_of(state) if part is None else part)
        pieces, specs = _described(state)
        tensors = [
            [name, spec.dtype, list(spec.shape), [_wire(piece.box) for piece in pieces[name]]]
            for name, spec in specs.items()
        ]
        answer = self._begin(number, [index, count], tensors)
        if answer is None:
            self._check_same(number, pieces)
            return True
        wire, segments, live, writes = answer
        chosen = {name: {_box(box) for box in boxes} for name, boxes in writes}
        mine = {
            name: [piece for piece in pieces[name] if piece.box in boxes] for name, boxes in chosen.items()
        }
        layout = Layout.from_wire(wire)
        mapped = self._mapped(segments, live, Access.WRITE)
        if mapped is None:
            self._send(number, index, mine)
        else:
            for name, own in mine.items():
                whole = layout.tensor([each.data for each in mapped], name)
                for piece in own:
                    piece.box.of(whole).copy_(piece.local)
        return bool(self._ask("written", number, index, self._who))

    def _begin(self, number: int, part: list[int], tensors: list[Any]) -> Any:
        """Declare a part; waits while other writers have not finished earlier versions."""
        deadline = monotonic() + _OTHERS_SECONDS
        while True:
            left = deadline - monotonic()
            answer = self._ask("begin", number, part, tensors, self._who, left <= 0)
            if not isinstance(answer, int):
                return answer
            ticket = _ticket()
            self._wait_for_change(answer, ticket, left)
            self._release(ticket, used=False)

    def _send(self, number: int, part: int, pieces: Mapping[str, Sequence[Piece]]) -> None:
        """Send the blocks of a part to another host."""

        def call(batch: list[tuple[str, Box, Tensor]]) -> Any:
            blocks = [[name, _wire(box)] for name, box, _ in batch]
            data = [local.cpu().contiguous() for *_, local in batch]
            return self._ask_later("write", number, part, self._who, blocks, data)

        for _ in self._in_window(call, _batches(pieces)):
            pass

    def _check_same(self, number: int, pieces: Mapping[str, Sequence[Piece]]) -> None:
        digests = [
            [name, _wire(piece.box), keeper.digest(piece.local)]
            for name, own in pieces.items()
            for piece in own
        ]
        other = self._ask("compare", number, digests)
        if other is not None:
            raise WeightsError(
                f"version {number} of store '{self.name}' is whole already, with other values of {other!r}. "
                "A version never changes: give another number, or drop() this one before."
            )

    # ---- reading

    @torch.no_grad()
    def get(
        self,
        into: Mapping[str, Any],
        version: int | None = None,
        newer_than: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Copy a version into tensors, in place: all of them, or none if this raises.

        Args:
            into: tensors by name, with exactly the version's names, types and shapes, in any sharding: plain
                tensors, DTensors, ``Block`` objects. Of DTensors and blocks only what is here is copied.
            version: number of the version; default: the newest, which is the one that became whole last.
            newer_than: wait until the newest is newer than this version. If this handle has read that
                version last, one that has the same number and was put later, after ``drop``, is newer.
            timeout: how long to wait for such a version, in seconds; 0: not at all; default: as long as the
                store's worker lives.

        Returns:
            The number of the version.

        Raises:
            RpcTimeoutError: there was no such version in time. A ``TimeoutError``, too.
            WeightsError: names, types or shapes are not those of the version; or it is not kept any more.
            WorkerLostError: the worker that keeps the store is gone.
        """
        pieces, specs = _described(into)
        for name, own in pieces.items():
            if any(_overlaps_itself(piece.local) for piece in own):
                raise WeightsError(f"{name!r} cannot be written to: some of its elements are one in memory")
        with contextlib.ExitStack() as stack:
            held = stack.enter_context(self._leased(version, newer_than, timeout))
            reason = difference(specs, held.layout.specs)
            if reason is not None:
                raise WeightsError(f"version {held.number} of store '{self.name}' does not fit: {reason}")
            view = self._view(held, Access.READ, stack)
            if view is None:
                self._fetch(held.ticket, pieces)
            else:
                layout, mapped = view
                for name, own in pieces.items():
                    whole = layout.tensor([each.data for each in mapped], name)
                    for piece in own:
                        piece.local.copy_(piece.box.of(whole))
            self._last = held.number, held.serial
            return held.number

    def lease(self, version: int | None = None, timeout: float | None = None) -> Lease:
        """Keep a version, and use its tensors where they lie: a context manager.

        Its value maps names to whole tensors. They may be written to, which other processes do not see. They
        stay valid after the lease.

        Args:
            version: number of the version; default: the newest.
            timeout: how long to wait for it, as for ``get``.

        Example::

            with store.lease(step) as old:
                baseline.load_state_dict(old)
        """
        return Lease(self, version, timeout)

    @contextlib.contextmanager
    def _leased(
        self,
        version: int | None,
        newer_than: int | None,
        timeout: float | None,
        used: Callable[[], bool] = lambda: False,
    ) -> Iterator[_Held]:
        """Have a lease of a version inside the block; ``used``: whether its memory is used after it."""
        ticket = _ticket()
        try:
            yield _Held.of(ticket, self._wait(version, newer_than, timeout, ticket))
        finally:
            self._release(ticket, used=used())

    def _wait(
        self, version: int | None, newer_than: int | None, timeout: float | None, ticket: int
    ) -> list[Any]:
        if version is not None and newer_than is not None:
            raise WeightsError("give version or newer_than, not both")
        version = None if version is None else _number(version)
        newer_than = None if newer_than is None else _number(newer_than)
        last, serial = self._last
        if last != newer_than:
            serial = None
        deadline = float("inf") if timeout is None else monotonic() + timeout
        while True:
            answer: list[Any] = self._ask("open", version, newer_than, self._who, ticket, serial)
            if answer[0] is not None:
                return answer
            left = deadline - monotonic()
            if left <= 0:
                what = f"version {version}" if version is not None else "version"
                what += "" if newer_than is None else f" newer than {newer_than}"
                raise RpcTimeoutError(
                    f"store '{self.name}' on worker '{self.on}' had no {what} within {timeout:g} s: "
                    f"{answer[2]}"
                )
            self._wait_for_change(answer[1], ticket, left)

    def _wait_for_change(self, state: int, ticket: int, seconds: float) -> None:
        timeout = max(min(seconds, _WAIT_SECONDS), 0.001)
        with contextlib.suppress(RpcTimeoutError):
            self._call(keeper.changed, self.name, self._epoch, state, self._who, ticket, timeout=timeout)

    def _end(self, ticket: int, used: Callable[[], bool]) -> None:
        self._release(ticket, used=used())

    def _release(self, ticket: int, *, used: bool) -> None:
        with contextlib.suppress(RpcError):  # the worker is gone, and the lease with it
            self._ask("release", self._who, ticket, used)

    def _fetch(self, ticket: int, pieces: Mapping[str, Sequence[Piece]]) -> None:
        """Get blocks from another host; all of them, before the first one is copied into local memory."""
        for local, data in list(self._arriving(ticket, pieces)):
            local.copy_(data)

    def _arriving(
        self, ticket: int, pieces: Mapping[str, Sequence[Piece]]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Get blocks from another host; yields local memory, and what is to be copied into it."""

        def call(batch: list[tuple[str, Box, Tensor]]) -> Any:
            return self._ask_later("read", self._who, ticket, [[name, _wire(box)] for name, box, _ in batch])

        for batch, data in self._in_window(call, _batches(pieces)):
            for (name, _, local), tensor in zip(batch, data, strict=True):
                if tensor.shape != local.shape or tensor.dtype != local.dtype:
                    raise WeightsError(
                        f"store '{self.name}' sent another block of {name!r} than was asked for"
                    )
                yield local, tensor

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

    def _view(
        self,
        held: _Held,
        access: Access,
        stack: contextlib.ExitStack,
        used: Callable[[], bool] = lambda: False,
    ) -> tuple[Layout, list[Mapped]] | None:
        """Return a leased version in memory of this host, the store's or that of this host's copy, until
        ``stack`` ends; None if there is none, or its process is busy or has no memory.
        """
        mapped = self._mapped(held.segments, held.live, access)
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
                store = self.name, self._epoch, self._copy_keeper
                answer = copy._call(copies.bring, *store, held.serial, copy._who, ticket)
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
                brought = _Held.of(ticket, answer)
                there = copy._mapped(brought.segments, brought.live, access)
                return None if there is None else (brought.layout, there)
        return None

    def _find_copy(self) -> Store | None:
        """Return a handle of this host's copy, which this process may have to keep."""
        if self._copy is None and AVAILABLE:
            copies.offer(self.name, self._epoch, self._agent, self)
            wire = self._ask("copy_at", host_identity(), self._who, self._copy_failed)
            member = Member.from_wire(wire)
            self._copy_keeper = member.incarnation
            if self._scope != keeper.GROUP and member.incarnation != self._agent.incarnation:
                admit(self._agent, member)
            store = self.name, self._epoch, member.incarnation
            scope, name = f"copy {self._scope}", "@".join(map(str, store))
            self._agent.call(member.name, copies.prepare, (scope, name, *store), {}, 0.0)
            copy = Store.__new__(Store)
            copy._open(name, member.name, self._agent, scope, None)
            self._copy = copy
        return self._copy

    @contextlib.contextmanager
    def reading(self, serial: int) -> Iterator[_Reading]:
        """See ``copies.Source``."""
        ticket = _ticket()
        try:
            held = _Held.of(ticket, self._ask("open_serial", serial, self._who, ticket))
            yield _Reading(self, held)
        finally:
            self._release(ticket, used=False)

    def _mapped(self, segments: list[Any], live: list[Any], access: Access) -> list[Mapped] | None:
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

    # ---- what there is

    def versions(self) -> list[int]:
        """Return the numbers of the whole versions, in the order in which they became whole."""
        found: list[int] = self._ask("versions")
        return found

    def drop(self, number: int) -> None:
        """Remove a version. Leases of it go on. ``WeightsError`` if there is none."""
        self._ask("drop", _number(number))

    def usage(self) -> dict[str, Any]:
        """Return what the store has and uses now.

        Returns:
            ``versions``: the whole ones; ``open``: for each other one, which parts are missing; ``keep``;
            ``bytes``: size of all its memory; ``leases``: their number; ``holders``: the workers that have
            them; ``sent_bytes`` and ``received_bytes``: what went to and came from other hosts.
        """
        found: dict[str, Any] = self._ask("usage")
        return found

    def close(self) -> None:
        """Release the memory that this handle uses, and end the connection that ``connect`` has made. The
        store itself is not touched.
        """
        if self._copy is not None:
            self._copy.close()
        with self._lock:
            self._maps.clear()
        if self._owned is not None:
            atexit.unregister(self.close)
            self._owned.close("it has closed its weight store")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- calls

    def _ask(self, what: str, *args: Any) -> Any:
        return self._call(keeper.ask, self.name, self._epoch, what, list(args))

    def _ask_later(self, what: str, *args: Any) -> Any:
        called = (self._scope, self.name, self._epoch, what, list(args))
        return self._agent.call_async(self.on, keeper.ask, called, {}, 0.0)

    def _call(self, function: Callable[..., Any], *args: Any, timeout: float = 0.0) -> Any:
        try:
            return self._agent.call(self.on, function, (self._scope, *args), {}, timeout)
        except WorkerLostError as error:
            if error.worker != self.on:
                raise
            raise WorkerLostError(
                f"store '{self.name}' is gone with worker '{self.on}', which kept it ({error.reason}). "
                "What has been read stays as it is; a new store begins without versions.",
                self.on,
                error.reason,
            ) from error


class Lease(Mapping[str, Tensor]):
    """A version that stays, and its tensors by name; see ``Store.lease``.

    Attributes:
        version: its number.
    """

    version: int

    def __init__(self, store: Store, version: int | None, timeout: float | None) -> None:
        self._store = store
        self._asked = version, timeout
        self._stack = contextlib.ExitStack()
        self._layout: Layout | None = None
        self._data: list[Tensor] = []
        self._memory: list[Any] = []
        self._tensors: dict[str, Tensor] = {}

    def __enter__(self) -> Self:
        if self._layout is not None:
            raise WeightsError("a lease is entered once at a time: call lease() again")
        store, (version, timeout) = self._store, self._asked
        with contextlib.ExitStack() as stack:
            memory = self._memory  # and not ``self``, which has the stack that would have ``self``

            def used() -> bool:
                return any(each() is not None for each in memory)

            held = stack.enter_context(store._leased(version, None, timeout, used))
            view = store._view(held, Access.COPY, stack, used)
            if view is None:
                layout = held.layout
                self._data = [torch.empty(size, dtype=torch.uint8) for size in layout.sizes]
                store._fetch(held.ticket, _wholes(layout, self._data))
            else:
                layout, mapped = view
                self._data = [each.data for each in mapped]
                memory[:] = [each.memory for each in mapped]
            self.version, self._layout = held.number, layout
            store._last = held.number, held.serial
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._tensors.clear()
        self._data.clear()
        self._layout = None
        self._stack.close()
        self._memory.clear()

    def __getitem__(self, name: str) -> Tensor:
        layout = self._entered()
        if name not in self._tensors:
            if name not in layout.entries:
                raise KeyError(name)
            self._tensors[name] = layout.tensor(self._data, name)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entered().entries)

    def __len__(self) -> int:
        return len(self._entered().entries)

    def _entered(self) -> Layout:
        if self._layout is None:
            raise WeightsError("a lease has tensors inside its with statement only")
        return self._layout


@dataclass(frozen=True, slots=True)
class _Held:
    """A version that this process has a lease of, with this ticket."""

    ticket: int
    number: int
    layout: Layout
    segments: list[Any]
    live: list[Any]
    serial: int

    @classmethod
    def of(cls, ticket: int, answer: Any) -> _Held:
        """Return what ``Keeper.open`` has described."""
        number, wire, segments, live, serial = answer
        return cls(ticket, number, Layout.from_wire(wire), segments, live, serial)


class _Reading:
    """See ``copies.Reading``."""

    def __init__(self, store: Store, held: _Held) -> None:
        self.layout = held.layout
        self._store = store
        self._ticket = held.ticket

    def changes(self, have: int) -> Sequence[tuple[str, Tensor, Tensor]] | None:
        """See ``copies.Reading``."""
        found: Sequence[tuple[str, Tensor, Tensor]] | None = self._store._ask(
            "changes", self._store._who, self._ticket, have
        )
        return found

    def fill(self, pieces: Mapping[str, Sequence[Piece]]) -> None:
        """See ``copies.Reading``."""
        for local, data in self._store._arriving(self._ticket, pieces):
            local.copy_(data)


def _wholes(layout: Layout, data: Sequence[Tensor]) -> dict[str, list[Piece]]:
    """Return the tensors of a layout as pieces of local memory; without empty ones."""
    tensors = {name: layout.tensor(data, name) for name in layout.entries}
    return {
        name: [Piece(tensor, Box((0,) * tensor.dim(), tuple(tensor.shape)))]
        for name, tensor in tensors.items()
        if tensor.numel()
    }


def _described(state: Mapping[str, Any]) -> tuple[dict[str, list[Piece]], dict[str, Spec]]:
    """Return what this process has of each tensor, and what the whole tensors are."""
    if not isinstance(state, Mapping):
        raise TypeError(f"expected tensors by name, such as a state_dict, not {type(state).__name__}")
    pieces, specs = {}, {}
    for name, value in state.items():
        if not isinstance(name, str):
            raise TypeError(f"names of tensors are texts, not {name!r:.80}")
        pieces[name], shape = pieces_of(name, value)
        dtype = (value.tensor if isinstance(value, Block) else value).dtype
        specs[name] = Spec(name_of_dtype(dtype), shape)
    return pieces, specs


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether a tensor is expanded, so that several elements are one in memory."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _batches(pieces: Mapping[str, Sequence[Piece]]) -> Iterator[list[tuple[str, Box, Tensor]]]:
    """Cut and group pieces for calls: names, blocks of whole tensors, and their local memory."""
    batch: list[tuple[str, Box, Tensor]] = []
    size = 0
    for name, own in pieces.items():
        for local, whole in own:
            for box in cut(whole, max(1, _MESSAGE_BYTES // local.element_size())):
                inner = Box(tuple(map(operator.sub, box.offset, whole.offset)), box.sizes)
                added = box.volume * local.element_size()
                if batch and size + added > _MESSAGE_BYTES:
                    yield batch
                    batch, size = [], 0
                batch.append((name, box, inner.of(local)))
                size += added
    if batch:
        yield batch


def _ticket() -> int:
    """Return a number for a lease, which no other handle of this process uses."""
    return secrets.randbits(53)


def _wire(box: Box) -> list[list[int]]:
    return [list(box.offset), list(box.sizes)]


def _box(wire: Any) -> Box:
    offset, sizes = wire
    return Box(tuple(offset), tuple(sizes))


def _number(value: Any) -> int:
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise WeightsError(f"a version's number is an int, not {value!r:.80}")
    number = operator.index(value)
    if not -_MAX_NUMBER <= number < _MAX_NUMBER:
        raise WeightsError(f"a version's number has 64 bits at most: {number}")
    return number


def _part(part: Any) -> tuple[int, int]:
    try:
        index, count = map(operator.index, part)
    except (TypeError, ValueError):
        raise WeightsError(f"part is (index, count), not {part!r:.80}") from None
    if not 0 <= index < count <= MOST_PARTS:
        raise WeightsError(
            f"part is (index, count) with 0 <= index < count, and count is at most {MOST_PARTS}; "
            f"not {part!r:.80}"
        )
    return index, count
