"""Breaks the product in places chosen at random, one at a time, and shows which tests notice:
``python -m tests.support.mutations --count 60 --seed 1``.

A seed chooses the places of a given tree, so that two runs on the same product and different tests can be
compared: what was noticed before must be noticed after. Tests that lie where the file lies or import it run
in a copy of the tree, until one fails. That one must pass in the tree itself.
"""

from __future__ import annotations

import argparse
import ast
import copy
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.deletions import copied, run

__all__ = ["Mutation", "mutations_of", "tests_of"]

_ROOT: Final = Path(__file__).resolve().parents[2]
_PACKAGES: Final = ("rpc", "rref", "dist_autograd", "dist_optim", "spmd", "farcall")
_SECONDS: Final = 900.0

_OPPOSITE: Final[dict[type[ast.AST], type[ast.AST]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True)
class Mutation:
    """A change of one node.

    Attributes:
        what: the kind of change.
        line, column, last_line, last_column: where the node is, in bytes as in ``ast``.
        instead: the text in its place.
    """

    what: str
    line: int
    column: int
    last_line: int
    last_column: int
    instead: str

    @classmethod
    def of(cls, what: str, node: ast.expr | ast.stmt, instead: str) -> Mutation:
        """The change of a node to a text."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return cls(what, node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, instead)

    def apply(self, source: str) -> str:
        """The source with the change."""
        lines = source.encode().splitlines(keepends=True)
        before = b"".join(lines[: self.line - 1]) + lines[self.line - 1][: self.column]
        after = lines[self.last_line - 1][self.last_column :] + b"".join(lines[self.last_line :])
        return (before + self.instead.encode() + after).decode()


def mutations_of(tree: ast.Module) -> list[Mutation]:
    """All changes of a file's functions, in the order of the nodes."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    found = {each: None for function in functions for node in function.body for each in _inside(node)}
    return sorted(found, key=lambda each: (each.line, each.column, each.what, each.instead))


def _inside(statement: ast.stmt) -> Iterator[Mutation]:
    for node in ast.walk(statement):
        match node:
            case ast.Expr(value=ast.Constant()):  # a docstring
                pass
            case ast.Expr() | ast.Assign() | ast.AugAssign() | ast.Raise() | ast.Delete():
                yield Mutation.of("removed statement", node, "pass")
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                yield Mutation.of("negated condition", test, f"(not ({ast.unparse(test)}))")
            case ast.Constant(value=int(value)) if not isinstance(value, bool):
                yield Mutation.of("off by one", node, f"({value + 1})")
            case ast.Constant(value=bool(value)):
                yield Mutation.of("swapped branch", node, str(not value))
            case ast.Compare(ops=[operator]) if type(operator) in _OPPOSITE:
                changed = copy.deepcopy(node)
                changed.ops = [_OPPOSITE[type(operator)]()]  # type: ignore[list-item]
                ordered = isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
                what = "off by one" if ordered else "swapped branch"
                yield Mutation.of(what, node, f"({ast.unparse(changed)})")
            case ast.BoolOp(op=operator):
                either = copy.deepcopy(node)
                either.op = _OPPOSITE[type(operator)]()  # type: ignore[assignment]
                yield Mutation.of("swapped branch", node, f"({ast.unparse(either)})")


def tests_of(path: Path) -> list[Path]:
    """Tests of a file: those of its name, then others that import it, then those that lie where it lies."""
    inside = path.relative_to(_ROOT)
    module = ".".join(inside.with_suffix("").parts)
    texts = {each: each.read_text() for each in sorted((_ROOT / "tests").rglob("test_*.py"))}
    folders = [_ROOT / "tests" / kind / inside.parent for kind in ("unit", "group")]
    mirrored = [each for folder in folders for each in texts if each.parent == folder]
    named = [each for each in mirrored if inside.stem.strip("_") in each.stem]
    importing = [each for each, text in texts.items() if f"{module} " in text or f'"{module}' in text]
    return list(dict.fromkeys([*named, *importing, *mirrored]))


def _noticed_by(path: Path, mutation: Mutation, tests: list[Path]) -> str:
    """What notices the change of a file; empty if nothing does."""
    files = [str(each.relative_to(_ROOT)) for each in tests]
    command = ("-m", "pytest", "-q", "-x", "-m", "not nightly", "-p", "no:cacheprovider", "--tb=no")
    with copied() as folder:
        target = folder / path.relative_to(_ROOT)
        target.write_text(mutation.apply(target.read_text()))
        try:
            ended = run(folder, *command, *files, seconds=_SECONDS)
        except subprocess.TimeoutExpired:
            return f"tests that do not end within {_SECONDS:g} s"
    if ended.returncode == 0:
        return ""
    lines = ended.stdout.splitlines()
    failed = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), "")
    if not failed:
        return next((line for line in [*lines, *ended.stderr.splitlines()] if "Error" in line), "its end")
    test = failed.split()[1]
    if failed.startswith("FAILED") and run(_ROOT, *command, test, seconds=_SECONDS).returncode:
        return ""  # it fails without the change, too
    return test


def main() -> int:
    """Print a line for each change; returns 0, as no number of changes must be noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.mutations", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="chooses the places")
    parser.add_argument("--count", type=int, default=60, help="number of changes")
    parser.add_argument("--only", default="", help="beginning of the paths of files to change")
    given = parser.parse_args()
    places = [
        (path, mutation)
        for package in _PACKAGES
        for path in sorted((_ROOT / package).rglob("*.py"))
        if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
        if str(path.relative_to(_ROOT)).startswith(given.only)
        for mutation in mutations_of(ast.parse(path.read_text()))
    ]
    noticed = 0
    chosen = random.Random(given.seed).sample(places, min(given.count, len(places)))
    for number, (path, mutation) in enumerate(chosen, 1):
        tests = tests_of(path)
        found = _noticed_by(path, mutation, tests) if tests else ""
        noticed += bool(found)
        line = path.read_text().splitlines()[mutation.line - 1].strip()
        where = f"{path.relative_to(_ROOT)}:{mutation.line}"
        print(f"{number:2} {where} {mutation.what} in {line!r}: {found or 'NOTICED BY NO TEST'}", flush=True)
    print(f"{noticed} of {len(chosen)} noticed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
