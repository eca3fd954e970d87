"""Groups live as is promised, whatever goes wrong, and the same each time; what is broken is noticed."""

from __future__ import annotations

import gc
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from dist_autograd.backwards import Backwards
from dist_autograd.contexts import Contexts
from rpc.agent.activity import Activity
from rpc.agent.calls import CallTable, PendingCall
from rpc.agent.departure import Departure
from rpc.errors import WorkerLostError
from rpc.group.liveness import Liveness
from rpc.group.termination import Termination
from rpc.rendezvous import watching
from rpc.rendezvous.parting import Admission
from rpc.transport.session import Session
from rref.protocol.fence import FenceAnswers
from rref.protocol.owner import Owner
from rref.protocol.user import Users
from tests.simulation.cost import measure, too_steep
from tests.simulation.life import Life, Plan
from tests.simulation.membership import Membership
from tests.simulation.truth import Violation

ROOT: Final = Path(__file__).resolve().parent.parent.parent
PARTS: Final = 20
NIGHTLY: Final = 10_000
ENOUGH: Final = 400
"""Number of runs that detect each fault below, most of them in a few."""


@pytest.fixture(autouse=True)
def small_heap() -> Iterator[None]:
    """Runs collect garbage, of which what was there before is none."""
    gc.freeze()
    yield
    gc.unfreeze()


def nightly_but(kept: str, names: Iterable[str]) -> list[Any]:
    """All names as parameters, which only the nightly tests have, except one."""
    return [each if each == kept else pytest.param(each, marks=pytest.mark.nightly) for each in names]


def live(seeds: Iterable[int]) -> None:
    for seed in seeds:
        Life(Plan.of(seed)).run()


def test_promises_hold_in_many_lives() -> None:
    live(range(60))


def test_backward_passes_are_exact_or_fail_and_end_whatever_goes_wrong() -> None:
    for seed in range(40):
        Life(Plan.of_backward(seed)).run()


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(PARTS))
def test_promises_hold_in_ten_thousand_lives(part: int) -> None:
    for seed in range(part, NIGHTLY, PARTS):
        try:
            Life(Plan.of(seed)).run()
            Life(Plan.of_backward(seed)).run()
        except Violation as violation:
            violation.add_note(f"python -m tests.simulation --seed {seed} --trace --shrink")
            raise


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_promises_hold_in_a_group_of_hundreds() -> None:
    Life(Plan.of(0, workers=300)).run()


def trace(seed: int) -> list[str]:
    lines: list[str] = []
    Life(Plan.of(seed), lines.append).run()
    return lines


def test_a_seed_says_all_that_happens() -> None:
    assert trace(3) == trace(3)


@pytest.mark.nightly
def test_a_seed_says_all_that_happens_in_any_process() -> None:
    def printed(hashing: str) -> list[str]:
        command = [sys.executable, "-m", "tests.simulation", "--seed", "3", "--trace"]
        environment = {**os.environ, "PYTHONHASHSEED": hashing}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        text = re.sub(r"since about [\d:]+", "since", done.stdout)  # the time of day
        return text.splitlines()[:-1]  # the last line tells how long it took

    assert printed("1") == printed("2")


# ---- what is broken is noticed


def resend_nothing(self: Session, count: int, unsent: Any) -> list[bytes]:
    self.sent.clear()
    return list(unsent)


def resend_what_has_arrived(resume: Callable[..., list[bytes]]) -> Callable[..., list[bytes]]:
    def resumed(self: Session, count: int, unsent: Any) -> list[bytes]:
        return resume(self, max(self.first, count - 1), unsent)

    return resumed


def take_nothing_out(self: CallTable, call_id: int) -> PendingCall | None:
    return self.find(call_id)


def nothing(*_: Any, **__: Any) -> None: ...


def nothing_at_all(*_: Any) -> int:
    return 0


def nothing_follows(*_: Any) -> list[Any]:
    return []


def name_nobody(*_: Any) -> str:
    return "nobody knows for whom it waits"


def never_silent(look: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, now, signs: (look(self, now, signs)[0], [])


def hold_no_parent(fork: Callable[..., Any]) -> Callable[..., Any]:
    def forked(self: Users, ref: Any, to: int, new: Any) -> Any:
        descriptor = fork(self, ref, to, new)
        self._clear(new)
        return descriptor

    return forked


def count_no_fork(fork: Callable[..., Any]) -> Callable[..., Any]:
    def forked(self: Owner, ref: Any, to: int, new: Any) -> Any:
        descriptor = fork(self, ref, to, new)
        self._drop(descriptor[1], new)
        return descriptor

    return forked


BREAKAGES: Final[dict[str, tuple[Any, str, Callable[[Any], Any], str]]] = {
    "messages are not sent again": (
        Session,
        "resume",
        lambda _: resend_nothing,
        r"pends for ever|is left with {.*'calls'",
    ),
    "messages are sent again that have arrived": (Session, "resume", resend_what_has_arrived, "runs twice"),
    "calls stay when they have ended": (CallTable, "take", lambda _: take_nothing_out, "completes twice"),
    "calls to the lost do not end": (CallTable, "lost", lambda _: nothing, "pends for ever"),
    "timeouts are not looked at": (CallTable, "look", lambda _: nothing, "pends for ever"),
    "the silent are not given up": (Liveness, "look", never_silent, "pends for ever"),
    "a parent goes before its child is counted": (Users, "fork", hold_no_parent, "fails"),
    "an owner counts no fork that it sends": (Owner, "fork", count_no_fork, "is freed, but"),
    "an accepted child stays": (Users, "on_accepted", lambda _: nothing, "is left with"),
    "fences are not answered": (FenceAnswers, "_answer", lambda _: nothing, "is left with"),
    "calls stay when their worker leaves": (CallTable, "end", lambda _: nothing, "is lost without an error"),
    "nothing is held to be under way": (Activity, "under_way", lambda _: nothing_at_all, "is told that all"),
    "a wait in shutdown does not end in time": (Departure, "_tick", lambda _: nothing, "for longer than it"),
    "in shutdown, the dead are waited for": (
        Termination,
        "lost",
        lambda _: nothing_follows,
        "is in shutdown",
    ),
    "nobody is named": (
        Termination,
        "_standing",
        lambda _: name_nobody,
        "is told: .* nobody knows",
    ),
}


@pytest.mark.parametrize("name", nightly_but("messages are sent again that have arrived", BREAKAGES))
def test_it_is_noticed_when(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, attribute, breaking, message = BREAKAGES[name]
    monkeypatch.setattr(where, attribute, breaking(getattr(where, attribute)))
    with pytest.raises(Violation, match=message):
        live(range(ENOUGH))


def record_nothing(join: Callable[..., Any]) -> Callable[..., Any]:
    def joined(*asked: Any) -> Any:
        try:
            return join(*asked)
        except WorkerLostError:
            return None

    return joined


PASSES: Final[dict[str, tuple[Any, str, Callable[[Any], Any], str]]] = {
    "passes do not hear of losses": (Backwards, "_peer_gone", lambda _: nothing, "pends for ever"),
    "calls run unrecorded": (Contexts, "join", record_nothing, "the gradient of call .* is None"),
}


@pytest.mark.parametrize("name", nightly_but("calls run unrecorded", PASSES))
def test_of_backward_passes_it_is_noticed_when(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, attribute, breaking, message = PASSES[name]
    monkeypatch.setattr(where, attribute, breaking(getattr(where, attribute)))

    def run() -> None:
        for seed in range(ENOUGH):
            Life(Plan.of_backward(seed)).run()

    with pytest.raises(Violation, match=message):
        run()


# ---- dynamic groups in their store


@pytest.fixture
def quiet() -> Iterator[None]:
    """Damage to the log is reported, hundreds of times."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_of_a_dynamic_group_one_goes_on_whatever_goes_wrong(quiet: None) -> None:
    for seed in range(40):
        Membership(seed).run()


def join_anyway(*_: Any) -> Admission:
    return Admission.JOINED


def stay(self: watching.LogWatch, place: int, verdict: Any) -> None: ...


def look_away(self: watching.LogWatch, entries: Any) -> None: ...


MISTAKES: Final[dict[str, tuple[Any, str, Any, str]]] = {
    "newcomers join that have met nobody": (watching, "admission", join_anyway, "has met nobody, and founds"),
    "nobody connects to strangers": (watching.LogWatch, "_meet_strangers", look_away, "two groups"),
    "nobody leaves that was taken out": (watching.LogWatch, "_answer", stay, "two groups"),
}


@pytest.mark.parametrize("name", nightly_but("nobody connects to strangers", MISTAKES))
def test_of_a_dynamic_group_it_is_noticed_when(
    name: str, monkeypatch: pytest.MonkeyPatch, quiet: None
) -> None:
    where, attribute, mistake, message = MISTAKES[name]
    monkeypatch.setattr(where, attribute, mistake)

    def live() -> None:
        for seed in range(200):
            Membership(seed).run()

    with pytest.raises(Violation, match=message):
        live()


# ---- what it costs


def test_what_a_worker_costs_others_does_not_grow_with_the_square() -> None:
    assert too_steep([*measure(8), *measure(32)]) == []
