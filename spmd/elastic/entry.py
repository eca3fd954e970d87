"""How a worker becomes a member of the job: it asks all others, and founds the job if there is none.

A newcomer then gets the job's state from a neighbour (``transfer``).
"""

from __future__ import annotations

import contextlib
import logging
from time import monotonic
from typing import Final

from rpc.api import get_worker_infos, rpc_async
from rpc.errors import RpcError, WorkerLostError
from spmd.elastic.errors import ElasticError, Finished, JobMismatchError
from spmd.elastic.groups import FORM_SECONDS
from spmd.elastic.proposer import Proposer
from spmd.elastic.requests import ask_for_entry
from spmd.elastic.views import PATIENCE_SECONDS, Views

__all__ = ["enter"]

logger = logging.getLogger(__name__)

_ASK_SECONDS: Final = 0.1
"""Interval at which a newcomer asks the other workers."""


def enter(views: Views, timeout: float) -> None:
    """Become a member of the job's next view, or found the job.

    Args:
        views: this worker's part of the job, which is closed if an exception is raised.
        timeout: time in seconds in which a job is founded, or a member answers; from each answer on anew.

    Raises:
        Finished: the job has ended.
        JobMismatchError: other members have another description.
        ElasticError: fewer than ``min_size`` workers have come in time, or no member has answered for as
            long.
    """
    try:
        views.check_store()
        views.begin()
        Proposer(views).start()
        _Entry(views).run(timeout)
    except BaseException:
        views.close()
        raise
    views.check_ended()


class _Entry:
    """One worker's way into the job. For one thread."""

    def __init__(self, views: Views) -> None:
        self._views = views
        self._lost_since: dict[int, float] = {}
        self._is_awaited = False

    def run(self, timeout: float) -> None:
        """Return when this worker has a view. Members may take any time for their step, as long as one
        answers.
        """
        views, core = self._views, self._views.core
        deadline = monotonic() + timeout
        while True:
            is_answered = self._ask_all()
            if self._is_awaited:
                deadline = monotonic() + timeout
            if is_answered:
                views.check_store()  # the last member tells the store first
            with views.changed:
                views.losses.take_in()
                may_found = is_answered and self._may_found()
            may_found = may_found and not views.losses.misses_present_workers()
            with views.changed:
                views.losses.take_in()
                if core.view is None and may_found and self._may_found():
                    views.found()
                    views.changed.wait_for(lambda: core.view is not None or views.error, FORM_SECONDS)
                if core.view is not None:
                    return
                if views.error is not None:
                    raise views.error
                views.changed.wait(_ASK_SECONDS)
            views.check_replica()
            if monotonic() > deadline:
                with views.changed:
                    size = self._size()
                what = "workers" if len(core.replica) == 1 else "whole replicas"
                raise ElasticError(
                    f"worker '{views.name}' has not become a member of the elastic job within {timeout:g} s: "
                    + (
                        f"{size} {what} have come, min_size is {views.min_size}"
                        if size < views.min_size
                        else f"{size} {what} have come, but no member of a job answers, and none was founded"
                    )
                )

    def _may_found(self) -> bool:
        """Whether this worker founds the job if there is none; with the lock held."""
        views, core, known = self._views, self._views.core, self._views.newcomers
        is_lost = views.losses.is_lost
        smaller = [each for each in known if known[each] < views.key]
        for each in filter(is_lost, smaller):
            # It may live, and have founded the job: then one of the two is put out of the group.
            since = self._lost_since.setdefault(each, monotonic())
            if each in core.dead or monotonic() - since > PATIENCE_SECONDS / 2:
                del known[each]
        is_first = not any(each in known for each in smaller)
        is_asked = bool(core.tried) or not is_lost(core.ballot[1])  # by a member of a job
        return is_first and not is_asked and self._size() >= views.min_size

    def _size(self) -> int:
        """Return the number of whole replicas that have come; with the lock held."""
        replica = self._views.core.replica
        there = {self._views.me, *self._views.living_newcomers()}
        return len(there) // len(replica) if there.issuperset(replica) else 0

    def _ask_all(self) -> bool:
        """Tell all workers that this one wants to take part; True if there is no job yet, as far as all
        know.
        """
        views = self._views
        calls = []
        complete = True
        self._is_awaited = False
        for info in get_worker_infos():
            if info.name != views.name:
                with contextlib.suppress(RpcError):
                    calls.append(
                        rpc_async(
                            info,
                            ask_for_entry,
                            args=(views.me, views.key, views.description, views.core.replica),
                            timeout=10,
                        )
                    )
        for call in calls:
            try:
                status, incarnation, key, replica = call.wait()
            except JobMismatchError:
                raise
            except WorkerLostError:
                continue
            except RpcError as error:
                logger.debug("a worker does not say whether it is a member: %s", error)
                complete = False
                continue
            if isinstance(status, int):
                raise Finished.at(status, views.name)
            self._is_awaited = self._is_awaited or status == "member"
            if status == "candidate":
                with views.changed:
                    if incarnation not in views.newcomers:
                        views.welcome(incarnation, key, replica)
        return complete and not self._is_awaited
