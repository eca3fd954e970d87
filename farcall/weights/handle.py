"""What a process has to do with one keeper of a store: the calls, and the memory that both share.

A handle belongs to one keeper for its whole life. ``Store`` has one, and gets another one if the store's
second copy takes over. A process has a further handle for the copy of its host.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, Final

from torch import Tensor

from farcall.weights.blocks import Piece
from farcall.weights.errors import WeightsError
from farcall.weights.layout import Layout, Spec
from farcall.weights.memory import AVAILABLE, Access, Mapped, map_segment, open_segment
from farcall.weights.node import ask, call_kept, new_id, node_of
from farcall.weights.transfer import (
    Batch,
    Held,
    batches,
    blocks_of,
    box_from_wire,
    box_to_wire,
    check,
    in_window,
    same_bits,
)
from rpc.agent.agent import Agent
from rpc.errors import NoMemoryError, RpcError, RpcTimeoutError, WorkerLostError
from rpc.group.workers import Member
from rpc.lifecycle.own_backend import admit
from rpc.rendezvous.address import host_identity
from rpc.runtime.blocking import this_thread
from rpc.runtime.legible import legible

__all__ = ["Handle", "Wanted", "called_at"]

logger = logging.getLogger(__name__)

_WAIT_SECONDS: Final = 20.0
"""Maximum time in seconds of one call that waits for a version; longer ones would be reported as slow."""

_OTHERS_SECONDS: Final = 60.0
"""How long a writer that is two versions ahead waits for the others, before it gives up their versions."""

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

    version: int | str | None = None
    newer_than: int | None = None
    serial: int | None = None
    timeout: float | None = 0.0
    deadline: float = 0.0


class Handle:
    """A handle of one keeper. From any thread.

    Args:
        agent: the agent that calls it.
        name: of the store.
        on: the worker that keeps it, by name.
        home: the worker on which the store was made.
        answer: what the keeper has described.
        copy_type: makes the copy that this process may have to keep, of the handle and the copy's id.

    Attributes:
        at: the incarnation of the worker that keeps it.
        who: this process, as the keeper knows it.
    """

    def __init__(
        self,
        agent: Agent,
        name: str,
        on: str,
        home: str,
        answer: Any,
        copy_type: Callable[[Handle, int], Any],
    ) -> None:
        self.agent = agent
        self.name = name
        self.on = on
        self.home = home
        self.id, host, process, self.copies = answer
        self.at = agent.group.peers.find(on).incarnation
        self._process: int | None = process if host == host_identity() and AVAILABLE else None
        """The keeper's process, whose memory this one can map."""
        self._has_mapped = False
        self._copy_type = copy_type
        self.who = [agent.info.name, agent.incarnation, None if self._process is None else os.getpid()]
        self._node = node_of(agent)
        self._maps: dict[tuple[int, Access], Mapped] = {}
        self._copy: Handle | None = None
        self._copy_failed: int | None = None
        self._alone: str | None = None
        """Why the version that was put last has one copy, and not two."""
        self._lock = threading.RLock()  # a finalizer that runs while it is held may use the store

    def offer(self) -> None:
        """Let the store choose this process to keep its second copy."""
        self.ask("offer", self.who, host_identity(), self._own_copy())

    def _own_copy(self) -> int:
        """Let the store choose this process to keep a copy; returns its id."""
        return self._node.can_keep(self.id, partial(self._copy_type, self))

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
        """Write a part of a version; returns whether it is whole. With two copies, both have it then, unless
        the second one cannot, which is logged.
        """
        tensors = [
            [name, spec.dtype, list(spec.shape), [box_to_wire(piece.box) for piece in pieces[name]]]
            for name, spec in specs.items()
        ]
        put = new_id()
        try:
            answer = self._begin(number, list(part), tensors, put)
            if answer is None:
                self._check_same(number, pieces)
                whole = True
            else:
                self._write(number, part[0], pieces, answer, put)
                whole = bool(self.ask("written", number, part[0], self.who, metadata, put))
        except BaseException:
            with contextlib.suppress(RpcError):  # the worker is gone, and the version with it
                self.ask("failed", number, part[0], self.who, put)
            raise
        if whole and self.copies > 1:
            self._wait_for_copy(number)
        return whole

    def _wait_for_copy(self, number: int) -> None:
        """Wait until the second copy has a version. If it cannot, log why, once for each reason."""
        while True:
            with contextlib.suppress(RpcTimeoutError):
                reason: str | None = self.ask("copied", number, timeout=_WAIT_SECONDS)
                break
        if reason not in (None, self._alone):
            text = "version %d of store '%s' has one copy, and was to have two: %s"
            logger.warning(text, number, self.name, legible(reason))
        self._alone = reason

    def _begin(self, number: int, part: list[int], tensors: list[Any], put: int) -> Any:
        """Declare a part; waits while other writers have not finished earlier versions."""
        deadline = monotonic() + _OTHERS_SECONDS
        while True:
            left = deadline - monotonic()
            answer = self.ask("begin", number, part, tensors, self.who, left <= 0, put)
            if not isinstance(answer, int):
                return answer
            self._wait_for_change(answer, left)

    def _write(
        self, number: int, part: int, pieces: Mapping[str, Sequence[Piece]], begun: list[Any], put: int
    ) -> None:
        """Write the blocks that ``begin`` has asked for."""
        wire, segments, live, writes = begun
        chosen = {name: {box_from_wire(box) for box in boxes} for name, boxes in writes}
        mine = {name: [each for each in pieces[name] if each.box in own] for name, own in chosen.items()}
        mapped = self.mapped(segments, live, Access.WRITE)
        if mapped is None:
            self._send(number, part, mine, put)
            return
        for _, local, block in blocks_of(Layout.from_wire(wire), mapped, mine):
            block.copy_(local)

    def _send(self, number: int, part: int, pieces: Mapping[str, Sequence[Piece]], put: int) -> None:
        """Send the blocks of a part to another host."""

        def call(batch: Batch) -> Any:
            blocks = [[name, box_to_wire(box)] for name, box, _ in batch]
            data = [local.cpu().contiguous() for *_, local in batch]
            return self.ask_later("write", number, part, self.who, blocks, data, put)

        for _ in in_window(call, batches(pieces)):
            pass

    def _check_same(self, number: int, pieces: Mapping[str, Sequence[Piece]]) -> None:
        with contextlib.ExitStack() as stack:
            held = stack.enter_context(self.leased(Wanted(number)))
            for name, local, data in self.contents(held, pieces, stack):
                if not same_bits(local, data):
                    raise WeightsError(
                        f"version {number} of store '{self.name}' is whole already, with other values of "
                        f"{name!r}. A version never changes: give another number, or drop() this one before."
                    )

    # ---- reading

    @contextlib.contextmanager
    def leased(
        self, wanted: Wanted, used: Callable[[], bool] = lambda: False, *, reads: bool = False
    ) -> Iterator[Held]:
        """Have a lease of a version inside the block; ``used``: whether its memory is used after it;
        ``reads``: whether the store notes that this worker has read it.
        """
        ticket = new_id()
        try:
            yield Held.of(ticket, self._wait(wanted, ticket, reads))
        finally:
            self._release(ticket, used)

    def look(self, wanted: Wanted) -> Held:
        """Wait for a version, and return what it is."""
        with self.leased(wanted) as held:
            return held

    def _wait(self, wanted: Wanted, ticket: int, reads: bool) -> list[Any]:
        version, newer_than = wanted.version, wanted.newer_than
        while True:
            answer: list[Any] = self.ask("open", version, newer_than, self.who, ticket, wanted.serial, reads)
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
            self._wait_for_change(answer[1], left)

    def _wait_for_change(self, state: int, seconds: float) -> None:
        ticket = new_id()

        def end() -> None:
            with contextlib.suppress(RpcError):
                self.ask_later("give_up", self.who, ticket)

        with contextlib.ExitStack() as stack:
            if not this_thread.runs_callees:  # a graceful shutdown goes on with what others have called here
                stack.enter_context(self._node.waiting(self.name, end))
            try:
                timeout = max(min(seconds, _WAIT_SECONDS), 0.001)
                self.ask("wait", state, self.who, ticket, timeout=timeout)
            except BaseException as error:  # the keeper's answer would still be under way
                end()
                if not isinstance(error, RpcTimeoutError):
                    raise

    def _release(self, ticket: int, used: Callable[[], bool] = lambda: False) -> None:
        with contextlib.suppress(RpcError):  # the worker is gone, and the lease with it
            self.ask("release", self.who, ticket, used())

    def contents(
        self, held: Held, pieces: Mapping[str, Sequence[Piece]], stack: contextlib.ExitStack
    ) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield what a leased version has of pieces: name, local memory, and the block of the version. It may
        be used until ``stack`` ends.
        """
        view = self.view(held, Access.READ, stack)
        return self.arriving(held.ticket, pieces) if view is None else blocks_of(*view, pieces)

    def arriving(
        self, ticket: int, pieces: Mapping[str, Sequence[Piece]]
    ) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the same, from another host."""
        for batch, data in in_window(partial(self.read, ticket), batches(pieces)):
            check(self.name, batch, data)
            for (name, _, local), tensor in zip(batch, data, strict=True):
                yield name, local, tensor

    def read(self, ticket: int, batch: Batch) -> Any:
        """Ask for blocks of a leased version; returns a future."""
        return self.ask_later("read", self.who, ticket, [[name, box_to_wire(box)] for name, box, _ in batch])

    # ---- memory of this host

    def view(
        self,
        held: Held,
        access: Access,
        stack: contextlib.ExitStack,
        used: Callable[[], bool] = lambda: False,
    ) -> tuple[Layout, list[Mapped]] | None:
        """Return a leased version in memory of this host, the store's or that of this host's copy, until
        ``stack`` ends; None if there is none, or no memory, or no descriptors are left.
        """
        mapped = self.mapped(held.segments, held.live, access)
        if mapped is not None:
            return held.layout, mapped
        if self._process is not None or not AVAILABLE:  # the store is on this host, which needs no copy
            return None
        for _ in range(_ATTEMPTS):
            try:
                copy = self._host_copy()
                if copy is None:
                    return None
                ticket = new_id()
                stack.callback(copy._release, ticket, used)
                brought = Held.of(ticket, copy.ask("bring", held.serial, self.who, ticket))
            except WorkerLostError as error:
                if error.worker in ("", self.on):
                    raise
                self._copy = None  # another process takes its place
            except NoMemoryError as error:
                logger.warning("this host has no copy of store '%s': %s", self.name, legible(error))
                return None
            except WeightsError:  # its process has closed it
                self._copy = None
                return None
            else:
                there = copy.mapped(brought.segments, brought.live, access)
                return None if there is None else (brought.layout, there)
        return None

    def _host_copy(self) -> Handle | None:
        """Return a handle of this host's copy, which this process may have to keep."""
        if self._copy is None:
            found = self.ask("copy_at", host_identity(), self.who, self._own_copy(), self._copy_failed)
            if found is None:
                return None
            member = self.admitted(found[0])
            self._copy_failed = member.incarnation  # if this raises, and the next time
            called = member.incarnation, found[1], self.name, "describe", [None]
            answer = called_at(self.agent, member.name, self.name, ask, called)
            self._copy = Handle(self.agent, self.name, member.name, self.home, answer, self._copy_type)
        return self._copy

    def admitted(self, wire: Any) -> Member:
        """Return a worker that the store has named, to which calls can be made: without a group, workers know
        each other only through the store.
        """
        member = Member.from_wire(wire)
        admit(self.agent, member)
        return member

    @contextlib.contextmanager
    def reading(self, serial: int) -> Iterator[Held | None]:
        """Have a lease of a version inside the block, for a copy; None: the store has it no longer."""
        ticket = new_id()
        try:
            answer = self.ask("open_serial", serial, self.who, ticket)
            yield None if answer is None else Held.of(ticket, answer)
        finally:
            self._release(ticket)

    def mapped(self, segments: list[Any], live: list[Any], access: Access) -> list[Mapped] | None:
        """Return segments in this process; None if they are another host's, or no descriptors are left."""
        with self._lock:
            for key in [key for key in self._maps if key[0] not in live]:
                del self._maps[key]
            found = []
            for number, size, place in segments:
                mapped = self._maps.get((number, access)) or self._map(size, place, access)
                if mapped is None:
                    return None
                if access is not Access.COPY:
                    self._maps[number, access] = mapped
                found.append(mapped)
            return found

    def _map(self, size: int, place: list[Any] | None, access: Access) -> Mapped | None:
        if self._process is None or place is None:
            return None
        try:
            descriptor = open_segment(self._process, place[0], place[1], size)
        except OSError as error:
            is_short = error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
            later = is_short or self._has_mapped  # of a version that was given up, the memory is gone
            text = "weights of store '%s' go through calls%s: %s"
            logger.warning(text, self.name, " this time" if later else ", not through shared memory", error)
            self._process = self._process if later else None
            return None
        self._has_mapped = True
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
        self._node.end_copy(self.id)

    def close(self) -> None:
        """Release the memory that this handle uses."""
        if self._copy is not None:
            self._copy.close()
        with self._lock:
            self._maps.clear()

    # ---- calls

    def ask(self, what: str, *args: Any, timeout: float = 0.0) -> Any:
        """Call a method of the keeper."""
        called = self.at, self.id, self.name, what, list(args)
        return called_at(self.agent, self.on, self.name, ask, called, timeout)

    def ask_later(self, what: str, *args: Any) -> Any:
        """Like ``ask``, but return a future."""
        return call_kept(self.agent, self.on, self.at, self.id, self.name, what, *args)


def called_at(
    agent: Agent,
    on: str,
    name: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    timeout: float = 0.0,
) -> Any:
    """Call a function at the worker that keeps a store or a copy."""
    try:
        return agent.call(on, function, args, {}, timeout)
    except WorkerLostError as error:
        if error.worker != on:
            raise
        raise WorkerLostError(
            f"store '{name}' is gone with worker '{on}', which kept it ({error.reason}). "
            "What has been read stays as it is; a new store begins without versions.",
            on,
            error.reason,
        ) from error
