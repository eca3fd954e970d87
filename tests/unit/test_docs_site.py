"""The documentation's site, as far as that can be seen without building it (``make docs`` builds it)."""

from __future__ import annotations

import re
from pathlib import Path

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


def test_pictures_are_small_and_load_nothing() -> None:
    pictures = sorted((DOCS / "pictures").iterdir())
    assert pictures
    assert sum(path.stat().st_size for path in pictures) < 400_000
    texts = [path.read_text() for path in pictures if path.suffix == ".svg"]
    assert [
        link for text in texts for link in re.findall(r"https?://\S+", text) if "w3.org" not in link
    ] == []


def test_reference_covers_each_public_package() -> None:
    found = {path.stem for path in (DOCS / "api").glob("*.md")} - {"README"}
    assert found == {"rpc", "rref", "dist_autograd", "dist_optim", "spmd"}
    assert all(f"::: {name}\n" in (DOCS / "api" / f"{name}.md").read_text() for name in found)
