"""How thorough property tests are: ``FARCALL_TEST_EFFORT=20`` tries eighty times as much, and at random."""

from __future__ import annotations

import os
from typing import Final

from hypothesis import HealthCheck, settings

EFFORT: Final = int(os.environ.get("FARCALL_TEST_EFFORT", "1"))


def examples(number: int) -> int:
    """This number times the effort of a nightly run; a quarter of it in others."""
    return number * EFFORT if EFFORT > 1 else min(number, max(number // 4, 10))


PROFILE: Final = settings(
    max_examples=examples(100),
    derandomize=EFFORT == 1,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
