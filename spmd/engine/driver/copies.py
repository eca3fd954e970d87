"""Survival of the loss of workers in SPMD mode: what the driver needs to have programs done again.

After every some programs the driver orders a save (see ``spmd.engine.worker.saves``), and it keeps all
steps that it has sent since the last save that is complete. If workers are lost, others take their places,
all go back to that save, and the steps are sent again. On workers of the same kind, with deterministic
operators, they compute the same to the bit, so a program on the driver notices nothing but the time.

The driver sends one program while a save is under way, and then waits until that is complete. So the programs
that are repeated after a loss are at most ``every``, and that one.

Not survived are the loss of a worker together with its neighbour, which has its shards, a loss while an
operation has failed and the workers are not together again, and the loss of the driver.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

import rpc
from rpc.agent.waiting import wait_futures
from rpc.errors import RpcError
from rpc.group.workers import WorkerInfo
from rpc.runtime.current import current_agent
from rpc.runtime.interrupts import is_interruption
from spmd.engine.program.step_messages import EngineStep, Save
from spmd.workers.worker_set import RemotePort

__all__ = ["Copies", "RemoteWorker", "Sent", "UnrecoverableError"]

logger = logging.getLogger(__name__)

_MAX_LOGGED = 256
"""Maximum number of steps between two saves, as they are kept."""

_NOTICE_SECONDS = 5.0
"""Time in seconds in which a loss becomes known here, once a call to the worker has failed."""


class RemoteWorker(RemotePort):
    """A worker of SPMD mode, called remotely.

    Args:
        name: its name in the RPC group.
        worker: reference to it, with the methods of ``ServedWorker``.

    Attributes:
        peer: the connection to it, which knows whether it is lost.
    """

    def __init__(self, name: str, worker: Any) -> None:
        super().__init__(name, worker)
        self.peer: Any = current_agent().group.peers.find(name)

    def send(self, step: EngineStep) -> Any:
        """Have it do a step; a future of its answer. Raises if the step cannot be sent."""
        call = None if step.uploads or step.wanted else step.call()
        if call is None:
            return self.begun(self.do(*step.message()))
        answer = call.send(self.worker)
        if answer.done():
            answer.value()
        return answer

    def regroup(self, generation: int) -> Any:
        return self.worker.rpc_async(timeout=0).regroup(generation)


@dataclass(frozen=True, slots=True)
class Sent:
    """A step as it was sent to all workers. For its attributes see ``EngineStep``; ``parts`` has the shards
    of each upload, by worker, and ``workers`` are those whose values are wanted.
    """

    base: int
    known: Any = None
    inputs: tuple[int, ...] = ()
    scalars: tuple[Any, ...] = ()
    parts: Sequence[list[Tensor]] = ()
    freed: tuple[int, ...] = ()
    forget: tuple[int, ...] = ()
    wanted: tuple[int, ...] = ()
    workers: Sequence[int] = ()
    save: Save | None = None


class UnrecoverableError(Exception):
    """Lost workers cannot be replaced; the text says why."""


Replace = Callable[[Sequence[int], int, int], Sequence[RemoteWorker]]
"""Has others take the places of lost workers: called with the places, the number of the process groups that
all form again, and the number of the next step; returns the workers of all places.
"""


@dataclass(eq=False)
class _Pending:
    """A save under way: its number, how many steps were logged before it, and the workers' futures."""

    number: int
    logged: int
    futures: list[Any] = field(default_factory=list)


class Copies:
    """The steps since the last complete save, and the save under way. Under the session's lock.

    Args:
        ports: the workers, by place.
        every: number of programs after which a save is ordered.
        replace: see ``Replace``.

    Attributes:
        ports: the workers at present.
        log: steps since the newest complete save, each with the record that the session keeps of it.
    """

    def __init__(self, ports: Sequence[RemoteWorker], every: int, replace: Replace) -> None:
        self.ports = tuple(ports)
        self.log: list[tuple[Sent, Any]] = []
        self._every, self._replace = every, replace
        self._programs = 0
        self._count = 0
        self._complete = -1
        self._pending: _Pending | None = None
        self._saved_to = 0
        self._empty: set[int] = set()  # places whose workers have not got what the lost ones had
        self._changed = threading.Condition()
        self._watch = rpc.on_worker_lost(self._lost)
        self._connect(range(len(self.ports)))

    def close(self) -> None:
        """Watch no longer."""
        self._watch.close()

    # ---- saves

    def is_due(self) -> bool:
        """Whether a save is to be ordered: for the number of programs, or for that of all steps."""
        return self._programs >= self._every or len(self.log) >= _MAX_LOGGED

    def may_send(self) -> bool:
        """Whether another program may be sent before the save under way is complete."""
        return self._pending is None or self._programs == 0

    def sent_program(self) -> None:
        """Count a program."""
        self._programs += 1

    def order(self, sharded: Callable[[int], tuple[int, ...]], base: int) -> Save:
        """Return the order for the next save.

        Args:
            sharded: returns the ids from a number on of which workers have different parts.
            base: the next id.
        """
        save = Save(self._count, sharded(self._saved_to))
        self._count, self._saved_to, self._programs = self._count + 1, base, 0
        return save

    def ordered(self, save: Save) -> None:
        """Note that a save was sent, as the last step that was logged."""
        self._pending = _Pending(save.number, len(self.log))
        self._ask()

    def complete(self) -> Exception | None:
        """Wait until the save under way is complete; returns the error of a worker that has not got it."""
        pending = self._pending
        if pending is None:
            return None
        try:
            wait_futures(pending.futures)
        except Exception as error:
            if is_interruption(error):
                raise
            return error
        self._complete, self._pending = pending.number, None
        del self.log[: pending.logged]
        for port in self.ports:
            with suppress(RpcError):  # it is lost: the next wait tells
                port.worker.rpc_async(timeout=0).complete(pending.number)
        return None

    def _ask(self) -> None:
        assert self._pending is not None
        number = self._pending.number
        self._pending.futures = [port.worker.rpc_async(timeout=0).saved(number) for port in self.ports]

    # ---- losses

    def _lost(self, worker: WorkerInfo, reason: str) -> None:
        with self._changed:
            self._changed.notify_all()

    def gone(self) -> list[int]:
        """Return the places of lost workers; waits for the notice of a loss, which may still come."""

        def places() -> list[int]:
            return [place for place, port in enumerate(self.ports) if port.peer.lost is not None]

        with self._changed:
            self._changed.wait_for(places, _NOTICE_SECONDS)
            return places()

    def cut_off(self, places: Sequence[int]) -> None:
        """End what the others may wait in for lost workers."""
        left = [port for place, port in enumerate(self.ports) if place not in places]
        for ended in [port.worker.rpc_async(timeout=0).abort("another worker is lost") for port in left]:
            with suppress(RpcError):  # it is lost as well
                ended.wait()

    def recover(self, places: Sequence[int], generation: int, first: int) -> None:
        """Have others take the places of lost workers, and all go back to the newest complete save.

        Args:
            places: places of the lost workers.
            generation: number of the process groups that all form.
            first: number of the next step. The steps of the log are to be sent again.

        Raises:
            UnrecoverableError: that cannot be.
            RpcError: another worker was lost meanwhile.
        """
        size, number = len(self.ports), self._complete
        if number < 0:
            raise UnrecoverableError("nothing was copied yet")
        self._empty.update(places)
        names = ", ".join(f"'{self.ports[place].name}'" for place in places)
        if any((place + 1) % size in self._empty for place in self._empty):
            raise UnrecoverableError(f"{names} and a worker that had the copies were lost together")
        logger.warning(
            "SPMD mode: lost %s (%s); %d programs are repeated with another worker in its place",
            names,
            ", ".join({str(self.ports[place].peer.lost) for place in places}),
            sum(sent.known is not None for sent, _ in self.log),
        )
        self.ports = tuple(self._replace(places, generation, first))
        self._connect([place for lost in self._empty for place in ((lost - 1) % size, lost)])
        calls = []
        for place, port in enumerate(self.ports):
            worker = port.worker.rpc_async(timeout=0)
            if place in self._empty:
                calls.append(worker.take_over(number, self.ports[(place + 1) % size].worker))
            else:
                calls.append(worker.restore(number))
        wait_futures(calls)
        before = [self.ports[(place - 1) % size].worker for place in self._empty]
        wait_futures([worker.rpc_async(timeout=0).send_again(number) for worker in before])
        self._empty.clear()

    def sent_again(self) -> None:
        """Note that the steps of the log were sent again."""
        if self._pending is not None:
            self._ask()

    def _connect(self, places: Sequence[int]) -> None:
        """Tell workers which one keeps their shards."""
        size = len(self.ports)
        wait_futures(
            [
                self.ports[place].worker.rpc_async().next_to(self.ports[(place + 1) % size].worker)
                for place in places
            ]
        )
