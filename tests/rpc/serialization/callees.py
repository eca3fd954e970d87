"""Functions and classes for the tests to send: an importable module, as a user's would be."""

from __future__ import annotations

from typing import Any


def null(*args: Any, **kwargs: Any) -> None:
    """Takes anything and returns nothing."""


class Plain:
    """An object with attributes and nothing else."""

    def __init__(self, value: Any) -> None:
        self.value = value
