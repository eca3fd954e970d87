"""The functions of ``rpc`` work on any agent that has the interface: here a tiny one, of a second backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

import rpc
from rpc.agent.agent import Agent
from rpc.agent.interface import AgentInterface
from rpc.errors import NotInitializedError, UnknownWorkerError
from rpc.group.membership import WorkerReference
from rpc.group.workers import WorkerInfo
from rpc.lifecycle.backend_registry import BackendType
from rpc.runtime.current import clear_current_agent
from rpc.runtime.events import CallBegun, Events
from tests.support.local_agent import LocalAgent


def implements(agent: Agent) -> AgentInterface:
    """Checked by mypy alone: our own agent has the interface, too."""
    return agent


class AloneAgent(LocalAgent):
    """Has the whole interface, and tells of its calls."""

    def __init__(self, name: str, rpc_timeout: float) -> None:
        super().__init__(name, rpc_timeout)
        self.events = Events()
        self.ended_by: tuple[Any, ...] | None = None

    def call(self, to: WorkerReference, function: Callable[..., Any], *how: Any) -> Any:
        if self.events.call_begun is not None:
            self.events.call_begun(1, self.me.name, function.__name__)
        return super().call(to, function, *how)

    def all_gather(self, value: Any, worker_names: Iterable[str] | None, timeout: float) -> dict[str, Any]:
        return {self.me.name: value}

    def get_worker_info(self, worker: WorkerReference | None = None) -> WorkerInfo:
        if worker not in (None, 0, self.me.name, self.me):
            raise UnknownWorkerError(f"nobody here is {worker!r}")
        return self.me

    def get_debug_info(self) -> dict[str, int]:
        return {"alone": 1}

    def shutdown(
        self, graceful: bool, timeout: float, *, release_references: bool, raise_on_leaks: bool
    ) -> None:
        self.ended_by = (graceful, timeout, release_references, raise_on_leaks)
        clear_current_agent(self)


class AloneOptions(rpc.RpcBackendOptions):
    pass


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[AloneAgent]]:
    """A group of one, on a backend that the test registers."""
    monkeypatch.setattr(BackendType, "_members", dict(BackendType._members))
    made: list[AloneAgent] = []

    def start(*, name: str, rpc_backend_options: AloneOptions, **_: Any) -> AgentInterface:
        made.append(AloneAgent(name, rpc_backend_options.rpc_timeout))
        return made[-1]

    backend = rpc.register_backend("ALONE", AloneOptions, start)
    rpc.init_with_store(backend, HashStore(), "me", 0, 1, AloneOptions(rpc_timeout=5))
    yield made
    for agent in made:
        clear_current_agent(agent)


@pytest.mark.usefixtures("started")
def test_calls_go_through_it() -> None:
    assert rpc.rpc_sync("me", divmod, (7, 2)) == (3, 1)
    assert rpc.rpc_sync(0, dict, kwargs={"a": 1}) == {"a": 1}
    assert rpc.rpc_async("me", divmod, [7, 2]).wait() == (3, 1)
    with rpc.wait_all():
        future = rpc.rpc_async("me", abs, (-1,))
    assert future.done()


@pytest.mark.usefixtures("started")
def test_it_says_who_is_there() -> None:
    assert rpc.get_worker_info() == rpc.get_worker_info("me") == WorkerInfo("me", 0)
    assert rpc.get_worker_infos() == [WorkerInfo("me", 0)]
    assert rpc.all_gather(3) == {"me": 3}
    rpc.barrier()
    assert rpc.get_debug_info() == {"alone": 1}


@pytest.mark.usefixtures("started")
def test_its_events_are_listened_to() -> None:
    seen: list[CallBegun] = []
    with rpc.events.listen(CallBegun, seen.append):
        rpc.rpc_sync("me", abs, (-1,))
    rpc.rpc_sync("me", abs, (-1,))
    assert seen == [CallBegun(1, "me", "abs")]


def test_it_is_shut_down_as_the_user_says(started: list[AloneAgent]) -> None:
    rpc.shutdown(graceful=False, timeout=3)
    assert started[0].ended_by == (False, 3, True, False)
    assert not rpc.is_initialized()
    with pytest.raises(NotInitializedError):
        rpc.shutdown()
