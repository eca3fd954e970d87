"""The two guarantees, under anything that may happen: safety at every step, liveness at the end.

``FARCALL_TEST_EFFORT=20`` makes it twenty times as thorough; by default it takes seconds, and does the
same each time.
"""

import pytest

from tests.support.effort import examples
from tests.unit.rref.protocol.moves import live


@pytest.mark.parametrize("part", range(4))
def test_guarantees_hold_in_thousands_of_random_lives(part: int) -> None:
    for seed in range(part, examples(4_000), 4):
        try:
            live(seed)
        except AssertionError as error:
            error.add_note(f"live({seed})")
            raise
