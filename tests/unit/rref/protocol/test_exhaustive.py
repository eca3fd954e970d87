"""Every course of small stories: all interleavings of all messages, deaths and discoveries of deaths.

Each story is as small as one that can go wrong; those about the fence begin where it gets interesting.
"""

import pytest

from tests.unit.rref.protocol.stories import Step, Story, explore

CREATE_SHARE_DROP = {1: (), 2: (("create", 1), ("call", 3), ("drop",)), 3: (("drop",),)}
CREATE_WITH_AN_ARGUMENT = {1: (("own",), ("call", 2), ("drop",)), 2: (("create_with", 3), ("drop",)), 3: ()}
OWN_PASS_DROP = {1: (("own",), ("call", 2), ("drop",)), 2: (("call", 3), ("drop",)), 3: (("drop",),)}


def steps(*who: int | str) -> tuple[Step, ...]:
    """A prelude: worker n makes its next step, or the first call on its way ("a") arrives."""
    return tuple(("arrive", 0) if each == "a" else ("program", each) for each in who)


# 1 owns the object and has dropped it; 2 has a fork that 1 counts; 3 has one from 2 that 1 has not heard
# of; and one from 3 is on its way to 4.
ON_ITS_WAY = {1: (("own",), ("call", 2), ("drop",)), 2: (("call", 3),), 3: (("call", 4),), 4: ()}
SO_FAR = steps(1, 1, 1, "a", 2, "a", 3)

STORIES = {
    "create_share_drop_and_anyone_dies": Story(CREATE_SHARE_DROP, mortal=(1, 2, 3), deaths=1),
    "creation_is_given_up": Story(
        {**CREATE_SHARE_DROP, 2: (("create", 1), ("call", 3), ("give_up",), ("drop",))}
    ),
    "connection_of_the_creation_breaks": Story(CREATE_SHARE_DROP, breaks=((1, 2),)),
    "creation_with_an_argument_and_anyone_dies": Story(
        CREATE_WITH_AN_ARGUMENT, prelude=steps(1, 1, "a"), mortal=(1, 2, 3), deaths=1
    ),
    "creation_with_an_argument_is_given_up": Story(
        {**CREATE_WITH_AN_ARGUMENT, 2: (("create_with", 3), ("drop",), ("give_up",), ("drop",))}
    ),
    "connection_of_a_creation_with_an_argument_breaks": Story(CREATE_WITH_AN_ARGUMENT, breaks=((2, 3),)),
    "fetch_overtakes_the_creation": Story(
        {1: (), 2: (("create", 1), ("fetch",), ("drop",))}, mortal=(2,), deaths=1
    ),
    "own_pass_drop_and_anyone_dies": Story(OWN_PASS_DROP, mortal=(1, 2, 3), deaths=1),
    "back_to_where_it_came_from": Story(
        {**OWN_PASS_DROP, 2: (("call", 3), ("drop",), ("drop",)), 3: (("call", 2), ("drop",))},
        breaks=((2, 3),),
    ),
    "back_to_the_owner_and_to_itself": Story(
        {1: (("own",), ("call", 2), ("drop",)), 2: (("call", 1), ("call", 2), ("drop",), ("drop",))},
        breaks=((1, 2),),
    ),
    "to_itself_only": Story({1: (("create", 1), ("call", 1), ("give_up",), ("drop",), ("drop",)), 2: ()}),
    "child_dies_having_passed_it_on": Story(
        {**ON_ITS_WAY, 2: (("call", 3), ("drop",))}, prelude=SO_FAR, mortal=(3,), deaths=1
    ),
    "parent_and_child_die_having_passed_it_on": Story(ON_ITS_WAY, prelude=SO_FAR, mortal=(2, 3), deaths=2),
}


LONG = {"create_share_drop_and_anyone_dies", "parent_and_child_die_having_passed_it_on"}
"""Stories with thousands of courses; those of shorter ones meet the same lines."""


@pytest.mark.parametrize(
    "story",
    [
        pytest.param(story, id=name, marks=[pytest.mark.nightly] if name in LONG else [])
        for name, story in STORIES.items()
    ],
)
def test_guarantees_hold_whatever_the_order(story: Story) -> None:
    assert explore(story, most=8_000) > 10
