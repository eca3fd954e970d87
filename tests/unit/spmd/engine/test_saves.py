"""A worker's saves: what is asked for after their end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rpc.errors import GivenUpError
from spmd.engine.worker.saves import Saves


def test_a_save_that_is_asked_for_after_the_end_fails_as_one_before_it_does() -> None:
    engine: Any = SimpleNamespace()
    saves = Saves(engine)
    before = saves.done(0)
    saves.close()
    saves.fail(1, MemoryError())
    for asked in (before, saves.done(0), saves.done(1)):
        with pytest.raises(GivenUpError, match="the worker has left SPMD mode"):
            asked.result(timeout=0.001)
