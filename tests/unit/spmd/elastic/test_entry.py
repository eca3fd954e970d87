"""How long a newcomer waits."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from spmd.elastic import entry
from spmd.elastic.agreement import Member, View
from spmd.elastic.errors import ElasticError


class Workers:
    """A newcomer, and a worker that it asks every 200 s.

    Args:
        answers: status of the worker in each answer; None if the newcomer has become a member before it. The
            last is repeated.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: list[str | None]) -> None:
        self._now, self._answers = 0.0, answers
        self.core = Member(2)
        losses = SimpleNamespace(
            take_in=lambda: None,
            is_lost=lambda _: False,
            watch_processes=lambda _: None,
            misses_present_workers=lambda: False,
        )
        self._views: Any = SimpleNamespace(
            me=2, name="newcomer", key=(2, 2), description="", newcomers={}, min_size=1, error=None,
            core=self.core, losses=losses, changed=threading.Condition(), check_store=lambda: None,
            living_newcomers=lambda: [1], check_replica=lambda: None, welcome=self._welcome,
        )  # fmt: skip
        monkeypatch.setattr(entry, "monotonic", lambda: self._now)
        monkeypatch.setattr(entry, "_ASK_SECONDS", 0.0)
        monkeypatch.setattr(entry, "get_worker_infos", lambda: [SimpleNamespace(name="other")])
        monkeypatch.setattr(entry, "rpc_async", lambda *_, **__: self)

    def _welcome(self, incarnation: int, key: tuple[int, int], _: tuple[int, ...]) -> None:
        self._views.newcomers[incarnation] = key

    def wait(self) -> tuple[str, int, tuple[int, int], tuple[int, ...]]:
        self._now += 200.0
        status = self._answers[0] if len(self._answers) == 1 else self._answers.pop(0)
        if status is None:
            self.core.view = View(2, (2, 1), (1, 2), frozenset([2]), 1)
        return status or "member", 1, (1, 1), (1,)

    def enter(self) -> None:
        entry._Entry(self._views).run(300.0)


def test_newcomer_waits_for_a_step_that_takes_longer_than_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Workers(monkeypatch, ["member"] * 4 + [None]).enter()


@pytest.mark.parametrize("first", [[], ["member"] * 4])
def test_newcomer_gives_up_when_no_member_answers_any_more(
    monkeypatch: pytest.MonkeyPatch, first: list[str | None]
) -> None:
    workers = Workers(monkeypatch, [*first, "candidate"])
    with pytest.raises(
        ElasticError,
        match="has not become a member of the elastic job within 300 s: 2 workers have come, but no member",
    ):
        workers.enter()
