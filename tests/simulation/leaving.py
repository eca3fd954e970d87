"""How a simulated worker leaves: ``Agent.shutdown``, which may not wait here, with what it promises."""

from __future__ import annotations

import re
from typing import Final

from rpc.agent.departure import ROUNDS
from tests.simulation.truth import Truth
from tests.simulation.worker import Worker

__all__ = ["Leaving"]

_REASONS: Final = re.compile(
    "shutdown timed out: (not in shutdown: .*|still busy: .*|no answer yet from: .*"
    "|its leader, worker 'w.*', does not answer|its leader, worker 'w.*', is gone)"
    "|this worker still has [1-9].* calls or tasks under way"
)
_LATE_SECONDS: Final = 2.5
"""Maximum time in seconds beyond its timeout for a round: it asks the leader why, which may not answer."""


class Leaving:
    """The way out of one worker, with so many seconds for each round, 0 for no limit."""

    def __init__(self, truth: Truth, here: Worker, timeout: float) -> None:
        self._truth = truth
        self._here = here
        self._timeout = timeout
        self._round = 0
        self._held: object = None

    def begin(self) -> None:
        """Enter the next round."""
        here, self._round = self._here, self._round + 1
        here.shutdown_since = self._truth.clock.now if self._round == 1 else here.shutdown_since
        self._truth.say(f"{here} enters round {self._round} of shutdown, timeout {self._timeout:g}")
        here.agent.lifecycle.departure.begin(self._over, self._timeout)
        if self._timeout:
            here.loop.call_later(self._timeout + _LATE_SECONDS, self._look, self._round)

    def _look(self, this: int) -> None:
        """The time for a round has passed."""
        late = self._truth.clock.now - max(self._here.loop.paused_until, 0.0)
        if late < _LATE_SECONDS:  # it was stopped meanwhile
            self._here.loop.call_later(_LATE_SECONDS, self._look, this)
        elif self._round == this and not self._here.leaving:
            self._truth.broken(f"{self._here} waits in round {this} of shutdown for longer than it is to")

    def _over(self, failure: str | None) -> None:
        """As who waits is told: it goes on when it is its turn."""
        self._truth.say(f"round {self._round} is over for {self._here}: {failure or 'all work has ended'}")
        if failure is None:
            self._truth.check_ended(self._here)
        else:
            self._check_reason(failure)
        self._here.loop.call_soon(self._go_on, failure)

    def _go_on(self, failure: str | None) -> None:
        here, agent = self._here, self._here.agent
        if failure is None and self._round < ROUNDS:
            if self._round == 1:
                self._held = self._truth.held.pop(here, None)
                agent.extensions["rref"].release_all()
            self.begin()
            return
        here.leaving = True
        agent.extensions["rref"].released = True
        agent.mailbox.close()
        here.loop.create_task(self._leave())

    async def _leave(self) -> None:
        here, agent = self._here, self._here.agent
        await agent.lifecycle.say_goodbye("it has shut down")
        agent.close("it has shut down")
        self._truth.left(here)
        here.end()

    def _check_reason(self, failure: str) -> None:
        """Whether it says for whom this worker has waited."""
        truth, here = self._truth, self._here
        if not _REASONS.fullmatch(failure):
            truth.broken(f"{here} is told: {failure}")
        leader = here.agent.lifecycle.departure.leader
        if leader is None or "its leader, " in failure:
            return
        for worker in truth.living:
            absent = worker.shutdown_since is None and not any(
                truth.estranged(one, worker.incarnation) for one in (here.incarnation, leader)
            )
            if absent and f"'{worker.name}'" not in failure:
                truth.broken(f"{here} has waited for {worker}, and is told: {failure}")
