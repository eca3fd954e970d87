"""What the documents name exists, and what they show runs."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

import rpc
from rpc.lifecycle.backend_registry import BackendType

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
ids = [str(path.relative_to(ROOT)) for path in DOCUMENTS]

PACKAGES = (
    "rpc",
    "rref",
    "dist_autograd",
    "dist_optim",
    "spmd",
    "farcall",
    "benchmarks",
    "tests",
    "examples",
)
FOLDERS = (*PACKAGES, "docs", "requirements")
EXTENDING = (ROOT / "docs" / "extending.md").read_text()


def code(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def paths(text: str) -> Iterator[str]:
    """Everything that is written as a path into the project, with its braces expanded."""
    for name in re.findall(rf"(?<![\w/.-])((?:{'|'.join(FOLDERS)})/[\w./{{}},*-]*)", text):
        parts = [part.strip("{}").split(",") for part in re.split(r"(\{[^}]*\})", name.rstrip(".,"))]
        yield from map("".join, itertools.product(*parts))


def diagrammed(text: str) -> Iterator[str]:
    """Files of ``rpc`` that a diagram names."""
    for block in re.findall(r"^```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        for name in re.findall(r"(?<![\w/])\w+(?:/\w+)+\.py", block):
            yield name if (ROOT / name).exists() else f"rpc/{name}"


def is_there(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    module, _, attribute = name.rpartition(".")
    try:
        if find_spec(name) is not None:
            return True
    except (ModuleNotFoundError, AttributeError):
        pass
    try:
        return hasattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError:
        return bool(module) and is_there(module)


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_paths_that_a_document_names_exist(document: Path) -> None:
    text = document.read_text()
    named = {*paths(text), *diagrammed(text)}
    missing = [name for name in named if not list(ROOT.glob(name.rstrip("/")))]
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    missing += [link for link in links if not (document.parent / link).exists()]
    assert not missing


def anchors(document: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_headings_that_a_document_links_to_exist(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", document.read_text())
    targets = [(document.parent / page if page else document, heading) for page, heading in links]
    assert [heading for page, heading in targets if heading not in anchors(page)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_modules_and_targets_that_a_document_names_exist(document: Path) -> None:
    text = document.read_text()
    run = re.findall(r"python -m ([\w.]+)", text)
    named = re.findall(rf"`((?:{'|'.join(PACKAGES)})\.\w[\w.]*)[`(]", text)
    missing = [name for name in {*run, *named} if not name.endswith(".py") and not is_there(name)]
    targets = set(re.findall(r"make ([a-z][\w-]*)", "\n".join(re.findall("`[^`]*`", text))))
    targets -= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert not missing
    assert not targets


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_code_in_a_document_compiles(document: Path) -> None:
    for number, block in enumerate(code(document.read_text(), "python")):
        compile(block, f"{document.name}, block {number}", "exec")


# ---- extending.md


@pytest.fixture
def snippets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snippets as modules of an installed distribution, with the entry points that the page names."""
    monkeypatch.setattr(BackendType, "_members", dict(BackendType._members))
    for block in code(EXTENDING, "python"):
        name = block.partition("\n")[0].removeprefix("# ")
        (tmp_path / name).write_text(block)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    described = tmp_path / "snippets-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: snippets\nVersion: 1.0\n")
    (toml,) = code(EXTENDING, "toml")
    lines = re.sub(r'\[project\.entry-points\."([\w.]+)"\]', r"[\1]", toml).replace('"', "")
    (described / "entry_points.txt").write_text(lines)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("snippets")
@pytest.mark.parametrize("block", code(EXTENDING, "python"), ids=lambda block: block.split()[1])
def test_snippet_runs(block: str) -> None:
    module: ModuleType = importlib.import_module(block.split()[1].removesuffix(".py"))
    backend = module.backend() if hasattr(module, "backend") else None
    options = module.options() if hasattr(module, "options") else None
    rpc.init_with_store(backend, HashStore(), "alone", 0, 1, options)
    try:
        module.main()
    finally:
        rpc.shutdown()


# ---- troubleshooting.md


def test_messages_that_the_page_explains_are_those_of_the_code() -> None:
    files = [
        ROOT / "farcall_guard.py",
        *(path for name in ("rpc", "rref", "farcall") for path in (ROOT / name).rglob("*.py")),
    ]
    code = re.sub(r'"\s*\n\s*f?"', "", "".join(path.read_text() for path in files)).replace('\\"', '"')
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    firsts = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    messages = [message for first in firsts for message in re.findall(r"`([^`]* [^`]*)`", first)]
    assert messages
    assert [message for message in messages if message not in code] == []
