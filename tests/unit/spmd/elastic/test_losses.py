"""Losses that a member notices, and what it asks of the group's log."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from rpc.agent.hooks import Hooks
from spmd.elastic import losses
from spmd.elastic.losses import Losses


class Core:
    """The core of a member that has one partner; it records what it is told."""

    def __init__(self) -> None:
        self.me = 1
        self.dead: set[int] = set()
        self.removed: list[int] = []

    def partners(self) -> set[int]:
        return {2}

    def witnessed(self, incarnation: int) -> None:
        self.dead.add(incarnation)

    def was_stopped(self) -> None:
        pass

    def was_removed(self, incarnations: Iterable[int]) -> None:
        self.removed += incarnations


class World:
    """An agent whose group has forgotten the other member, and whose store does not answer."""

    def __init__(self) -> None:
        self.asked: list[Future[Any]] = []
        self.hooks, self.core = Hooks(), Core()
        self.told: list[str] = []
        agent: Any = SimpleNamespace(
            lifecycle=SimpleNamespace(hooks=self.hooks),
            group=SimpleNamespace(
                on_loop=lambda function: None,
                peers=SimpleNamespace(
                    by_incarnation=lambda incarnation: None, own=SimpleNamespace(name="worker")
                ),
            ),
            extensions={"rpc.keeper": SimpleNamespace(ask=self._ask)},
            options=SimpleNamespace(rendezvous_timeout=3600),
        )
        self.losses = Losses(
            agent, self.core, threading.Condition(), lambda incarnation: None, self.told.append
        )

    def _ask(self, work: object) -> Future[Any]:
        self.asked.append(Future())
        return self.asked[-1]


def test_a_log_that_does_not_answer_soon_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "LOG_SECONDS", 0.01)
    world = World()
    world.losses.read_log()
    assert not world.core.removed
    [asked] = world.asked
    asked.set_result([2])
    world.losses.read_log()
    assert world.core.removed == [2]
    assert world.asked == [asked]


def test_a_member_that_has_lost_all_others_learns_that_it_is_out_of_its_group() -> None:
    world = World()
    world.losses.begin()
    for told in world.hooks.out:
        told("it was removed")
    assert world.told == ["it was removed"]
    world.losses.close()
    assert not world.hooks.out


def ended_process() -> int:
    process = os.fork()
    if process == 0:
        os._exit(0)
    os.waitpid(process, 0)
    return process


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Losses]:
    """Return the losses of a member that watches the process of worker 2, and of worker 3, which was lost."""

    def watch(process: int) -> Losses:
        world = World()
        member = SimpleNamespace(host="here")
        peers: Any = {
            2: SimpleNamespace(member=member, lost=None, link=SimpleNamespace(process=process)),
            3: SimpleNamespace(member=member, lost="its connection", link=SimpleNamespace(process=process)),
        }
        monkeypatch.setattr(world.losses, "peer", peers.get)
        monkeypatch.setattr(world.losses._agent.group.peers.own, "member", member, raising=False)
        world.losses.watch_processes(peers)
        return world.losses

    return watch


def test_process_that_has_just_ended_is_known_to_have_ended(watch: Callable[[int], Losses]) -> None:
    found = watch(ended_process())
    assert found.has_ended(2)
    assert not found.has_ended(3), "it was lost before, and may have lived on"


def test_process_that_is_not_in_proc_may_live(
    watch: Callable[[int], Losses], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "start_time", lambda process: None)
    assert not watch(os.getpid()).has_ended(2)


def test_no_end_is_certain_if_proc_is_that_of_another_namespace(
    watch: Callable[[int], Losses], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "readlink", lambda path: "1")
    assert not watch(ended_process()).has_ended(2)
