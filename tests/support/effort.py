"""How thorough property tests are: ``FARCALL_TEST_EFFORT=20`` tries twenty times as much, and at random."""

from __future__ import annotations

import os
from typing import Final

from hypothesis import HealthCheck, settings

EFFORT: Final = int(os.environ.get("FARCALL_TEST_EFFORT", "1"))

PROFILE: Final = settings(
    max_examples=100 * EFFORT,
    derandomize=EFFORT == 1,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
