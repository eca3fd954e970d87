"""Errors, and the words of their messages."""

from __future__ import annotations

import pytest

from rpc.errors import with_article


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(int, "an int"), (list, "a list"), (OSError, "an OSError"), ("module.Class", "a module.Class")],
)
def test_article(kind: type | str, expected: str) -> None:
    assert with_article(kind) == expected
