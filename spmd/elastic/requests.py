"""What members of an elastic job ask of each other. ``to`` is the incarnation that is addressed."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

from rpc.errors import GivenUpError
from rpc.runtime.current import current_agent
from spmd.elastic.agreement import Ballot, Report

__all__ = [
    "EXTENSION",
    "ask_for_entry",
    "ask_for_state",
    "ask_to_freeze",
    "ask_to_install",
    "ask_to_resign",
    "poke",
    "put_out",
    "release",
    "tell_of_begin",
    "tell_of_failure",
    "tell_of_lost_state",
    "tell_the_end",
]

EXTENSION: Final = "spmd.elastic"
"""The agent's extension that answers: a ``Views``."""


def _views(to: int | None) -> Any:
    agent: Any = current_agent()
    views = agent.extensions.get(EXTENSION)
    if views is None or to not in (None, views.me):
        raise GivenUpError(f"there is no member of this job in process {os.getpid()}")
    return views


def ask_for_entry(
    incarnation: int, key: tuple[int, int], description: str, replica: tuple[int, ...]
) -> tuple[Any, int, tuple[int, int], tuple[int, ...]]:
    """Return what the addressed worker answers to a newcomer: its status, incarnation, key and replica."""
    agent: Any = current_agent()
    if EXTENSION not in agent.extensions:
        return None, 0, (0, 0), ()
    answer: tuple[Any, int, tuple[int, int], tuple[int, ...]]
    answer = _views(None).greeted(incarnation, key, description, tuple(replica))
    return answer


def ask_to_freeze(to: int, ballot: Ballot) -> Report | Ballot:
    """See ``Views.freeze``."""
    answer: Report | Ballot = _views(to).freeze(ballot)
    return answer


def ask_to_resign(to: int, ballot: Ballot, reports: Sequence[Report]) -> Report:
    """See ``Views.resign``."""
    report: Report = _views(to).resign(ballot, reports)
    return report


def ask_to_install(
    to: int,
    ballot: Ballot,
    key: str,
    members: Sequence[int],
    released: Collection[int],
    reports: Sequence[Report],
) -> bool:
    """See ``Views.install``."""
    return bool(_views(to).install(ballot, key, members, released, reports))


def poke(to: int, ballot: Ballot) -> None:
    """See ``Views.poked``."""
    _views(to).poked(ballot)


def tell_of_begin(to: int, member: int, ballot: Ballot, step: int) -> bool:
    """See ``Mates.begins``."""
    return bool(_views(to).mates.begins(member, ballot, step))


def release(to: int) -> None:
    """See ``Views.release``."""
    _views(to).release()


def tell_the_end(to: int, step: int) -> None:
    """See ``Views.over``."""
    _views(to).over(step)


def tell_of_failure(to: int, worker: str, text: str) -> None:
    """See ``Views.failed_at``."""
    _views(to).failed_at(worker, text)


def tell_of_lost_state(to: int) -> None:
    """See ``Views.state_lost``."""
    _views(to).state_lost()


def put_out(to: int, text: str) -> None:
    """See ``Views.put_out``."""
    _views(to).put_out(text)


def ask_for_state(to: int, ballot: Ballot, step: int) -> Iterator[Any]:
    """See ``Views.give``."""
    values: Iterator[Any] = _views(to).give(ballot, step)
    return values
