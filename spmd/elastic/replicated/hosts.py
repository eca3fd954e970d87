"""The replicated objects in which this process has a part, and what it knows of losses."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable
from time import monotonic
from typing import Any, Final, NamedTuple, Protocol

from rpc.errors import GivenUpError, NameTakenError, RpcError
from rpc.runtime.current import current_agent
from rpc.serialization.settings import allow_function
from spmd.elastic.errors import ElasticError, PutOut
from spmd.elastic.losses import LOG_SECONDS, Losses
from spmd.elastic.replicated.order import Copy

__all__ = ["CANDIDATE", "FOUNDING", "MEMBER", "STANDBY", "Hosts", "Part", "Status", "hosts", "part"]

logger = logging.getLogger(__name__)

EXTENSION: Final = "spmd.elastic.replicated"

STANDBY, CANDIDATE, FOUNDING, MEMBER = "standby", "candidate", "founding", "member"

_ASK_TIMEOUT: Final = 3.0


class Status(NamedTuple):
    """What a worker says of an object.

    Attributes:
        role: ``STANDBY``, it can keep a copy; ``CANDIDATE``, it also waits for the object, and may found it;
            ``FOUNDING``; ``MEMBER``, it has a copy; empty if it has nothing to do with the object.
        identity: tells the object from others that had its name before; 0 while this is not known.
        view: number of the view, if it is the primary; else 0.
        ready: whether the view takes calls.
    """

    role: str = ""
    identity: int = 0
    view: int = 0
    ready: bool = False


class Part(Protocol):
    """This process's part in one object; see ``host.Host``."""

    description: str
    copy: Copy
    offers: set[int]
    woken: threading.Event

    def status(self) -> Status:
        """Return what to tell other workers."""


class Hosts:
    """The hosts of one agent, and what they know of losses. From any thread."""

    def __init__(self, agent: Any) -> None:
        if agent.is_static_group or "rpc.keeper" not in agent.extensions:
            raise ElasticError(
                "a replicated object needs a dynamic group, which knows who has died: start the workers with "
                "`farcall launch --dynamic`, or call init_rpc without a world_size"
            )
        if agent.options.deserialization == "safe":
            raise ElasticError(
                "copies of an object are pickled, which deserialization='safe' does not accept"
            )
        self.agent = agent
        self.me: int = agent.incarnation
        self.dead: set[int] = set()
        self.gone: set[int] = set()
        self.lost: set[int] = set()
        self.put_out: str | None = None
        self.by_name: dict[str, Any] = {}  # each is a ``Part``
        self.lines: dict[tuple[str, int], Any] = {}  # of ``handle``
        self.closed = threading.Event()
        self.changed = threading.Condition(threading.RLock())
        self.losses = Losses(agent, self, self.changed, self._note, self._out)
        self._doubted: set[int] = set()
        self._removed: set[int] = set()
        self._log_read = 0.0
        self.losses.begin()
        agent.extensions[EXTENSION] = self
        agent.lifecycle.hooks.close.append(self.close)

    def close(self) -> None:
        """End all copies, as this worker leaves."""
        self.closed.set()
        self._wake()
        self.losses.close()

    # ---- losses: see ``losses.Observer``

    def partners(self) -> set[int]:
        views = [host.copy.view for host in self.by_name.values()]
        return {each for view in views if view is not None for each in view.members} - {self.me}

    def witnessed(self, incarnation: int) -> None:
        if incarnation not in self._doubted:
            self.dead.add(incarnation)
            self.gone.add(incarnation)

    def was_stopped(self) -> None:
        self._doubted |= self.partners()

    def was_removed(self, incarnations: Iterable[int]) -> None:
        self._removed.update(incarnations)

    def _out(self, reason: str) -> None:
        self.put_out = reason
        self._wake()

    def _note(self, incarnation: int) -> None:
        self.lost.add(incarnation)
        self._wake()

    def _wake(self) -> None:
        for host in list(self.by_name.values()):
            host.woken.set()

    def is_lost(self, incarnation: int) -> bool:
        """Whether a worker is lost, which may live."""
        return self.losses.is_lost(incarnation)

    def learn(self, members: Iterable[int]) -> None:
        """Find out which of these are gone for certain; from the group's log if needed."""
        with self.changed:
            self.losses.take_in()
            unsure = [each for each in members if self.is_lost(each) and each not in self.gone]
        if not unsure or monotonic() - self._log_read < LOG_SECONDS:
            return
        self._log_read = monotonic()
        self.losses.read_log()
        removed = self._removed.intersection(unsure)
        self.losses.cut_off(removed, "the replicated object goes on without it", self.closed)
        self.gone |= removed

    def check(self) -> None:
        """Raise if this worker is out of its group, or leaves."""
        if self.put_out is not None:
            raise PutOut(f"{self.put_out}; replicated objects go on without it")
        if self.closed.is_set():
            raise GivenUpError(f"worker '{self.agent.info.name}' is leaving")

    # ---- other workers

    def survey(self, name: str, description: str | None, *, offer: bool = False) -> dict[int, Status]:
        """Ask all workers for their part in an object; return what they answer, by incarnation.

        Raises:
            NameTakenError: another worker has another object of this name, and nobody has this one yet.
        """
        taken: NameTakenError | None = None
        calls = {}
        args = (name, description, self.me if offer else 0)
        for member in self.agent.group.peers.view.present():
            if member.incarnation != self.me:
                with contextlib.suppress(RpcError):
                    calls[member.incarnation] = self.agent.call_async(
                        member.name, ask, args, {}, _ASK_TIMEOUT
                    )
        found = {self.me: ask(name, description, 0)}
        for incarnation, call in calls.items():
            try:
                found[incarnation] = Status(*call.wait())
            except NameTakenError as error:
                taken = error
            except RpcError as error:
                logger.debug("a worker does not say whether it has '%s': %s", name, error)
        there = {status.role for each, status in found.items() if each != self.me or status.role == MEMBER}
        if taken is not None and there.isdisjoint((FOUNDING, MEMBER)):
            raise taken
        return found

    def is_complete(self, answered: Iterable[int]) -> bool:
        """Whether these are all workers of the group that may live."""
        return self.losses.present() - self.dead <= set(answered)


_lock: Final = threading.Lock()


def hosts() -> Hosts:
    """Return the hosts of the current agent."""
    agent = current_agent()
    with _lock:
        found = agent.extensions.get(EXTENSION)
        return found if isinstance(found, Hosts) else Hosts(agent)


def part(name: str) -> Part | None:
    """Return this process's part in an object, or None."""
    registry = current_agent().extensions.get(EXTENSION)
    found: Part | None = registry.by_name.get(name) if isinstance(registry, Hosts) else None
    return found


@allow_function
def ask(name: str, description: str | None, candidate: int) -> Status:
    """Return this worker's part in an object, to one that can keep a copy, or has none (0)."""
    host = part(name)
    if host is None:
        return Status()
    if description is not None and description != host.description:
        if host.status().role in ("", STANDBY):  # of an object that may be gone
            return Status()
        raise NameTakenError(
            f"worker '{current_agent().info.name}' has another replicated object named '{name}': "
            f"{host.description}, where this one is {description}. Choose another name, by name="
        )
    if candidate and host.copy.is_primary:
        host.offers.add(candidate)
        host.woken.set()
    return host.status()
