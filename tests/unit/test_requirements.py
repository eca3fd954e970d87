"""The versions in ``requirements/`` are not far behind those that ``pip install`` brings."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
INSTALLED_BY_USERS = ("client", "grpc", "metrics", "page", "serve", "stacks")
"""Extras that users install."""
MINOR_VERSIONS = 1
"""How many minor versions a requirement may be behind."""


def dependencies() -> list[str]:
    """The names of the distributions that farcall needs, with its extras for users."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (each for name in INSTALLED_BY_USERS for each in project["optional-dependencies"][name])
    names = (re.split(r"[^\w-]", each)[0] for each in (*project["dependencies"], *extras))
    return sorted({name for name in names if name != "farcall"})


def tried() -> dict[str, tuple[int, ...]]:
    """The newest version of each distribution that a file in ``requirements/`` names."""
    found: dict[str, tuple[int, ...]] = {}
    for path in (ROOT / "requirements").glob("*.txt"):
        for name, version in re.findall(r"^([\w.-]+)==(\S+)", path.read_text(), re.MULTILINE):
            key = normal(name)
            found[key] = max(found.get(key, ()), release(version))
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version, without what marks a build or a preview."""
    match = re.match(r"\d+(\.\d+)*", version)
    assert match is not None, version
    return tuple(map(int, match[0].split(".")))


def is_behind(mine: tuple[int, ...], newest: tuple[int, ...]) -> bool:
    """Whether a version is behind by a major version, or by more than ``MINOR_VERSIONS`` minor ones."""
    (major, minor), (their_major, their_minor) = ((*each, 0, 0)[:2] for each in (mine, newest))
    return major < their_major or (major == their_major and minor < their_minor - MINOR_VERSIONS)


def newest_of(name: str) -> tuple[int, ...] | None:
    """The newest version in the index; None if the index does not answer."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "index", "versions", name],
        capture_output=True,
        text=True,
        check=False,
    )
    match = re.search(rf"^{re.escape(name)} \((\S+)\)", done.stdout, re.MULTILINE | re.IGNORECASE)
    return release(match[1]) if match else None


def test_every_dependency_has_a_version_that_was_tried() -> None:
    missing = [name for name in dependencies() if normal(name) not in tried()]
    assert not missing


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_requirements_are_not_far_behind_the_index() -> None:
    offered = {name: newest_of(name) for name in dependencies()}
    if not any(offered.values()):
        pytest.skip("the index does not answer")
    versions = tried()
    behind = {
        name: (".".join(map(str, versions[normal(name)])), ".".join(map(str, newest)))
        for name, newest in offered.items()
        if newest is not None and is_behind(versions[normal(name)], newest)
    }
    assert not behind, "run `make test-newest`, mend what fails, and name the new versions in requirements/"
