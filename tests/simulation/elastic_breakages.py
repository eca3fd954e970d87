"""The simulation of elastic jobs with each rule left out: it must notice.

python -m tests.simulation.elastic_breakages        # the seed that notices each
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any, Final

from tests.simulation.elastic import World, agreement, find

__all__ = ["BREAKAGES"]


def _agreed_if_any(reports: Any) -> tuple[int, bool]:
    old = [each for each in reports if each.step != agreement.NEW]
    top = max((each.step for each in old), default=agreement.NEW)
    if any(each.step == top and each.prepared is not None for each in old):
        top += 1
    return top, any(each.ended for each in old)


def _half_is_enough(members: Any, reports: Any) -> bool:
    within = [each for each in reports if each.member in members]
    return all(2 * len(base.intersection(members)) >= len(base) for each in within for base in each.bases)


def _decide_in_any_ballot(self: Any, ballot: Any, members: Any, reports: Any) -> Any:
    later, self.ballot = self.ballot, ballot
    try:
        return _decide(self, ballot, members, reports)
    finally:
        self.ballot = max(later, ballot)


def _removal_is_enough(members: Any, reports: Any) -> bool:
    removed = frozenset[int]().union(*(each.removed for each in reports if each.member in members))
    return _may_go_on(set(members) | removed, reports) or _may_go_on(members, reports)


def _every_loss_is_certain(self: Any, worker: Any, source: int, certain: bool) -> None:
    _on_closed(self, worker, source, True)


def _completed_view_alone(self: Any) -> tuple[frozenset[int], ...]:
    return () if self.view is None else (frozenset(self.view.members),)


def _install_unbound_newcomers(self: Any, *args: Any) -> Any:
    report = _install(self, *args)
    if self.step == agreement.NEW:
        self.tried = []
        return self.report()
    return report


def _is_in_while_frozen(self: Any, view: Any) -> bool:
    return self.view is not None and self.view.ballot == view.ballot


def _plan_of_workers(self: Any) -> Any:
    reports = self.reports
    self.reports = {each: replace(report, replica=(each,)) for each, report in reports.items()}
    try:
        return _plan(self)
    finally:
        self.reports = reports


def _only_members_are_witnesses(members: Any, reports: Any) -> bool:
    left = {each.member for each in reports if each.left}
    return _with_witnesses(members, [each for each in reports if each.member in members], left)


def _anyone_is_a_witness(members: Any, reports: Any) -> bool:
    reports = list(reports)
    dead = frozenset[int]().union(*(each.dead for each in reports if each.member in members))
    return _may_go_on(members, [replace(each, dead=dead) for each in reports])


def _spare_those_that_leave(self: Any, members: Any, released: Any, reports: Any) -> Any:
    return self.partners() - set(members) - set(released) - self.dead


_install: Final = agreement.Member.install
_may_go_on: Final = agreement.may_go_on
_with_witnesses: Final = agreement._may_go_on
_on_closed: Final = World.on_closed
_decide: Final = agreement.Member.decide
_plan: Final = agreement.Proposal.plan

BREAKAGES: Final[dict[str, tuple[Any, str, Any]]] = {
    "one prepared member is enough": (agreement, "_agreed", _agreed_if_any),
    "an outdated ballot decides": (agreement.Member, "decide", _decide_in_any_ballot),
    "half is enough": (agreement, "may_go_on", _half_is_enough),
    "a removal counts for less than half": (agreement, "may_go_on", _removal_is_enough),
    "a frozen member counts votes": (agreement.Member, "_is_in", _is_in_while_frozen),
    "attempts are no bases": (agreement.Member, "bases", property(_completed_view_alone)),
    "newcomers are not bound by attempts": (agreement.Member, "install", _install_unbound_newcomers),
    "a death is certain without contact": (agreement, "may_go_on", _anyone_is_a_witness),
    "only members are witnesses": (agreement, "may_go_on", _only_members_are_witnesses),
    "a stopped worker is certain of deaths": (agreement.Member, "was_stopped", lambda self: None),
    "a broken replica takes part": (agreement.Proposal, "plan", _plan_of_workers),
    "only one worker founds the job": (agreement, "_founding", lambda report: report),
    "workers that leave are not cut off": (agreement.Member, "to_cut_off", _spare_those_that_leave),
    "every loss is a certain death": (World, "on_closed", _every_loss_is_certain),
}
"""Rules that are left out, and what takes their place."""


def main() -> int:
    """Run what the command line asks for; returns the number of rules whose absence is not noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.elastic_breakages", description=__doc__)
    parser.add_argument("--seeds", type=int, default=900)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    unnoticed = 0
    for name, (owner, attribute, broken) in BREAKAGES.items():
        whole = getattr(owner, attribute)
        setattr(owner, attribute, broken)
        noticed = find(range(options.first, options.first + options.seeds))
        setattr(owner, attribute, whole)
        unnoticed += noticed is None
        print(f"{name}: {'not noticed' if noticed is None else f'seed {noticed}'}")
    return unnoticed


if __name__ == "__main__":
    sys.exit(main())
