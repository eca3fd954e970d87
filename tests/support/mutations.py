"""Breaks the product in places chosen at random, one at a time, and shows which tests notice:
``python -m tests.support.mutations --count 60 --seed 1``.

A seed chooses the places of a given tree, so that two runs on the same product and different tests can be
compared: what was noticed before must be noticed after. Tests that lie where the file lies or import it run
in a process forked for each change, until one fails; that one must pass without the change.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import importlib.abc
import importlib.machinery
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_ROOT: Final = Path(__file__).resolve().parents[2]
_PACKAGES: Final = ("rpc", "rref", "dist_autograd", "dist_optim", "spmd", "farcall")
_SECONDS: Final = 900.0

_OPPOSITES: Final[tuple[tuple[type[ast.AST], type[ast.AST]], ...]] = (
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.In, ast.NotIn),
    (ast.Is, ast.IsNot),
    (ast.And, ast.Or),
)
_OPPOSITE: Final = {one: other for pair in _OPPOSITES for one, other in (pair, pair[::-1])}


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


def _tests_of(path: Path, kinds: Sequence[str]) -> list[Path]:
    """Tests of a file: those of its name, then others that import it, then those that lie where it lies."""
    inside = path.relative_to(_ROOT)
    module = ".".join(inside.with_suffix("").parts)
    folders = [_ROOT / "tests" / kind for kind in kinds]
    texts = {each: each.read_text() for folder in folders for each in sorted(folder.rglob("test_*.py"))}
    mirrored = [each for each in texts for folder in folders if each.parent == folder / inside.parent]
    named = [each for each in mirrored if inside.stem.strip("_") in each.stem]
    importing = [each for each, text in texts.items() if f"{module} " in text or f'"{module}' in text]
    return list(dict.fromkeys([*named, *importing, *mirrored]))


class _Changed(importlib.abc.MetaPathFinder):
    """Finds one module with its changed source."""

    def __init__(self, path: Path, source: str) -> None:
        self._path, self._source = path, source

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The module's, as found on the path, if it is of this file."""
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.origin != str(self._path):
            return None
        loader: Any = spec.loader
        loader.get_code = lambda _: compile(self._source, str(self._path), "exec", dont_inherit=True)
        return spec


def _failed(tests: Sequence[str], changed: _Changed | None) -> str:
    """The first test that fails; empty if all pass."""
    with tempfile.TemporaryFile("w+") as output:
        if (pid := os.fork()) == 0:
            os.setsid()
            for number in (1, 2):
                os.dup2(output.fileno(), number)
            sys.meta_path[:0] = [changed] if changed else []
            import pytest

            options = ("-q", "-x", "-m", "not nightly", "-p", "no:cacheprovider", "--tb=no")
            os._exit(pytest.main([*options, *tests]))
        end = time.monotonic() + _SECONDS
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            time.sleep(0.05)
            if time.monotonic() > end:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return "tests that do not end"
        output.seek(0)
        lines = output.read().splitlines()
    if ended[1] == 0:
        return ""
    failed = (line.split()[1] for line in lines if line.startswith(("FAILED", "ERROR")))
    return next(failed, lines[-1] if lines else "its end")


def main() -> int:
    """Print a line for each change; returns 0, as no number of changes must be noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.mutations", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="chooses the places")
    parser.add_argument("--count", type=int, default=60, help="number of changes")
    parser.add_argument("--only", default="", help="beginning of the paths of files to change")
    parser.add_argument("--tests", nargs="+", default=["unit", "group"], help="folders of tests that run")
    given = parser.parse_args()
    places = [
        (path, mutation)
        for package in _PACKAGES
        for path in sorted((_ROOT / package).rglob("*.py"))
        if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
        if str(path.relative_to(_ROOT)).startswith(given.only)
        for mutation in mutations_of(ast.parse(path.read_text()))
    ]
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    importlib.import_module("torch.distributed")  # which each of the processes needs

    noticed = 0
    chosen = random.Random(given.seed).sample(places, min(given.count, len(places)))
    for number, (path, mutation) in enumerate(chosen, 1):
        tests = [str(each.relative_to(_ROOT)) for each in _tests_of(path, given.tests)]
        failed = _failed(tests, _Changed(path, mutation.apply(path.read_text()))) if tests else ""
        if "::" in failed and _failed([failed], None):
            failed = ""  # it fails without the change, too
        noticed += bool(failed)
        line = path.read_text().splitlines()[mutation.line - 1].strip()
        where = f"{path.relative_to(_ROOT)}:{mutation.line}"
        print(f"{number:2} {where} {mutation.what} in {line!r}: {failed or 'NOTICED BY NO TEST'}", flush=True)
    print(f"{noticed} of {len(chosen)} noticed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
