"""Weight stores keep their promises whichever message is the last of a worker; what is broken is noticed."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from farcall.weights.catalogue import Catalogue
from farcall.weights.keeper import Keeper
from farcall.weights.node import done
from farcall.weights.versions import Version
from tests.simulation.truth import Violation
from tests.simulation.weights import KEEPER, READERS, Run


@pytest.fixture(autouse=True)
def small_heap() -> Iterator[None]:
    """Deaths are reported, many times; runs collect garbage, of which what was there before is none."""
    gc.freeze()
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)
    gc.unfreeze()


def test_promises_hold_whichever_message_is_the_last_of_a_worker() -> None:
    for seed in range(5):
        Run(seed).run()


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(102, id="while all look again"),
        pytest.param(164, id="while a version is relayed to it"),
        pytest.param(226, id="before all have opened the store"),
        pytest.param(276, id="before the second copy has what was read"),
    ],
)
def test_promises_hold_when_a_worker_dies(seed: int) -> None:
    Run(seed).run()


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(10))
def test_promises_hold_in_a_thousand_runs(part: int) -> None:
    for seed in range(part, 1000, 10):
        try:
            Run(seed).run()
        except Violation as violation:
            violation.add_note(f"python -m tests.simulation.weights --seed {seed} --trace")
            raise


def see_what_is_begun(self: Version) -> list[int]:
    return [] if any(part.written for part in self.parts.values()) else [0]


def forget_nothing(*_: Any, **__: Any) -> list[Any]:
    return []


def copy_nothing(*_: Any) -> Any:
    return done()


BREAKAGES: Final[dict[str, tuple[type, str, Any, Callable[[Run], bool], str]]] = {
    "a version is whole before its last part": (
        Version,
        "unwritten",
        see_what_is_begun,
        lambda run: True,
        "is torn|though no worker has died",
    ),
    "leases of the dead stay": (
        Catalogue,
        "lost",
        forget_nothing,
        lambda run: run.victim in READERS,
        "leases of .* are left",
    ),
    "a put does not wait for the second copy": (
        Keeper,
        "copied",
        copy_nothing,
        lambda run: run.victim == KEEPER and run.copies == 2,
        "were told whole, and are gone",
    ),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_it_is_noticed_when(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, attribute, broken, is_of_interest, message = BREAKAGES[name]
    monkeypatch.setattr(where, attribute, broken)

    def run_all() -> None:
        for run in map(Run, range(200)):
            if is_of_interest(run):
                run.run()

    with pytest.raises(Violation, match=message):
        run_all()
