"""``all_gather`` and ``barrier`` among workers, by name.

The worker with the smallest name leads. The others send it their object; when all have arrived, it sends all
of them to every worker. Rounds of the same set of names are numbered on each worker, so that several threads
and several sets can be active at once. If the leader gives a round up, because a worker that takes part is
lost or does not arrive in time, it notifies the others.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from rpc import errors
from rpc.agent.activity import Activity
from rpc.agent.calls import Caller
from rpc.agent.departure import Departure
from rpc.agent.futures import Future
from rpc.agent.hooks import Hooks
from rpc.errors import (
    NotInitializedError,
    ProtocolError,
    RpcError,
    RpcTimeoutError,
    SerializationError,
)
from rpc.group.peer import Peer, PeerTable
from rpc.options import UNSET_TIMEOUT
from rpc.runtime import waits
from rpc.runtime.blocking import INFINITE, Event, check_may_block
from rpc.runtime.current import current_agent
from rpc.runtime.executor import Executor
from rpc.runtime.interrupts import is_interruption, protected
from rpc.runtime.notices import wait_telling
from rpc.serialization.failures import text_of
from rpc.serialization.serializer import Serializer

__all__ = ["Gathering"]

logger = logging.getLogger(__name__)

Names = tuple[str, ...]
Key = tuple[Names, int]

_MOST_ROUNDS: Final = 1 << 16
"""Maximum number of rounds that are under way, or were begun by others only; others choose names
and numbers.
"""

_ANSWER_SECONDS: Final = 5.0
"""Timeout in seconds for another worker to answer what it waits for."""

_MOST_ASKED: Final = 8
"""Maximum number of missing workers that are asked whether they are in shutdown."""


class _Round:
    """One worker's state of one round."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.complete = Event()
        self.error: RpcError | None = None

    def fail(self, error: RpcError) -> None:
        self.error = error
        self.complete.set()


class Gathering:
    """The rounds that one agent takes part in. From any thread."""

    def __init__(
        self,
        caller: Caller,
        peers: PeerTable,
        executor: Executor,
        activity: Activity,
        departure: Departure,
        hooks: Hooks,
        serializer: Serializer,
    ) -> None:
        self._caller = caller
        self._peers = peers
        self._executor = executor
        self._activity = activity
        self._departure = departure
        self._waiting_tasks = 0
        """Number of the executor's tasks that wait for a round."""
        self._lock = threading.RLock()  # reentrant: a finalizer may call this object again
        self._next: dict[Names, int] = {}
        self._rounds: dict[Key, _Round] = {}
        self._given_up: dict[Names, tuple[int, RpcError]] = {}  # the last one, as leader
        for function in (_contribute, _publish, _fail, _state):
            serializer.allow_function(function)
        hooks.gone.append(self._worker_gone)
        hooks.closed.append(self._closed)

    def all_gather(self, value: Any, worker_names: Iterable[str] | None, timeout: float) -> dict[str, Any]:
        """See ``rpc.all_gather``."""
        check_may_block()
        me = self._peers.own.name
        names = tuple(sorted(set(worker_names or (info.name for info in self._peers.view.infos()))))
        if me not in names:
            raise ValueError(f"worker '{me}' gathers among {list(names)} without being one of them")
        peers = [self._peers.find(name) for name in names]
        call_timeout = self._caller.effective_timeout(timeout)
        wait_timeout = call_timeout if timeout > 0 and call_timeout else None
        leads = names[0] == me
        entered: list[tuple[Key, _Round]] = []
        try:
            self._enter(names, entered)
            ((key, state),) = entered
            if leads:
                objects, told = self._lead(key, state, value, peers, call_timeout, wait_timeout)
            else:
                self._check_present(names, peers)
                self._follow(key, value, call_timeout)
        except BaseException as error:
            if not entered or (isinstance(error, RpcTimeoutError) and not leads):  # it may still arrive
                self._forget(entered)
                raise
            raise self._give_up(entered[0][0], error, names[1:] if leads else names[:1]) from error.__cause__
        try:
            if not leads:
                return self._await(key, state, wait_timeout)
            _check_told(told, call_timeout)
            return objects
        finally:
            self._forget(entered)

    @protected
    def _enter(self, names: Names, entered: list[tuple[Key, _Round]]) -> None:
        """Begin the next round of some workers, and record it where no interruption loses it."""
        with self._lock:
            number = self._next.get(names, 0)
            self._next[names] = number + 1
            key = (names, number)
            entered.append((key, self._rounds.setdefault(key, _Round())))

    @protected
    def _forget(self, entered: list[tuple[Key, _Round]]) -> None:
        with self._lock:
            for key, _ in entered:
                self._rounds.pop(key, None)

    def _check_present(self, names: Names, peers: Iterable[Peer]) -> None:
        for peer in peers:
            if peer.lost is not None:
                raise peer.lost_error(f"barrier or all_gather among {list(names)} cannot complete")

    def _lead(
        self,
        key: Key,
        state: _Round,
        value: Any,
        peers: list[Peer],
        call_timeout: float,
        wait_timeout: float | None,
    ) -> tuple[dict[str, Any], dict[str, Future[Any]]]:
        """Return the gathered objects, and for each follower the call that sends them."""
        names, number = key
        self.contribute(names, number, names[0], value)
        for peer in peers:
            self._peers.watch_over(peer)
        self._check_present(names, peers)
        objects = self._await(key, state, wait_timeout)
        whole = {"objects": objects}
        caller = self._caller
        return objects, {
            name: Future.for_call(
                caller.call(name, _publish, (names, number), whole, call_timeout, coalesce=True)
            )
            for name in names[1:]
        }

    def _follow(self, key: Key, value: Any, call_timeout: float) -> None:
        names, number = key
        caller = self._caller
        contribution = (names, number, self._peers.own.name)
        caller.call(names[0], _contribute, contribution, {"value": value}, call_timeout).result()

    def _give_up(self, key: Key, error: BaseException, others: Names) -> BaseException:
        """Notify others that the round fails; later contributors are notified then. Returns the error."""
        names, number = key
        me = self._peers.own.name
        headline, _, what = text_of(error).partition(": ")
        if type(error) is SerializationError and headline.startswith("cannot call "):
            error = SerializationError(f"worker '{me}' cannot take part in _all_gather: {what}")
        told = copy.copy(error) if isinstance(error, RpcError) else None  # without its traceback
        if told is None:
            why = f"{type(error).__name__}: {text_of(error)}".removesuffix(": ")
            told = RpcError(f"worker '{me}' gave up _all_gather: {why}")
        with self._lock:
            self._next[names] = max(self._next.get(names, 0), number + 1)
            self._rounds.pop(key, None)
            self._given_up[names] = number, told
        caller = self._caller
        for name in others:
            with contextlib.suppress(RpcError):
                failure = (names, number, *_described(told))
                Future.for_call(caller.call(name, _fail, failure, {}, UNSET_TIMEOUT, coalesce=True))
        return error

    def _await(self, key: Key, state: _Round, timeout: float | None) -> dict[str, Any]:
        deadline = time.monotonic() + timeout if timeout else INFINITE
        with self._counted(), waits.waiting("barrier", lambda: self._awaited_by(key)):
            self._serving()  # resets the count
            done = wait_telling(state.complete, deadline, logger, lambda waited: self._tell(key, waited))
        if not done:
            raise RpcTimeoutError(
                f"worker '{self._peers.own.name}' timed out in _all_gather after {timeout or 0:.2f} seconds, "
                f"waiting for {self._awaited_by(key)}"
            )
        if state.error is not None:
            raise state.error
        return state.objects

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Count the current thread as waiting: if it runs a task, it serves no other worker."""
        task = self._executor.owns_current_thread()
        with self._lock:
            self._waiting_tasks += task
        try:
            yield
        finally:
            with self._lock:
                self._waiting_tasks -= task

    def _serving(self) -> bool:
        return self._activity.serving(self._waiting_tasks)

    def _tell(self, key: Key, waited: str) -> str | None:
        """Describe the workers that this one waits for, and which of them are in shutdown; None if it serves
        others in the meantime.
        """
        names, number = key
        if self._serving():
            return None
        me = self._peers.own.name
        said = f"worker '{me}' has waited {waited} in barrier or all_gather"
        missing = self.missing(names, number)
        if names[0] != me:
            try:
                missing, _ = self._ask(names[0], key)
            except RpcTimeoutError:
                return f"{said} for its leader '{names[0]}'"
        if not missing:
            return f"{said}, for the answer"
        leaving: list[str] = []
        for name in missing[:_MOST_ASKED]:
            with contextlib.suppress(RpcError):
                if name != me and self._ask(name, key)[1]:
                    leaving.append(name)
        for_whom = ", ".join(f"worker '{name}'" + " (in shutdown)" * (name in leaving) for name in missing)
        hint = ". A worker in shutdown() comes to no barrier: all must call it before" if leaving else ""
        return f"{said}, for {for_whom}{hint}"

    def _ask(self, name: str, key: Key) -> tuple[list[str], bool]:
        """Ask another worker for its ``state``."""
        answer: Future[tuple[list[str], bool]]
        answer = Future.for_call(self._caller.call(name, _state, key, {}, _ANSWER_SECONDS, coalesce=True))
        return answer.wait()

    def state(self, names: Names, number: int) -> tuple[list[str], bool]:
        """Return which workers this one misses in a round, and whether a thread of it waits in ``shutdown``.
        To answer that does not count as serving.
        """
        self._activity.inquired()
        return self.missing(names, number), self._departure.under_way

    def _awaited_by(self, key: Key) -> list[str]:
        """Return the workers that this one waits for in a round: those missing if it leads, else
        the leader.
        """
        names, number = key
        return self.missing(names, number) if names[0] == self._peers.own.name else [names[0]]

    def missing(self, names: Names, number: int) -> list[str]:
        """Return the workers that have not arrived yet, as far as this worker knows: the leader does."""
        with self._lock:
            state = self._rounds.get((names, number))
            return [] if state is None else [name for name in names if name not in state.objects]

    def contribute(self, names: Names, number: int, name: str, value: Any) -> None:
        """Record an object that has arrived. On the leader."""
        with self._lock:
            key = (names, number)
            state = self._rounds.get(key)
            if state is None:
                if number < self._next.get(names, 0):
                    given_up, error = self._given_up.get(names, (-1, None))
                    if error is None or given_up < number:  # a round cannot be complete without ``name``
                        error = RpcError(f"the leader of all_gather among {list(names)} is ahead of '{name}'")
                    raise copy.copy(error)
                state = self._begun_elsewhere(key)
            state.objects[name] = value
            if len(state.objects) == len(names):
                state.complete.set()

    def publish(self, names: Names, number: int, objects: dict[str, Any]) -> None:
        """Complete a round. On a follower."""
        with self._lock:
            state = self._rounds.get((names, number))
        if state is not None:
            state.objects = objects
            state.complete.set()

    def fail(self, names: Names, number: int, error: RpcError) -> None:
        """Fail a round that another worker has given up, which may not have begun here."""
        with self._lock:
            key = (names, number)
            state = self._rounds.get(key)
            if state is None and number >= self._next.get(names, 0):
                state = self._begun_elsewhere(key)
        if state is not None:
            state.fail(error)

    def _begun_elsewhere(self, key: Key) -> _Round:
        """Return a round that others have begun before this worker."""
        if len(self._rounds) >= _MOST_ROUNDS:
            raise RpcError(f"more than {_MOST_ROUNDS} rounds of all_gather wait for this worker")
        state = self._rounds[key] = _Round()
        return state

    def _closed(self) -> None:
        self._end_rounds(None, lambda what: NotInitializedError(f"RPC has been shut down: {what}"))

    def _worker_gone(self, peer: Peer, reason: str) -> None:
        self._end_rounds(peer.name, peer.lost_error)

    def _end_rounds(self, member: str | None, error: Callable[[str], RpcError]) -> None:
        """Fail the rounds in which a worker takes part; None for all."""
        with self._lock:
            rounds = [(names, state) for (names, _), state in self._rounds.items()]
        for names, state in rounds:
            if (member is None or member in names) and not state.complete.is_set():
                state.fail(error(f"barrier or all_gather among {list(names)} cannot complete"))


def _check_told(followers: dict[str, Future[Any]], timeout: float) -> None:
    """Wait until all followers have the gathered objects, or raise the error of the first that does not."""
    errors: dict[str, BaseException] = {}
    for name, call in followers.items():
        try:
            call.wait()
        except RpcError as error:
            if is_interruption(error):
                raise
            errors[name] = error
    if errors:
        first = next(iter(errors.values()))
        if isinstance(first, RpcTimeoutError):
            raise RpcTimeoutError(
                f"Followers {list(errors)} timed out in _all_gather after {timeout:.2f} seconds: {first}"
            )
        raise first


def _check_is_round(names: Any, number: Any, *taking_part: Any) -> None:
    """Raise unless these can identify a round in which the others take part: members may send anything."""
    are_names = type(names) is tuple and all(type(name) is str for name in names)
    if not are_names or type(number) is not int or not all(name in names for name in taking_part):
        raise ProtocolError("there is no such round of all_gather")


def _contribute(names: Names, number: int, name: str, *, value: Any) -> None:
    _check_is_round(names, number, name)
    current_agent().gathering.contribute(names, number, name, value)


def _publish(names: Names, number: int, *, objects: dict[str, Any]) -> None:
    objects = dict(objects)
    _check_is_round(names, number, *objects)
    current_agent().gathering.publish(names, number, objects)


def _state(names: Names, number: int) -> tuple[list[str], bool]:
    _check_is_round(names, number)
    gathering: Gathering = current_agent().gathering
    return gathering.state(names, number)


def _fail(names: Names, number: int, kind: str, text: str, attributes: dict[str, str]) -> None:
    _check_is_round(names, number)
    error = _ERRORS.get(kind, RpcError)(text)
    vars(error).update((str(name), str(value)) for name, value in attributes.items())
    current_agent().gathering.fail(names, number, error)


def _described(error: RpcError) -> tuple[str, str, dict[str, str]]:
    """Describe an error in a form that a worker in safe mode accepts."""
    attributes = {name: value for name, value in vars(error).items() if type(value) is str}
    return type(error).__name__, text_of(error), attributes


_ERRORS: Final[dict[str, type[RpcError]]] = {
    name: kind
    for name, kind in ((name, getattr(errors, name)) for name in errors.__all__)
    if isinstance(kind, type) and issubclass(kind, RpcError)
}
