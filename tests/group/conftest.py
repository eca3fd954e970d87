"""Interpreters that tests of groups start are forked, unless a test is marked ``fresh_interpreter``."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from tests.support import interpreters, workers


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Has ``sys.executable`` forked while a test and its fixtures run."""
    server = item.config.stash[workers.fork_server_key]
    fork = functools.partial(server.fork_program, modules=workers.PRELOADED)
    interpreters.start_by(None if item.get_closest_marker("fresh_interpreter") else fork)
    try:
        return (yield)
    finally:
        interpreters.start_by(None)
