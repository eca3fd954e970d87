"""``torch_xla.utils.utils``: fake data, and settings in the environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["SampleGenerator", "as_list", "check_env_flag", "eprint", "getenv_as"]


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


def check_env_flag(name: str, default: str = "") -> bool:
    """Whether an environment variable is ``true``, or a number above 0."""
    said = os.environ.get(name, default)
    return said == "true" or (said.isdecimal() and int(said) > 0)


def as_list(t: Any) -> Any:
    """Return a tuple or list unchanged, and anything else in a list."""
    return t if isinstance(t, (tuple, list)) else [t]


def eprint(*args: Any, **kwargs: Any) -> None:
    """Print to the standard error."""
    print(*args, file=sys.stderr, **kwargs)
