"""The two guarantees, under anything that may happen: safety at every step, liveness at the end.

``FARCALL_TEST_EFFORT=20`` makes it twenty times as thorough; by default it takes seconds, and does the
same each time.
"""

import pytest

from tests.support.effort import examples
from tests.unit.rref.protocol.moves import live
from tests.unit.rref.protocol.stories import Story, wander


@pytest.mark.parametrize("part", range(4))
def test_guarantees_hold_in_thousands_of_random_lives(part: int) -> None:
    for seed in range(part, examples(4_000), 4):
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
    for seed in range(examples(700)):
        wander(story, seed)
