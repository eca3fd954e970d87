"""Names: public classes share few, tests use few that are private, and tests lie where the code lies."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from tests.support.syntax_trees import syntax_trees, tree_of

__all__ = ["syntax_trees"]

pytestmark = pytest.mark.usefixtures("syntax_trees")

ROOT: Final = Path(__file__).resolve().parent.parent.parent
PACKAGES: Final = ("rpc", "rref", "dist_autograd", "dist_optim", "spmd", "farcall")

SAME_NAME: Final = 2
"""Maximum number of public classes of one name."""

PRIVATE_USES: Final = 100
"""Maximum number of places in tests that use a private name of the packages."""

OF_OTHERS: Final = frozenset(
    (
        *("_exit", "_members", "_registry", "_replace", "_fields", "_asdict"),
        *("_base", "_clear", "_foreach_norm", "_get_future", "_get_profiling_future", "_indices"),
        *("_softmax", "_to_copy", "_values", "_apply", "_autograd", "_execution_engine", "_flatten"),
        *("_get_backend", "_get_sequence_number_for_group", "_set_pg_timeout", "_timeout"),
    )
)
"""Names of the standard library and of PyTorch's API that the packages have, too."""

TESTS_OF_OTHERS_NAMES: Final = ("tests/group/farcall/test_compat", "tests/group/farcall/test_xla")
"""Tests of names that PyTorch and PyTorch/XLA begin with an underscore."""

TOPICS: Final = frozenset(("benchmarks", "devices", "examples", "farcall/xla", "rpc/testing"))
"""Folders of tests that are not folders of a package."""


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def test_a_public_class_shares_its_name_with_one_other_at_most() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sources():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(ROOT)))
    assert not {name: where for name, where in found.items() if len(where) > SAME_NAME}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OF_OTHERS


@cache
def defined_in(path: Path) -> set[str]:
    """The private names that a file defines."""
    found = set[str]()
    for node in ast.walk(tree_of(path)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
    return set(filter(is_private, found))


def used(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Names in a test that are those of something else: attributes, imports, and what is patched."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name):
                yield node.lineno, name
            case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] in PACKAGES:
                for alias in names:
                    yield node.lineno, alias.name
            case ast.Call(func=ast.Attribute(attr="setattr" | "patch" | "object"), args=args):
                for given in args:
                    if isinstance(given, ast.Constant) and isinstance(given.value, str):
                        yield node.lineno, given.value.rpartition(".")[2]


def test_tests_use_few_private_names() -> None:
    private = set[str]().union(*map(defined_in, sources()))
    found = [
        f"{where}:{line} {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for where in [str(path.relative_to(ROOT))]
        if not where.startswith((*TESTS_OF_OTHERS_NAMES, "tests/group/farcall/xla/", "tests/conformance/"))
        for of_others in [private - defined_in(path)]
        for line, name in used(tree_of(path))
        if name in of_others
    ]
    assert len(found) <= PRIVATE_USES, "\n".join(found)


def test_tests_lie_where_the_code_lies() -> None:
    found = {
        str(path.parent.relative_to(ROOT / "tests" / kind))
        for kind in ("unit", "group")
        for path in (ROOT / "tests" / kind).rglob("test_*.py")
    }
    assert not {folder for folder in found - TOPICS if not (ROOT / folder).is_dir()}
    assert not [path.name for path in (ROOT / "tests" / "group").glob("test_*.py")]
