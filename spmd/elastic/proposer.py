"""Proposes views: the thread of each member that changes the view when ``agreement`` says that it must."""

from __future__ import annotations

import logging
import secrets
import threading
from time import monotonic
from typing import Any, Final

from rpc.runtime.current import current_agent
from spmd.elastic.agreement import NEW, Plan, Proposal, Report
from spmd.elastic.errors import PutOut
from spmd.elastic.losses import LOG_SECONDS
from spmd.elastic.views import PATIENCE_SECONDS, Views

__all__ = ["Proposer"]

logger = logging.getLogger(__name__)

_RETRY_SECONDS: Final = 0.05
_IDLE_SECONDS: Final = 1.0


class Proposer:
    """The thread that proposes views for one member, until the member leaves."""

    def __init__(self, views: Views) -> None:
        self._views, self._core = views, views.core
        self._is_lost = views.losses.is_lost
        self._agent: Any = current_agent()
        self._blocked_since: float | None = None
        self._asked_with = 0, 0
        """The losses that were known when the group's log was asked last."""
        self._next_try = 0.0
        """When the members are frozen and the log is asked again with the same losses."""

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="farcall-elastic", daemon=True).start()

    def _run(self) -> None:
        views = self._views
        pause = _IDLE_SECONDS
        while not self._has_ended():
            views.woken.wait(pause)
            views.woken.clear()
            pause = _IDLE_SECONDS
            with views.changed:
                views.losses.take_in()
                if self._has_ended() or views.error is not None or not views.is_due():
                    continue
                proposer, suspected = self._core.proposer(self._is_lost), views.suspected
            try:
                if proposer == views.me:
                    pause = self._change()
                elif proposer is not None:
                    pause = 0.5
                    if suspected is not None:
                        views.ask([proposer], Views.poked, suspected, timeout=5.0)
            except Exception:
                if not self._has_ended() and not self._agent.lifecycle.closed:
                    logger.exception("worker '%s' could not change the view of the elastic job", views.name)
                pause = _IDLE_SECONDS

    def _has_ended(self) -> bool:
        return self._views.closed

    def _change(self) -> float:
        """Propose a view; returns the time in seconds after which this has to be tried again, if need be."""
        views = self._views
        with views.changed:
            views.losses.take_in()
            partners = self._core.partners()
            losses = len(self._core.dead), sum(map(self._is_lost, partners))
            if losses == self._asked_with and (left := self._next_try - monotonic()) > 0:
                return left  # others have woken this thread
            proposal = Proposal(self._core, views.living_newcomers())
        while missing := {each for each in proposal.to_ask(()) if not self._is_lost(each)}:
            for each, answer in views.ask(missing, Views.freeze, proposal.ballot).items():
                if isinstance(answer, Report):
                    proposal.take(answer)
                    continue
                if answer is not None:
                    with views.changed:
                        self._core.outbid(answer)
                elif each not in partners:
                    views.newcomers.pop(each, None)  # it asks again if it lives
                return _soon()
        plan = proposal.plan()
        if plan.is_lost:
            views.ask(proposal.reports, Views.state_lost, timeout=10.0)
            return _IDLE_SECONDS
        if not plan.may_go_on:
            self._ask_the_log(plan)
            self._asked_with, self._next_try = losses, monotonic() + LOG_SECONDS
            return LOG_SECONDS  # or until there is another loss, or this one is certain
        self._blocked_since, self._next_try = None, 0.0
        if plan.broken:
            reports = list(proposal.reports.values())
            for answer in views.ask(plan.broken, Views.resign, proposal.ballot, reports).values():
                if answer is None:
                    return _soon()
                proposal.take(answer)
            plan = proposal.plan()
        if not self._install(proposal, plan):
            return _soon()
        views.ask(plan.released, Views.release, timeout=10.0)
        return _IDLE_SECONDS

    def _install(self, proposal: Proposal, plan: Plan) -> bool:
        views, reports = self._views, proposal.reports
        if not any(reports[each].step != NEW for each in plan.members) and plan.released:
            # All members with a state have left: the job is over for the others, too.
            with views.changed:
                self._core.ended = True
            step = max(reports[each].step for each in plan.released)
            views.publish_end(step)
            views.ask(plan.members, Views.over, step, timeout=10.0)
            return True
        key = f"elastic/{proposal.ballot[0]}/{secrets.token_hex(6)}"
        done = views.ask(
            plan.members, Views.install, proposal.ballot, key, plan.members, plan.released,
            [reports[each] for each in (*plan.members, *plan.released)],
        )  # fmt: skip
        return all(each is True for each in done.values())

    def _ask_the_log(self, plan: Plan) -> None:
        views, losses = self._views, self._views.losses
        if self._blocked_since is None:
            self._blocked_since = monotonic()
            logger.info("worker '%s' waits for the group's log, which decides about lost members", views.name)
        losses.read_log()
        if monotonic() - self._blocked_since > PATIENCE_SECONDS:
            peers = map(losses.peer, filter(losses.is_out_of_reach, self._core.partners()))
            names = ", ".join(sorted({f"'{peer.name}'" for peer in peers if peer is not None})) or "others"
            error = PutOut(
                f"worker '{views.name}' cannot go on: {names} cannot be reached, and may go on without it. "
                "It must start again to take part in the elastic job"
            )
            views.ask([*plan.members, *plan.broken], Views.put_out, str(error), timeout=5.0)


def _soon() -> float:
    """Return another time than other proposers do, most likely."""
    return _RETRY_SECONDS * (1 + secrets.randbelow(3))
