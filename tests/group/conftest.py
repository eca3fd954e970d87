"""Interpreters that tests of groups start are forked, unless a test is marked ``fresh_interpreter`` or is in
``examples``, whose programs run as a user runs them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support import interpreters, workers

_FOLDER: Final = Path(__file__).parent


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Has ``sys.executable`` forked while a test of this folder and its fixtures run; called for all
    tests of a run.
    """
    if _FOLDER not in item.path.parents:
        return (yield)
    server = item.config.stash[workers.fork_server_key]
    fork = functools.partial(server.fork_program, modules=workers.PRELOADED)
    is_fresh = item.get_closest_marker("fresh_interpreter") or "examples" in item.path.parts
    interpreters.start_by(None if is_fresh else fork)
    try:
        return (yield)
    finally:
        interpreters.start_by(None)
