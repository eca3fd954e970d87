"""Phrases that a reader has to decode, and that docstrings, comments and messages therefore do not use."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.syntax_trees import syntax_trees, tree_of

__all__ = ["syntax_trees"]

pytestmark = pytest.mark.usefixtures("syntax_trees")

ROOT = Path(__file__).resolve().parent.parent.parent

FOLDERS = ("rref", "dist_autograd", "dist_optim", "rpc", "spmd", "farcall", "benchmarks", "examples", "tests")

OPENINGS = re.compile(r"\s*(So (many|much)|Who)\b")
"""How no docstring begins: constants are described by a noun and a unit, subjects are nouns."""

PHRASES = re.compile(r"\b(of before|in vain|(is|are|was|were) told of|but for)\b")

GENERATED = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def checked_files() -> list[Path]:
    return [
        file
        for folder in FOLDERS
        for file in sorted((ROOT / folder).rglob("*.py"))
        if not file.name.endswith(GENERATED) and file != Path(__file__)
    ]


def faults(file: Path) -> Iterator[str]:
    texts = list[tuple[int, str]]()
    for node in ast.walk(tree_of(file)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):  # also below a constant
                if found := OPENINGS.match(text):
                    yield f"{node.lineno}: a docstring begins with {found.group().strip()!r}"
            case ast.Constant(value=str(text)):
                texts.append((node.lineno, text))
    for line, text in [*texts, *comments(file.read_text())]:
        if found := PHRASES.search(" ".join(text.split())):
            yield f"{line}: {found.group()!r}"


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Comments, each with its line; none if there is no phrase behind a ``#``: reading tokens is slow."""
    if any(PHRASES.search(" ".join(line.partition("#")[2].split())) for line in source.splitlines()):
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def test_docstrings_comments_and_messages_use_no_phrase_that_has_to_be_decoded() -> None:
    found = [f"{file.relative_to(ROOT)}:{fault}" for file in checked_files() for fault in faults(file)]
    assert not found, "\n".join(found)


def test_documentation_uses_no_phrase_that_has_to_be_decoded() -> None:
    pages = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
    found = [
        f"{page.relative_to(ROOT)}: {phrase.group()!r}"
        for page in pages
        for phrase in PHRASES.finditer(" ".join(page.read_text().split()))
    ]
    assert len(pages) > 10
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('LIMIT = 3\n"""So many calls."""\n', 1),
        ('"""Who waits must not block."""\n', 1),
        ("x = 1  # it waits in vain\n", 1),
        ('"""All are here, but for the\nlast one."""\n', 1),
        ('raise ValueError("it is told of a loss")\n', 1),
        ('"""Maximum number of calls; whoever calls may be sorry, but formats are told apart."""\n', 0),
    ],
)
def test_each_phrase_is_found(tmp_path: Path, source: str, count: int) -> None:
    file = tmp_path / "module.py"
    file.write_text(source)
    assert len(list(faults(file))) == count
