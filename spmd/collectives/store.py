"""A c10d store that a worker of the RPC group serves, for forming process groups."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from rpc.agent.agent import Agent
from rpc.agent.futures import Future
from rpc.errors import RpcError, RpcTimeoutError
from rpc.group.peer import Peer
from rpc.group.workers import WorkerInfo
from rpc.lifecycle.worker_watch import on_worker_lost
from rpc.runtime.current import current_agent, extension
from spmd.collectives.errors import StoreGivenUpError

__all__ = ["WorkerStore", "fail_if_lost", "forget_keys", "install"]

_EXTENSION: Final = "spmd.store"
_OPERATIONS: Final = frozenset({"put", "get", "add", "compare_set", "delete", "has", "count", "give_up"})


class _Keys:
    """The keys at the serving worker. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._waiting: list[tuple[set[str], Future[str | None], int]] = []
        self._given_up: dict[str, str] = {}

    def put(self, key: str, value: bytes) -> None:
        with self._lock:
            ready = self._set(key, value)
        for future in ready:
            future.set_result(None)

    def _set(self, key: str, value: bytes) -> list[Future[str | None]]:
        """Set a key; returns the requests that do not wait any more."""
        self._values[key] = value
        for missing, _, _ in self._waiting:
            missing.discard(key)
        ready = [future for missing, future, _ in self._waiting if not missing]
        self._waiting = [each for each in self._waiting if each[0]]
        return ready

    def get(self, key: str) -> bytes | None:
        with self._lock:
            return self._values.get(key)

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            total = int(self._values.get(key, b"0")) + amount
            ready = self._set(key, str(total).encode())
        for future in ready:
            future.set_result(None)
        return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        with self._lock:
            found = self._values.get(key, b"")
            if found != expected:
                return found or expected
            ready = self._set(key, desired)
        for future in ready:
            future.set_result(None)
        return desired

    def delete(self, key: str) -> bool:
        with self._lock:
            return self._values.pop(key, None) is not None

    def forget(self, prefix: str) -> None:
        with self._lock:
            for key in [each for each in self._values if each.startswith(prefix)]:
                del self._values[key]

    def has(self, keys: Sequence[str]) -> bool:
        with self._lock:
            return all(key in self._values for key in keys)

    def count(self) -> int:
        with self._lock:
            return len(self._values)

    def wait(self, keys: Sequence[str], incarnation: int) -> Future[str | None]:
        """Return a future that is done when all keys are set, or the worker that waits is gone, given by its
        incarnation; its value is the reason if they never will be.
        """
        future: Future[str | None] = Future()
        with self._lock:
            missing = {key for key in keys if key not in self._values}
            reason = next((why for prefix, why in self._given_up.items() if _begin(missing, prefix)), None)
            if missing and reason is None:
                self._waiting.append((missing, future, incarnation))
                return future
        future.set_result(reason)
        return future

    def end_wait(self, future: Future[str | None]) -> None:
        with self._lock:
            self._waiting = [each for each in self._waiting if each[1] is not future]

    def give_up(self, prefix: str, reason: str) -> None:
        with self._lock:
            self._given_up[prefix] = reason
            ended = [future for missing, future, _ in self._waiting if _begin(missing, prefix)]
            self._waiting = [each for each in self._waiting if each[1] not in ended]
        for future in ended:
            future.set_result(reason)

    def peer_gone(self, peer: Peer, reason: str) -> None:
        with self._lock:
            ended = [future for _, future, incarnation in self._waiting if incarnation == peer.incarnation]
            self._waiting = [each for each in self._waiting if each[2] != peer.incarnation]
        for future in ended:
            future.set_result(reason)


def _begin(keys: set[str], prefix: str) -> bool:
    return any(key.startswith(prefix) for key in keys)


def install(agent: Agent) -> None:
    """Make an agent serve a store, as an extension of the agent."""
    keys = agent.extensions[_EXTENSION] = _Keys()
    agent.lifecycle.hooks.gone.append(keys.peer_gone)
    agent.serializer.allow_function(_ask)
    agent.serializer.allow_function(_wait)


def forget_keys(agent: Agent, prefix: str) -> None:
    """Delete all keys with a prefix from the store that an agent serves."""
    agent.extensions[_EXTENSION].forget(prefix)


def _ask(operation: str, arguments: tuple[Any, ...]) -> Any:
    """Handle a request other than waiting, at the serving worker."""
    if operation not in _OPERATIONS:
        raise ValueError(f"a store does not {operation!r}")
    return getattr(extension(_EXTENSION), operation)(*arguments)


async def _wait(keys: Sequence[str], incarnation: int) -> Any:
    """Handle a wait, at the serving worker, until its caller cancels it or is gone."""
    store = extension(_EXTENSION)
    future = store.wait(keys, incarnation)
    try:
        gone = current_agent().group.peers.view.gone_reason(incarnation)
        if gone is not None:  # perhaps before it was among those that wait
            return gone
        return await future
    finally:
        store.end_wait(future)


class WorkerStore(Store):
    """The store at a worker, for any other.

    Keep it for as long as c10d has it: C++ calls its methods, and does not keep the object.

    Args:
        worker: name of the worker that serves it.
        prefix: prefix of all keys.
    """

    def __init__(self, worker: str, prefix: str = "") -> None:
        super().__init__()
        self._worker = worker
        self._prefix = prefix
        self._limit: timedelta = self.timeout  # type: ignore[attr-defined]

    def set_timeout(self, timeout: timedelta) -> None:
        self._limit = timeout

    def _call(self, operation: str, key: str, *arguments: Any) -> Any:
        return self._run(_ask, (operation, (self._prefix + key, *arguments)))

    def _run(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        limit = self._limit.total_seconds()
        return current_agent().call_async(self._worker, function, arguments, {}, limit).wait()

    def give_up(self, reason: str) -> None:
        """Make all waits for keys of this prefix that are not set fail, now and later. If the serving worker
        is lost, they have failed.
        """
        with suppress(RpcError):
            self._call("give_up", "", reason)

    def set(self, key: str, value: bytes | str) -> None:
        self._call("put", key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        found: bytes = self._call("get", key) or b""
        return found

    def add(self, key: str, value: int) -> int:
        total: int = self._call("add", key, value)
        return total

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        values = [each.encode() if isinstance(each, str) else bytes(each) for each in (expected, desired)]
        found: bytes = self._call("compare_set", key, *values)
        return found

    def deleteKey(self, key: str) -> bool:  # noqa: N802
        return bool(self._call("delete", key))

    def getNumKeys(self) -> int:  # noqa: N802
        return int(self._run(_ask, ("count", ())))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._run(_ask, ("has", ([self._prefix + key for key in keys],))))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit = timeout or self._limit
        prefixed = [self._prefix + key for key in keys]
        agent = current_agent()
        future = agent.call_async(self._worker, _wait, (prefixed, agent.incarnation), {}, 0.0)
        try:
            given_up = future.wait(limit.total_seconds() or None)
        except RpcTimeoutError as error:
            raise DistStoreError(
                f"nobody has set {', '.join(keys)} in the store at worker '{self._worker}' after {limit}"
            ) from error
        finally:
            future.cancel()  # if it has not ended: a call without an answer would keep workers from leaving
        if given_up is not None:
            raise StoreGivenUpError(given_up)


@contextmanager
def fail_if_lost(store: WorkerStore, workers: Sequence[str]) -> Iterator[None]:
    """While workers form a group over a store, make all of them fail as soon as one of them is lost.

    Args:
        store: store with a prefix that only this group uses.
        workers: names of the workers that form it, and of any other that it depends on.
    """
    agent: Any = current_agent()

    def lost(worker: WorkerInfo, reason: str) -> None:
        if worker.name in workers:
            store.give_up(f"worker '{worker.name}' (id {worker.id}) is gone: {reason}")

    with on_worker_lost(lost):
        for peer in map(agent.group.peers.find, workers):
            if peer.lost is not None:
                lost(peer.member.info, peer.lost)
            elif not peer.is_self:
                agent.group.peers.watch_over(peer)
        yield
