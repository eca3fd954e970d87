"""One session of SPMD mode for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.group.spmd.driven import drive
from tests.support.workers import WorkerProcess


@pytest.fixture(scope="package")
def driver(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerProcess]:
    """The process that cases run in."""
    yield from drive(request, tmp_path_factory)
