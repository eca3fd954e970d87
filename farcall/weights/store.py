"""Stores, as readers and writers use them."""

from __future__ import annotations

import atexit
import contextlib
import logging
import operator
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from time import monotonic
from typing import Any, Final, Self, TypeVar

import torch

from farcall.weights import successors
from farcall.weights.blocks import part_of
from farcall.weights.catalogue import MOST_PARTS
from farcall.weights.errors import WeightsError
from farcall.weights.handle import Handle, Wanted
from farcall.weights.layout import difference
from farcall.weights.lease import Lease
from farcall.weights.node import current_node
from farcall.weights.transfer import Held, described, overlaps_itself
from farcall.weights.versions import check_tag, checked_metadata
from rpc.agent.agent import Agent
from rpc.agent.futures import Future
from rpc.api import get_worker_info
from rpc.errors import RpcError, UnknownWorkerError, WorkerLostError
from rpc.group.membership import WorkerReference
from rpc.runtime.legible import legible

__all__ = ["Store"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_NUMBER: Final = 1 << 63

_LOOK_SECONDS: Final = 20.0
"""How long the thread of a callback waits for a version until it looks whether the calls have been ended."""


class Store:
    """A handle of a weight store. Any worker of the group opens the store by its name; the first to do so
    makes it. From any thread.

    Args:
        name: of the store, on its worker.
        on: the worker that keeps the versions, by name, id or ``WorkerInfo``.
        keep: number of whole versions that stay, besides those that are leased (default 2). If several
            handles give one, the largest counts.
        copies: number of workers that have the versions, 1 (default) or 2. With 2, another worker that has
            opened the store with ``copies=2``, rather one of another host, takes over if ``on`` is lost. Give
            the same on each worker. While no other worker can have them, ``put`` logs a warning, once for
            each reason, and ``usage()["copies"]`` is 1.

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
        if type(copies) is not int or not 1 <= copies <= 2:
            raise WeightsError(f"copies is 1 or 2, not {copies!r:.80}")
        if not isinstance(name, str) or not name:  # type: ignore[redundant-expr]
            raise WeightsError(f"a store's name is a text, not {name!r}")
        if keep is not None and (type(keep) is not int or keep < 1):
            raise WeightsError(f"keep is a number of versions from 1 on, not {keep!r:.80}")
        self._begin(_opened(current_node().agent, name, on, keep, copies))

    @classmethod
    def of_agent(cls, name: str, on: str, agent: Agent) -> Store:
        """Open a store by an agent of its own, which ``close`` ends."""
        store = cls.__new__(cls)
        store._begin(successors.open_store(agent, name, on))
        store._owned = agent
        atexit.register(store.close)
        return store

    def _begin(self, handle: Handle) -> None:
        self.name = handle.name
        self._handle = handle
        self._owned: Agent | None = None
        self._subscriptions = ExitStack()
        self._putting = ThreadPoolExecutor(1, thread_name_prefix="farcall-weights-put")
        self._following = threading.Lock()
        """Held while another worker is looked for that keeps the store."""
        self._last: tuple[int | None, int | None] = None, None
        """Number and serial of the version that this handle has read last."""

    @property
    def on(self) -> str:
        """The worker that keeps the store now, by name."""
        return self._handle.on

    def __repr__(self) -> str:
        return f"<weights.Store '{self.name}' on '{self.on}'>"

    # ---- writing

    @torch.no_grad()
    def put(
        self,
        number: int,
        state: Mapping[str, Any],
        part: tuple[int, int] | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
    ) -> bool:
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
            metadata: texts, numbers, booleans and None by name; ``metadata()`` returns those of all parts
                together, which have 64 KiB at most. Those given with a part of a version that is whole
                already are ignored.

        Returns:
            Whether the version is whole now.

        Raises:
            WeightsError: the part does not fit to the others: they overlap, have another type or shape, or
                elements are missing; the text names the tensor. The version stays open, and takes the right
                part. Or the version is whole, with other values.
            NoMemoryError: there is no memory for it; earlier versions stay.
            WorkerLostError: the worker that keeps the store is gone, and there is no second copy.
        """
        number = _number(number)
        given = _part(part_of(state) if part is None else part)
        said = checked_metadata(metadata)
        pieces, specs = described(state)
        return self._by_keeper(lambda handle: handle.put(number, given, pieces, specs, said))

    def put_async(
        self,
        number: int,
        state: Mapping[str, Any],
        part: tuple[int, int] | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
    ) -> Future[bool]:
        """Like ``put``, on a thread of the store; returns a future, to wait for or to ``await``. The tensors
        must not be changed until it is completed. Several are made one after another.
        """
        future: Future[bool] = Future()
        put = partial(self.put, number, state, part, metadata=metadata)
        try:
            self._putting.submit(_complete, future, put)
        except RuntimeError:
            closed = f"the weight store '{self.name}' is closed: put_async needs an open one"
            raise WeightsError(closed) from None
        return future

    # ---- reading

    @torch.no_grad()
    def get(
        self,
        into: Mapping[str, Any],
        version: int | str | None = None,
        newer_than: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Copy a version into tensors, in place: all of them, or none if this raises.

        Args:
            into: tensors by name, with exactly the version's names, types and shapes, in any sharding: plain
                tensors, DTensors, ``Block`` objects. Of DTensors and blocks only what is here is copied.
            version: number or tag of the version; default: the newest, which became whole last.
            newer_than: wait until the newest is newer than this version. If this handle has read that
                version last, one that has the same number and was put later, after ``drop``, is newer.
            timeout: how long to wait for such a version, in seconds; 0: not at all; default: as long as the
                store's worker lives.

        Returns:
            The number of the version.

        Raises:
            RpcTimeoutError: there was no such version in time. A ``TimeoutError``, too.
            WeightsError: names, types or shapes are not those of the version; or it is not kept any more.
            WorkerLostError: the worker that keeps the store is gone, and there is no second copy.
        """
        pieces, specs = described(into)
        for name, own in pieces.items():
            if any(overlaps_itself(piece.local) for piece in own):
                raise WeightsError(f"{name!r} cannot be written to: some of its elements are one in memory")

        def read(handle: Handle, wanted: Wanted) -> Held:
            with contextlib.ExitStack() as stack:
                held = stack.enter_context(handle.leased(wanted, reads=True))
                reason = difference(specs, held.layout.specs)
                if reason is not None:
                    raise WeightsError(f"version {held.number} of store '{self.name}' does not fit: {reason}")
                for _, local, data in list(
                    handle.contents(held, pieces, stack)
                ):  # all, before the first copy
                    local.copy_(data)
                return held

        return self._read(read, version, newer_than, timeout)

    def get_async(
        self,
        into: Mapping[str, Any],
        version: int | str | None = None,
        newer_than: int | None = None,
        timeout: float | None = None,
    ) -> Future[int]:
        """Like ``get``, on a thread of its own; returns a future, to wait for or to ``await``."""
        return _on_thread(partial(self.get, into, version, newer_than, timeout))

    def wait(
        self, version: int | str | None = None, newer_than: int | None = None, timeout: float | None = None
    ) -> int:
        """Wait for a version as ``get`` does, without copying it; returns its number."""
        wanted = self._wanted(version, newer_than, timeout)
        return self._by_keeper(lambda handle: handle.look(wanted)).number

    def wait_async(
        self, version: int | str | None = None, newer_than: int | None = None, timeout: float | None = None
    ) -> Future[int]:
        """Like ``wait``, on a thread of its own; returns a future, to wait for or to ``await``."""
        return _on_thread(partial(self.wait, version, newer_than, timeout))

    def on_new_version(self, callback: Callable[[int], object], newer_than: int | None = None) -> ExitStack:
        """Have ``callback(number)`` called when there is a newer version, on a thread of its own.

        If several become whole while the callback runs, it is called for the newest only. An error that it
        raises is logged. The calls end with ``close()``, or when this worker shuts down.

        Args:
            callback: called with the number.
            newer_than: called first for a version that is newer than this one; default: for the next one.

        Returns:
            A context manager; its ``close()`` ends the calls.

        Example::

            store.on_new_version(lambda number: store.get(model.state_dict()))  # the newest by now
        """
        if not callable(callback):
            raise TypeError(f"callback must be callable, not {callback!r:.100}")
        ended = threading.Event()
        first: tuple[int | None, int | None] = newer_than, None
        if newer_than is None:
            with contextlib.suppress(TimeoutError):
                there = self._look(None, None, 0.0)
                first = there.number, there.serial
        arguments = (callback, ended, *first)
        name = "farcall-weights-follow"
        threading.Thread(target=self._call_back, args=arguments, name=name, daemon=True).start()
        subscription = ExitStack()
        subscription.callback(ended.set)
        self._subscriptions.callback(ended.set)
        return subscription

    def _look(self, newer_than: int | None, serial: int | None, seconds: float) -> Held:
        wanted = Wanted(None, newer_than, serial, seconds, monotonic() + seconds)
        return self._by_keeper(lambda handle: handle.look(wanted))

    def _call_back(
        self,
        callback: Callable[[int], object],
        ended: threading.Event,
        last: int | None,
        serial: int | None,
    ) -> None:
        """Call back for each newer version that is seen, until ``ended``."""
        while not ended.is_set():
            try:
                seen = self._look(last, serial, _LOOK_SECONDS)
            except TimeoutError:
                continue
            except RpcError as error:  # the store is gone, or this worker is leaving
                level = logging.WARNING if isinstance(error, WeightsError) else logging.INFO
                logger.log(
                    level, "no more callbacks for versions of store '%s': %s", self.name, legible(error)
                )
                return
            last, serial = seen.number, seen.serial
            if ended.is_set():
                return
            try:
                callback(last)
            except Exception:
                logger.exception("the callback for version %d of store '%s' has failed", last, self.name)

    def lease(self, version: int | str | None = None, timeout: float | None = None) -> Lease:
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
        return Lease(partial(self._read, version=version, newer_than=None, timeout=timeout))

    def _read(
        self,
        read: Callable[[Handle, Wanted], Held],
        version: int | str | None,
        newer_than: int | None,
        timeout: float | None,
    ) -> int:
        """Read a version, and note that it is the one that was read last."""
        wanted = self._wanted(version, newer_than, timeout)
        held = self._by_keeper(lambda handle: read(handle, wanted))
        self._last = held.number, held.serial
        return held.number

    def _wanted(self, version: int | str | None, newer_than: int | None, timeout: float | None) -> Wanted:
        if version is not None and newer_than is not None:
            raise WeightsError("give version or newer_than, not both")
        version = _asked(version)
        newer_than = None if newer_than is None else _number(newer_than)
        last, serial = self._last
        deadline = float("inf") if timeout is None else monotonic() + timeout
        return Wanted(version, newer_than, serial if last == newer_than else None, timeout, deadline)

    # ---- what there is

    def versions(self) -> list[int]:
        """Return the numbers of the whole versions, in the order in which they became whole."""
        found: list[int] = self._ask("versions")
        return found

    def drop(self, number: int) -> None:
        """Remove a version. Leases of it go on. ``WeightsError`` if there is none."""
        self._ask("drop", _number(number))

    def tag(self, name: str, version: int | None) -> None:
        """Give a whole version a name, such as ``"best"``, which no other one has then; None: take it away.

        ``get(into, version="best")`` and ``lease("best")`` find it, or wait for it. A version that has a tag
        stays, besides the ``keep`` newest.

        Raises:
            WeightsError: there is no such version, or there are 64 tags already.
        """
        check_tag(name)
        self._ask("tag", name, None if version is None else _number(version))

    def metadata(self, version: int | str | None = None) -> dict[str, Any]:
        """Return what ``put`` was given as ``metadata``, for a number or tag; default: the newest version.
        ``WeightsError`` if there is none.
        """
        found: dict[str, Any] = self._ask("metadata", _asked(version))
        return found

    def usage(self) -> dict[str, Any]:
        """Return what the store has and uses now.

        Returns:
            ``versions``: the whole ones; ``open``: for each other one, which parts are missing; ``tags``;
            ``keep``; ``copies``: 2 if a second copy has all versions; ``bytes``: size of all its memory;
            ``leases``: their number; ``holders``: the workers that have them; ``sent_bytes`` and
            ``received_bytes``: what went to and came from other hosts; ``saved_bytes``: what did not go, as
            only differences did; ``ages``: seconds since each version became whole; ``readers``: for each
            worker, the number of the version that it has read last, if that is there.
        """
        found: dict[str, Any] = self._ask("usage")
        return found

    def close(self) -> None:
        """Release the memory that this handle uses, and end the connection that ``connect`` has made. The
        store itself is not touched.
        """
        self._putting.shutdown(wait=False)
        self._subscriptions.close()
        self._handle.close()
        if self._owned is not None:
            atexit.unregister(self.close)
            self._owned.close("it has closed its weight store")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the worker that keeps the store

    def _ask(self, what: str, *args: Any) -> Any:
        return self._by_keeper(lambda handle: handle.ask(what, *args))

    def _by_keeper(self, call: Callable[[Handle], T]) -> T:
        """Make calls at the worker that keeps the store; again, at the one that takes over if it is lost."""
        while True:
            handle = self._handle
            try:
                return call(handle)
            except WorkerLostError as error:
                if error.worker != handle.on or not self._follow(handle):
                    raise
            except UnknownWorkerError:  # a worker that has been lost is forgotten after a while
                if not self._follow(handle):
                    raise
            except WeightsError:
                if handle.copies < 2 or handle.is_there() or not self._follow(handle):
                    raise

    def _follow(self, gone: Handle) -> bool:
        """Have a handle of the worker that has taken over; returns whether there is one."""
        if gone.copies < 2:
            return False
        with self._following:
            if self._handle is gone:
                handle = successors.open_again(gone.agent, gone.home, gone.name, None, gone.copies)
                if handle is None:
                    return False
                self._handle = handle
                gone.close()
                gone.end_copy()
                text = "store '%s' goes on on worker '%s', as worker '%s' is lost"
                logger.warning(text, self.name, self.on, gone.on)
            return True


def _complete(future: Future[T], call: Callable[[], T]) -> None:
    try:
        value = call()
    except Exception as error:  # the future's
        future.set_exception(error)
    else:
        future.set_result(value)


def _on_thread(call: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()
    threading.Thread(target=_complete, args=(future, call), name="farcall-weights", daemon=True).start()
    return future


def _opened(agent: Agent, name: str, on: WorkerReference, keep: int | None, copies: int) -> Handle:
    """Open a store of the group."""
    try:
        return successors.open_store(agent, name, get_worker_info(on).name, keep, copies)
    except (UnknownWorkerError, WorkerLostError):
        home = on if isinstance(on, str) else getattr(on, "name", None)
        handle = successors.open_again(agent, home, name, keep, copies) if home and copies > 1 else None
        if handle is None:
            raise
        return handle


def _asked(version: Any) -> int | str | None:
    return version if version is None or isinstance(version, str) else _number(version)


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
