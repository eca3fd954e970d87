"""Reports of calls without an answer, which say what they wait for, and what that waits for.

The agent tells which calls are due. What they wait for is found as ``farcall why`` finds it: in the state
files of this host, and in those of the callee's host, which is asked for them.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from farcall.observe.format.jobs import JobFolder
from farcall.observe.reading.reader import read_job
from farcall.observe.why.wait_graph import call_chain
from farcall.observe.why.wait_nodes import Node
from farcall.observe.worker.far_hosts import FarHosts
from farcall.observe.worker.observer import Observer
from rpc.agent.agent import Agent
from rpc.agent.slow_calls import Due
from rpc.runtime.legible import legible

__all__ = ["SlowCallReports"]

logger = logging.getLogger(__name__)

_FAR_SECONDS: Final = 0.4
"""Time in seconds in which another host may answer."""

_AGAIN_SECONDS: Final = 1.0
"""Time in seconds after which the state files are read once more, if the callee's does not show the call."""

_PAUSE_SECONDS: Final = 2.0
"""Time in seconds after an explanation within which none is made only for the errors of timeouts."""

_MAX_WORKERS: Final = 64
"""Maximum number of workers of this host whose state is read; beyond it, only this one's and the callees'."""


class SlowCallReports:
    """Reports the calls of one agent that have had no answer for long.

    Args:
        observer: observer of this process.
        agent: agent that has not joined its group yet.
    """

    def __init__(self, observer: Observer, agent: Agent, far: FarHosts) -> None:
        self._observer = observer
        self._agent = agent
        self._far = far
        self._explained_at = -math.inf
        agent.calls.slow.explain = self._due

    def _due(self, due: Sequence[Due]) -> None:
        """Have the calls reported. On the loop's thread."""
        now = self._agent.group.loop_thread.loop.time()
        if not any(each.report for each in due) and now - self._explained_at < _PAUSE_SECONDS:
            return
        self._explained_at = now
        for peer in {each.call.peer for each in due}:
            if not peer.near and not peer.is_self:
                self._far.ask(peer)
        near = [each for each in due if each.call.peer.near or each.call.peer.is_self]
        self._soon(near)
        self._later(_FAR_SECONDS, [each for each in due if each not in near])

    def _soon(self, due: Sequence[Due], *, again: bool = True) -> None:
        if due:
            self._observer.soon(lambda: self._report_all(due, again=again))

    def _later(self, seconds: float, due: Sequence[Due], *, again: bool = True) -> None:
        """Have the calls reported later; on the loop's thread."""
        if due:
            later = [replace(each, age=each.age + seconds) for each in due]
            self._agent.group.loop_thread.loop.call_later(seconds, lambda: self._soon(later, again=again))

    def _report_all(self, due: Sequence[Due], *, again: bool) -> None:
        """Report the calls that are still under way. On the observing thread."""
        path = self._observer.path
        due = [each for each in due if not each.call.done()]
        if not due or path is None:
            return
        folder = JobFolder(path.parent.name, path.parent, 0.0, 0)
        peers = {each.call.peer for each in due}
        here = {self._observer.identity["pid"], *(peer.link.process for peer in peers)}
        is_large = len(folder.state_files()) > _MAX_WORKERS
        far = any(not peer.near for peer in peers if not peer.is_self)
        job = read_job(folder, gathered=far, processes=here if is_large else None)
        unseen = []
        for each in due:
            which = (each.call.peer.incarnation, each.call.call_id)
            chain, closing = call_chain(job, self._agent.incarnation, which)
            found = self._found(chain, closing)
            each.call.last_seen = f"After {each.age:.3g} s: {found}"
            each.call.in_cycle = closing is not None
            if again and (len(chain) < 2 or chain[-1].kind == "unanswered"):
                unseen.append(each)
            elif each.report:
                self._log(each, chain, found, moves=closing is None and any(node.moves for node in chain[1:]))
        if unseen:
            loop = self._agent.group.loop_thread.loop
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(lambda: self._later(_AGAIN_SECONDS, unseen, again=False))

    @staticmethod
    def _found(chain: Sequence[Node], closing: Node | None) -> str:
        """Describe what a call waits for, and what that waits for."""
        parts = [node.remark for node in chain[:1]] + [node.in_words() for node in chain[1:]]
        found = "; ".join(filter(None, parts)) or "its callee shows nothing"
        if closing is not None:
            found += f"; that waits for {closing.who} again: this is a cycle"
        return found

    def _log(self, due: Due, chain: Sequence[Node], found: str, *, moves: bool) -> None:
        """Log one report: no warning, if the callee computes."""
        call, me = due.call, self._agent.info.name
        asked = f"{call.peer.name}: {legible(call.asked)}"
        text = f"{me} has had no answer for {due.age:.3g} s from {asked}"
        if chain and chain[0].thread:
            place = chain[0].place or "no line of the program"
            text = f"{me}: {chain[0].thread} has waited {due.age:.3g} s for {asked} ({place})"
        level = logging.INFO if moves else logging.WARNING
        logger.log(level, "%s; %s; `farcall why` says more", text, found)
