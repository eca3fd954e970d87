"""The documentation's site, as far as that can be seen without building it (``make docs`` builds it)."""

from __future__ import annotations

import importlib
import re
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from docs.site.hooks import with_fences

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CONFIGURATION = (ROOT / "mkdocs.yml").read_text()


def test_each_page_is_in_the_navigation_once() -> None:
    named = re.findall(r"^ +- (?:[^\n]*: )?(\S+\.md)$", CONFIGURATION, re.MULTILINE)
    pages = [str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")]
    assert sorted(named) == sorted(pages)


def test_pages_link_to_pages_and_not_to_folders() -> None:
    """On the site there are no listings of folders."""
    wrong = [
        f"{path.relative_to(ROOT)}: {link}"
        for path in DOCS.rglob("*.md")
        for link in re.findall(r"\]\((?!https?:|\.\./)([^)#]+)", path.read_text())
        if not (path.parent / link).is_file()
    ]
    assert wrong == []


# ---- the reference

SHOWN = [
    name
    for path in sorted((DOCS / "api").glob("*.md"))
    for name in re.findall(r"^::: (\S+)$", path.read_text(), re.MULTILINE)
]

NOT_SHOWN = {"farcall.compat.torch_rpc", "farcall.examples", "spmd.engine"}
"""Packages with names of others: what ``torch.distributed.rpc`` becomes, and what the examples share."""

INTERNAL = {"__version__", "install"}
"""Beside the version, what farcall's entry points name."""

PACKAGES = {
    ".".join(path.parent.relative_to(ROOT).parts)
    for package in ("rpc", "rref", "dist_autograd", "dist_optim", "spmd", "farcall")
    for path in (ROOT / package).rglob("__init__.py")
    if "__all__ = [" in path.read_text()
}
FILES = {
    "rpc.errors",
    "rpc.functions",
    "rpc.options",
    "rpc.runtime.events",
    "spmd.collectives.errors",
    "spmd.engine.errors",
    "spmd.fsdp.wrap",
    "spmd.tensor_parallel.errors",
}


def resolved(name: str) -> Any:
    """What a dotted name refers to."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module) if is_module(module) else resolved(module), attribute)


def is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def is_of_farcall(value: object) -> bool:
    return not isinstance(value, ModuleType) and not str(getattr(value, "__module__", "")).startswith(
        "torch."
    )


@pytest.mark.parametrize("module", sorted((PACKAGES | FILES) - NOT_SHOWN))
def test_each_public_name_is_on_a_page_of_the_reference(module: str) -> None:
    """By this name, or by another one that the same object has."""
    face = importlib.import_module(module)
    others = [name for name in face.__all__ if f"{module}.{name}" not in SHOWN and name not in INTERNAL]
    shown = {id(resolved(name)) for name in SHOWN if not name.startswith("farcall.ray.")}  # which needs Ray
    values = {name: getattr(face, name) for name in others}
    assert [name for name, value in values.items() if id(value) not in shown and is_of_farcall(value)] == []


def test_no_name_is_in_the_reference_twice() -> None:
    assert sorted(SHOWN) == sorted(set(SHOWN))


def test_literal_blocks_of_docstrings_become_fenced_code() -> None:
    text = "Does.\n\nExample::\n\n    f(\n        1)\n\nReturns:\n    Nothing, see::\n\n        $ run --all\n"
    assert with_fences(text) == (
        "Does.\n\n**Example**\n\n```python\nf(\n    1)\n```\n\n"
        "Returns:\n    Nothing, see:\n\n    ```text\n    $ run --all\n    ```"
    )
