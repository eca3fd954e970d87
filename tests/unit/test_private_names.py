"""Private names of PyTorch: each stands once, in the gate of its package, and this version has it.

A gate is a file ``torch_internals.py``; see ``rpc/runtime/internals.py``.
"""

from __future__ import annotations

import ast
import importlib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest
import torch

from rpc.runtime.internals import Internal, Internals
from tests.support.syntax_trees import syntax_trees, tree_of

__all__ = ["syntax_trees"]

pytestmark = pytest.mark.usefixtures("syntax_trees")

ROOT: Final = Path(__file__).resolve().parent.parent.parent
PACKAGES: Final = ("rpc", "rref", "dist_autograd", "dist_optim", "spmd", "farcall")
"""The packages, from the lowest."""

FILES: Final = [
    path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    if not path.name.endswith("_pb2.py")  # which protoc has written
]
GATES: Final = [path for path in FILES if path.name == "torch_internals.py"]

STANDARD_LIBRARY: Final = {
    "_Unpickler",
    "_current_frames",
    "_get_running_loop",
    "_getframe",
    "_inheriting",
    "_is_owned",
    "_sighandler_noop",
    "_slotnames",
}
"""Private names of Python's standard library, which are guarded where they are used."""

REPLACED: Final = ("torch._C._distributed_rpc", "torch._C._distributed_autograd")
"""Modules of PyTorch that ``farcall.compat`` replaces; it names them and needs nothing in them."""

MAJOR, MINOR = map(int, torch.__version__.split(".")[:2])


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def internals_of(gate: Path) -> Internals:
    module = importlib.import_module(".".join(gate.relative_to(ROOT).with_suffix("").parts))
    found: Internals = module.INTERNALS
    return found


def names_in_gates() -> list[tuple[Path, Internal]]:
    return [(gate, internal) for gate in GATES for internal in internals_of(gate).names]


@cache
def own_names() -> frozenset[str]:
    """The private names that the packages define: functions, classes, attributes."""
    found: set[str] = set()
    for path in FILES:
        for node in ast.walk(tree_of(path)) if path not in GATES else ():
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    found.add(name)
                case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
                case ast.ImportFrom(module=str(module), names=aliases) if module.split(".")[0] in PACKAGES:
                    found.update(alias.asname or alias.name for alias in aliases)
    return frozenset(filter(is_private, found)) - frozenset(dir(torch.Tensor))


def names_of_torch(tree: ast.Module) -> dict[str, str]:
    """What names in a file refer to in PyTorch, by imports and assignments."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    known[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            named = dotted(node.value, known)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if named is not None:
                known |= {target.id: named for target in targets if isinstance(target, ast.Name)}
    return known


def dotted(node: ast.expr, known: dict[str, str]) -> str | None:
    match node:
        case ast.Name(id=name):
            return known.get(name)
        case ast.Attribute(value=value, attr=name):
            of = dotted(value, known)
            return None if of is None else f"{of}.{name}"
    return None


def uses(path: Path, allowed: frozenset[str] = frozenset()) -> Iterator[tuple[int, str]]:
    """The private names that a file uses: of PyTorch's modules, and of objects other than its own."""
    tree = tree_of(path)
    known = names_of_torch(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                for alias in aliases:
                    if alias.name.startswith("torch.") and any(map(is_private, alias.name.split("."))):
                        yield node.lineno, alias.name
            case ast.ImportFrom(module=str(module), names=aliases) if module.split(".")[0] == "torch":
                for alias in aliases:
                    name = f"{module}.{alias.name}"
                    if any(map(is_private, name.split("."))):
                        yield node.lineno, name
            case ast.Constant(value=str(name)) if name.startswith("torch._") and not name.startswith(
                REPLACED
            ):
                yield node.lineno, name
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]
            ):
                if is_private(name) and name not in own_names() | allowed | STANDARD_LIBRARY:
                    yield node.lineno, name
            case ast.Attribute(value=value, attr=name) if is_private(name) and name not in allowed:
                of = dotted(node, known)
                if of is not None and of.startswith("torch."):
                    yield node.lineno, of
                elif name not in own_names() | STANDARD_LIBRARY and not is_own(value):
                    yield node.lineno, f"?.{name}"


def is_own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in {"self", "cls"}


def expected_by(package: str) -> frozenset[str]:
    """The last parts of the names in the gates of a package and of lower ones, for uses on instances."""
    lower = PACKAGES[: PACKAGES.index(package) + 1]
    return frozenset(
        internal.name.rpartition(":")[2].rpartition(".")[2]
        for gate, internal in names_in_gates()
        if gate.relative_to(ROOT).parts[0] in lower
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_private_names_are_used_in_gates_only(package: str) -> None:
    expected = expected_by(package)
    assert not [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in FILES
        if path.relative_to(ROOT).parts[0] == package and path not in GATES
        for line, name in uses(path, expected)
    ]


def test_each_name_stands_once() -> None:
    counts = Counter((str(each), each.since, each.until) for _, each in names_in_gates())
    assert not [name for name, count in counts.items() if count > 1]


@pytest.mark.parametrize("internal", [pytest.param(each, id=str(each)) for _, each in names_in_gates()])
def test_this_version_of_pytorch_has_it(internal: Internal) -> None:
    assert internal.is_found or not internal.is_needed((MAJOR, MINOR))
