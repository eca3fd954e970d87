"""A real Chromium that looks at pages, driven by Playwright, where both are installed."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Command

__all__ = ["chromium", "served_page"]

_SECONDS = 60.0


@contextmanager
def chromium(folder: Path) -> Iterator[Any]:
    """A browser; the test is skipped where there is none.

    Args:
        folder: for its temporary files.
    """
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    path = shutil.which(os.environ.get("CHROMIUM", "chromium"))
    if path is None:
        pytest.skip("needs Chromium: apt-get install chromium, or CHROMIUM=/path/to/it")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))  # of Playwright's own process, and of the browser
        with api.sync_playwright() as playwright:
            sandbox = ["--no-sandbox"] if os.getuid() == 0 else []
            browser = playwright.chromium.launch(executable_path=path, args=sandbox)
            try:
                yield browser
            finally:
                browser.close()


@contextmanager
def served_page(folder: Path, job: str) -> Iterator[str]:
    """The address of the page of a job, served by ``farcall page`` in a process of its own."""
    command = [sys.executable, "-m", "farcall", "page", "--job", job]
    served = Command(command, folder, os.environ, _SECONDS)
    try:
        yield served.wait_for("farcall: page of job").rpartition(" ")[2]
    finally:
        served.process.terminate()
        served.process.wait(_SECONDS)
