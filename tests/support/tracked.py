"""An object that tells the test when it is freed."""

from __future__ import annotations

import weakref
from typing import Any

from tests.support.workers import current_worker


class Tracked:
    """Reports ``"freed"`` with its name from the worker that it was made on, once nothing refers to it.

    Copies, as other workers get them, report nothing.
    """

    def __init__(self, name: str = "object", *holds: Any) -> None:
        self.name = name
        self.holds = holds
        weakref.finalize(self, current_worker().report, "freed", name).atexit = False

    def say_name(self) -> str:
        """Shows that the object is there."""
        return self.name
