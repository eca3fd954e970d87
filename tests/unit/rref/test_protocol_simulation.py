"""The two guarantees, under anything that may happen: safety at every step, liveness at the end.

``FARCALL_TEST_EFFORT=20`` makes it twenty times as thorough; by default it takes seconds, and does the
same each time.
"""

import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.unit.rref.moves import MOVES, live
from tests.unit.rref.networks import HostileNetwork
from tests.unit.rref.simulation import Simulation
from tests.unit.rref.stories import Story, wander

EFFORT = int(os.environ.get("FARCALL_TEST_EFFORT", "1"))


class HostileWorld(RuleBasedStateMachine):
    """Workers over links that lose, double and reorder; every broken promise is raised as it happens."""

    @initialize(size=st.integers(2, 4))
    def begin(self, size: int) -> None:
        self.simulation = Simulation(size, HostileNetwork())

    def move(self, name: str, data: st.DataObject) -> None:
        MOVES[name](self.simulation, lambda choices: data.draw(st.sampled_from(choices)))

    @rule(data=st.data())
    def own(self, data: st.DataObject) -> None:
        self.move("own", data)

    @rule(data=st.data())
    def create(self, data: st.DataObject) -> None:
        self.move("create", data)

    @rule(data=st.data())
    def call(self, data: st.DataObject) -> None:
        self.move("call", data)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.move("release", data)

    @rule(data=st.data())
    def expect(self, data: st.DataObject) -> None:
        self.move("expect", data)

    @precondition(lambda self: self.simulation.calls)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        self.move("arrive", data)

    @rule(data=st.data(), which=st.sampled_from(("finish", "give_up", "fail_to_send", "sweep", "join")))
    def seldom(self, data: st.DataObject, which: str) -> None:
        self.move(which, data)

    @rule(data=st.data(), which=st.sampled_from(("die", "notice", "notice", "break_link")))
    def trouble(self, data: st.DataObject, which: str) -> None:
        self.move(which, data)

    @rule(data=st.data())
    def control(self, data: st.DataObject) -> None:
        self.move("control", data)

    @rule(data=st.data(), times=st.integers(2, 8))
    def much_control(self, data: st.DataObject, times: int) -> None:
        for _ in range(times):
            self.move("control", data)

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.drain()


TestHostileWorld = HostileWorld.TestCase
TestHostileWorld.settings = settings(
    max_examples=120 * EFFORT,
    stateful_step_count=50,
    derandomize=EFFORT == 1,
    database=None,
    deadline=None,
)


@pytest.mark.parametrize("part", range(4))
def test_guarantees_hold_in_thousands_of_random_lives(part: int) -> None:
    for seed in range(part, 4_000 * EFFORT, 4):
        try:
            live(seed)
        except AssertionError as error:
            error.add_note(f"live({seed})")
            raise


PASSED_ON = {
    1: (("own",), ("call", 2), ("drop",)),
    2: (("call", 3), ("drop",)),
    3: (("call", 4), ("drop",)),
    4: (("call", 5), ("drop",)),
    5: (("call", 2), ("drop",)),
}
CREATED = {**PASSED_ON, 1: (), 2: (("create", 1), ("call", 3), ("drop",))}


@pytest.mark.parametrize(
    "story",
    [
        Story(PASSED_ON, mortal=(2, 3, 4), deaths=3, joins=1),
        Story(CREATED, mortal=(2, 3, 4), deaths=2),
        Story(CREATED, mortal=(1, 3), deaths=1, breaks=((1, 2), (2, 3), (1, 4))),
        Story({**CREATED, 2: (("create", 1), ("call", 3), ("give_up",), ("drop",))}, breaks=((1, 2), (2, 3))),
    ],
    ids=["passed_on_by_the_dying", "created_by_the_dying", "owner_dies", "given_up"],
)
def test_guarantees_hold_as_a_reference_is_passed_from_worker_to_worker(story: Story) -> None:
    for seed in range(700 * EFFORT):
        wander(story, seed)
