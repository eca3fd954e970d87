"""The guide's sessions in a terminal run, and print what the pages say.

In a page, a Python block that begins with ``# name.py`` is a file, and a ``console`` block has commands, each
after ``$``, with lines of what it prints. Three dots stand for anything.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.support.programs import run_program

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[3]
README = ROOT / "README.md"
PAGES = sorted(page for page in (ROOT / "docs").glob("*.md") if "```console" in page.read_text())
PROGRAMS = {"farcall": ["-m", "farcall"], "python": []}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def sessions(page: Path) -> list[tuple[str, list[str]]]:
    """Commands, with the lines that they are to print."""
    commands = [each for block in blocks(page, "console") for each in block.split("$ ")[1:]]
    return [(command, said) for command, *said in map(str.splitlines, commands)]


def write_files(page: Path, folder: Path) -> None:
    """Write the page's programs into a folder."""
    for block in blocks(page, "python"):
        name = re.match(r"# (\w+\.py)", block)
        if name:
            (folder / name[1]).write_text(block)


def run_session(command: str, said: list[str], folder: Path) -> None:
    """Run a command in a folder, and assert that it prints these lines."""
    program, *arguments = shlex.split(command)
    done = run_program(folder, "", *PROGRAMS[program], *arguments)
    printed = done.stdout + done.stderr
    missing = [line for line in said if not re.search(as_pattern(line), printed, re.MULTILINE)]
    assert not missing, printed
    assert (done.returncode == 0) is ("failed first" not in printed), printed


def as_pattern(line: str) -> str:
    return "^" + ".*".join(map(re.escape, line.split("..."))) + "$"


@pytest.mark.parametrize(("command", "said"), sessions(README))
def test_a_program_of_the_readme_runs(command: str, said: list[str], tmp_path: Path) -> None:
    write_files(README, tmp_path)
    run_session(command, said, tmp_path)


@pytest.mark.nightly
@pytest.mark.fresh_interpreter
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_of_the_guide_runs(page: Path, tmp_path: Path) -> None:
    write_files(page, tmp_path)
    assert sessions(page)
    for command, said in sessions(page):
        run_session(command, said, tmp_path)
