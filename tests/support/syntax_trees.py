"""Syntax trees of the repository's files, for tests of the code itself."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

__all__ = ["syntax_trees", "tree_of"]


@cache
def tree_of(path: Path) -> ast.Module:
    """The tree of a file, which a module's tests share by the fixture ``syntax_trees``."""
    return ast.parse(path.read_text(), str(path))


@pytest.fixture(scope="module")
def syntax_trees() -> Iterator[None]:
    """Collects no garbage while trees are made: the collector visits all others again and again, which takes
    several times as long as the parser.
    """
    gc.disable()
    yield
    tree_of.cache_clear()
    gc.enable()
