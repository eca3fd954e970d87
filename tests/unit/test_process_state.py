"""What the process, and no agent, owns: docs/architecture.md lists the files that have such state."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.syntax_trees import syntax_trees, tree_of

__all__ = ["syntax_trees"]

pytestmark = pytest.mark.usefixtures("syntax_trees")

ROOT = Path(__file__).resolve().parent.parent.parent

PACKAGES = ("rpc", "rref", "dist_autograd", "dist_optim", "spmd", "farcall")

CONTAINERS = {
    *("dict", "list", "set", "deque", "defaultdict", "OrderedDict", "SimpleQueue"),
    *("WeakSet", "WeakKeyDictionary", "WeakValueDictionary"),
    *("local", "ContextVar", "Lock", "RLock", "Condition", "Event", "count", "Counter"),
}
"""What makes an object that changes, when it is called without anything to begin with."""


def rebound(tree: ast.Module) -> Iterator[str]:
    """The names of a module that its functions bind anew."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from node.names


def filled(tree: ast.Module) -> Iterator[str]:
    """The names of a module that are bound to containers, locks and counters which begin empty."""
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if begins_empty(node.value):
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def begins_empty(value: ast.expr) -> bool:
    match value:
        case ast.List(elts=[]) | ast.Dict(keys=[]):
            return True
        case ast.Call(func=function, args=args):
            function = function.value if isinstance(function, ast.Subscript) else function
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            return name in CONTAINERS and not (name in ("dict", "list", "set") and args)
    return False


def state_of(path: Path) -> set[str]:
    tree = tree_of(path)
    return {name for name in (*rebound(tree), *filled(tree)) if not name.startswith("__")}


def test_the_documentation_lists_all_files_with_state_of_the_process() -> None:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    found = {str(path.relative_to(ROOT)) for path in paths if state_of(path)}
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.split("## State of the process\n")[1].split("\n## ")[0]
    assert found == set(re.findall(rf"`((?:{'|'.join(PACKAGES)})/[\w/]+\.py)`", section))
