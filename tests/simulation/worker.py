"""One simulated worker: a real agent on a simulated platform."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from dist_autograd.installation import install
from rpc.agent.agent import Agent
from rpc.agent.platform import Platform
from rpc.group.workers import Member, WorkerInfo
from rpc.options import AgentOptions
from rpc.runtime.executor import Executor, complete_futures
from rpc.runtime.loop import LoopThread
from rpc.runtime.process_tuning import ProcessTuning
from rpc.runtime.tasks import Task, TaskSource
from rpc.testing.memory_transport import MemoryTransport
from tests.simulation.clock import Handle, WorkerLoop
from tests.simulation.network import SimulatedNetwork

__all__ = ["Worker", "platform"]

T = TypeVar("T")

_GROUP: Final = "simulated"
_SLOW: Final = 0.1
"""The share of tasks that find all cores busy."""


class _Thread(LoopThread):
    """There is but one thread: whoever calls is on it."""

    def __init__(self, loop: WorkerLoop) -> None:
        self.loop = loop

    def is_current(self) -> bool:
        return True

    def call(self, function: Callable[..., T], *args: object) -> T:
        return function(*args)

    def wait_for(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        coroutine.close()
        raise AssertionError("a simulated worker cannot wait")

    def stop(self, timeout: float = 5.0) -> bool:
        return True


class _Executor(Executor):
    """Each task runs a moment after it was submitted, in no order."""

    def __init__(self, loop: WorkerLoop) -> None:
        self._loop = loop
        self._active = 0
        self._planned: dict[Handle, Task] = {}
        self._idle_callback: Callable[[], None] | None = None
        self.closed = False

    def threads(self) -> list[Any]:
        return []

    def submit(self, task: Task) -> bool:
        return self.submit_batch((task,))

    def submit_batch(self, tasks: Sequence[Task]) -> bool:
        if self.closed:
            complete_futures(tasks)
            return False
        chance = self._loop.clock.chance.random
        for task in tasks:
            self._active += 1
            delay = chance() * (0.2 if chance() < _SLOW else 0.001)
            handle = self._loop.call_later(delay, self._perform)
            handle.arguments = (handle,)
            self._planned[handle] = task
        return True

    def _perform(self, handle: Handle) -> None:
        function, argument = self._planned.pop(handle)
        try:
            function(argument)
        finally:
            self._active -= 1
        if not self._active and self._idle_callback is not None:
            self._idle_callback()

    def lend(self, source: TaskSource | None, *, at_once: bool) -> int:
        return 0

    def active(self) -> int:
        return self._active

    def counts(self) -> dict[str, int]:
        return {"active_tasks": self._active}

    def when_idle(self, callback: Callable[[], None] | None) -> None:
        self._idle_callback = callback

    def owns_current_thread(self) -> bool:
        return False

    def stop(self, timeout: float | None = 5.0) -> bool:
        self.closed = True
        dropped, self._planned = self._planned, {}
        for handle in dropped:
            handle.cancel()
        complete_futures(list(dropped.values()))
        return True


class _Process(ProcessTuning):
    """Settings of a process, of which there is none."""

    def apply(self) -> None:
        pass

    def restore(self, *, give_back: bool = True) -> None:
        pass


def platform(network: SimulatedNetwork, loop: WorkerLoop) -> Platform:
    """The simulated platform of an agent."""
    return Platform(
        _Thread(loop),
        _Executor(loop),
        {MemoryTransport.scheme: MemoryTransport(network, loop.place)},
        _Process(None, 0),
    )


class Worker:
    """A worker, from its start to its end; its incarnation tells it from others of its name.

    Attributes:
        agent, loop: its.
        member: how others know it.
        alive: whether its process has not ended.
        shutdown_since: when it entered shutdown, if it has.
        leaving: whether it is just saying goodbye.
    """

    def __init__(
        self, network: SimulatedNetwork, worker_id: int, incarnation: int, options: AgentOptions
    ) -> None:
        name = f"w{worker_id}"
        place = f"{name}-{incarnation}"
        self.loop = WorkerLoop(network.clock, place)  # type: ignore[abstract]  # as much as is needed
        network.loops[place] = self.loop
        self.agent = agent = Agent(
            options, place, platform=platform(network, self.loop), incarnation=incarnation
        )
        install(agent)
        self.member = Member(
            WorkerInfo(name, worker_id),
            incarnation,
            place,  # each has a host of its own
            tuple(agent.addresses),
            "",
            options.max_message_bytes,
        )
        self.alive = True
        self.shutdown_since: float | None = None
        self.leaving = False
        self.place = place
        self.name = name
        self.incarnation = incarnation

    def __repr__(self) -> str:
        return self.place

    def join(self, members: Sequence[Member], *, static: bool) -> None:
        """Take part in the group of these."""
        self.agent.join(self.member, members, _GROUP, static=static)

    @property
    def stays(self) -> bool:
        """Whether it lives, and does not leave."""
        return self.alive and not self.leaving

    def has_lost(self, incarnation: int) -> bool:
        """Whether another worker is gone, as far as this one knows."""
        return self.agent.group.peers.view.gone_reason(incarnation) is not None

    def end(self) -> None:
        """Its process ends."""
        self.alive = False
        self.loop.dead = True
