"""What rules about the code ask of a file: one parse and one walk for all of them."""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

__all__ = ["PACKAGES", "ROOT", "PrivateUse", "Source", "is_private", "source_of"]

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = ("rpc", "rref", "dist_autograd", "dist_optim", "spmd", "farcall")
"""The packages, from the lowest."""

_NAMES_MODULE: Final = re.compile(r"torch\._|[a-z_]\w*(\.\w+)+(:\w+)?$")
_ASK: Final = ("getattr", "hasattr")
_IMPORT: Final = ("import_module", "__import__")


class PrivateUse(NamedTuple):
    """A private name that a file uses.

    Attributes:
        line: where.
        name: its last part; empty if it is PyTorch's whatever others define.
        of_torch: the whole name, if that is known to be PyTorch's.
        own: whether it is an attribute of ``self`` or ``cls``.
    """

    line: int
    name: str
    of_torch: str | None = None
    own: bool = False


@dataclass
class Source:
    """A file.

    Attributes:
        imports: every module that an import names, at any depth: line and full name. For ``from a import b``
            that is both ``a`` and ``a.b``, since ``b`` may be a module.
        strings: those that may name a module, and their lines.
        defined: the private names of its functions, classes, variables and attributes.
        uses: the private names that it uses.
        of_torch: dotted names that begin with ``torch``, where they are used without an import.
    """

    imports: list[tuple[int, str]] = field(default_factory=list)
    strings: list[tuple[int, str]] = field(default_factory=list)
    defined: set[str] = field(default_factory=set)
    uses: list[PrivateUse] = field(default_factory=list)
    of_torch: list[tuple[int, str]] = field(default_factory=list)


def is_private(name: str) -> bool:
    """Whether a name has one underscore before it."""
    return name.startswith("_") and not name.startswith("__") and name != "_"


@cache
def source_of(path: Path) -> Source:
    """The facts about a file of the repository."""
    was_enabled = gc.isenabled()
    gc.disable()  # the collector would visit all nodes again and again
    try:
        return _Reader(path).read(ast.parse(path.read_text(), str(path)))
    finally:
        if was_enabled:
            gc.enable()


class _Reader:
    def __init__(self, path: Path) -> None:
        self._package = path.relative_to(ROOT).parent.parts
        self._found = Source()
        self._known: dict[str, str] = {}  # what names refer to in PyTorch
        self._assigned: list[ast.Assign | ast.AnnAssign] = []
        self._attributes: list[ast.Attribute] = []

    def read(self, tree: ast.Module) -> Source:
        ahead: list[ast.AST] = [tree]
        while ahead:
            node = ahead.pop()
            if look := _LOOKS.get(type(node)):
                look(self, node)
            for name in node._fields:
                value = getattr(node, name)
                if isinstance(value, list):
                    ahead += [each for each in value if isinstance(each, ast.AST)]
                elif isinstance(value, ast.AST):
                    ahead.append(value)
        for assigned in sorted(self._assigned, key=lambda each: each.lineno):
            targets = assigned.targets if isinstance(assigned, ast.Assign) else [assigned.target]
            if assigned.value is not None and (named := self._dotted(assigned.value)):
                self._known |= {each.id: named for each in targets if isinstance(each, ast.Name)}
        for attribute in self._attributes:
            self._use(attribute)
        return self._found

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._found.imports.append((node.lineno, alias.name))
            if alias.name.partition(".")[0] == "torch":
                self._known[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                if any(map(is_private, alias.name.split("."))):
                    self._found.uses.append(PrivateUse(node.lineno, "", alias.name))

    def _import_from(self, node: ast.ImportFrom) -> None:
        parts = self._package[: len(self._package) - node.level + 1] if node.level else ()
        module = ".".join([*parts, *([node.module] if node.module else [])])
        full = [(alias, f"{module}.{alias.name}") for alias in node.names]
        self._found.imports += [(node.lineno, module), *((node.lineno, name) for _, name in full)]
        for alias, name in full:
            if module.partition(".")[0] in PACKAGES:
                self._define(alias.asname or alias.name)
            elif module.partition(".")[0] == "torch":
                self._known[alias.asname or alias.name] = name
                if any(map(is_private, name.split("."))):
                    self._found.uses.append(PrivateUse(node.lineno, "", name))

    def _call(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        texts = [each.value if isinstance(each, ast.Constant) else None for each in node.args]
        if called in _IMPORT and texts and isinstance(texts[0], str):
            self._found.imports.append((node.lineno, texts[0]))
        elif called in _ASK and len(texts) > 1 and isinstance(texts[1], str) and is_private(texts[1]):
            self._found.uses.append(PrivateUse(node.lineno, texts[1]))

    def _constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and _NAMES_MODULE.match(node.value):
            self._found.strings.append((node.lineno, node.value))

    def _definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self._define(node.name)

    def _name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self._define(node.id)

    def _attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Store):
            self._define(node.attr)
        self._attributes.append(node)

    def _assign(self, node: ast.Assign | ast.AnnAssign) -> None:
        self._assigned.append(node)

    def _define(self, name: str) -> None:
        if is_private(name):
            self._found.defined.add(name)

    def _use(self, node: ast.Attribute) -> None:
        whole = self._dotted(node)
        of_torch = whole if whole is not None and whole.startswith("torch.") else None
        if of_torch and isinstance(node.ctx, ast.Load):
            self._found.of_torch.append((node.lineno, of_torch))
        if is_private(node.attr):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            self._found.uses.append(PrivateUse(node.lineno, node.attr, of_torch, own))

    def _dotted(self, node: ast.expr) -> str | None:
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        start = self._known.get(node.id) if isinstance(node, ast.Name) else None
        return ".".join([start, *reversed(parts)]) if start else None


_LOOKS: Final[dict[type[ast.AST], Callable[[_Reader, Any], None]]] = {
    ast.Import: _Reader._import,
    ast.ImportFrom: _Reader._import_from,
    ast.Call: _Reader._call,
    ast.Constant: _Reader._constant,
    ast.FunctionDef: _Reader._definition,
    ast.AsyncFunctionDef: _Reader._definition,
    ast.ClassDef: _Reader._definition,
    ast.Name: _Reader._name,
    ast.Attribute: _Reader._attribute,
    ast.Assign: _Reader._assign,
    ast.AnnAssign: _Reader._assign,
}
