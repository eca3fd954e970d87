"""Texts of other processes in log lines and errors."""

from __future__ import annotations

import pytest

from rpc.runtime.legible import legible


class Unprintable(Exception):
    def __str__(self) -> str:
        raise LookupError


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("plain", "plain"),
        ("two\nlines", "'two\\nlines'"),
        ("\x1b[31m", "'\\x1b[31m'"),
        ("\udcff", "'\\udcff'"),
        ("x" * 5000, "x" * 1000),
        (7, "7"),
        (ValueError("as told"), "as told"),
        (Unprintable(), "Unprintable, whose text is not available"),
    ],
)
def test_what_others_say_is_shown_in_one_line_that_is_not_too_long(said: object, shown: str) -> None:
    assert legible(said) == shown
