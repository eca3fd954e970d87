"""``torch_xla.utils.utils``: fake data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["SampleGenerator", "getenv_as"]


class SampleGenerator:
    """The same batch again and again.

    Args:
        data: the batch.
        sample_count: how often.
    """

    def __init__(self, data: Any, sample_count: int) -> None:
        self._data, self._count = data, sample_count

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._count):
            yield self._data

    def __len__(self) -> int:
        return self._count


def getenv_as(name: str, type: Callable[[str], Any], defval: Any = None) -> Any:  # noqa: A002  theirs
    """An environment variable, or a default."""
    said = os.environ.get(name)
    if said is None:
        return defval
    return said.lower() in ("1", "true", "yes") if type is bool else type(said)
