"""The changes that ``tests.support.mutations`` makes to the product."""

from __future__ import annotations

import ast

from tests.support.mutations import mutations_of

SOURCE = '''\
LIMIT = 3


def find(items: list[str], strict: bool = True) -> int:
    """Returns the place of "ä"."""
    count = 1
    if "ä" in items and len(items) < LIMIT:
        raise ValueError("found")
    return count if strict else 0
'''


def test_each_change_is_of_one_kind_and_leaves_a_program() -> None:
    found = mutations_of(ast.parse(SOURCE))
    changed = [mutation.apply(SOURCE) for mutation in found]
    for each in changed:
        ast.parse(each)
    lines = [
        line.strip() for each in changed for line in each.splitlines() if line not in SOURCE.splitlines()
    ]
    assert lines == [
        "pass",
        "count = (2)",
        "if (not ('ä' in items and len(items) < LIMIT)):",
        "if ('ä' in items or len(items) < LIMIT):",
        "if ('ä' not in items) and len(items) < LIMIT:",
        'if "ä" in items and (len(items) <= LIMIT):',
        "pass",
        "return count if (not (strict)) else 0",
        "return count if strict else (1)",
    ]
