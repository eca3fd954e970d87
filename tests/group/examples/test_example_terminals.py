"""The examples before somebody's eyes: lines fit a narrow terminal, and Ctrl-C ends them quietly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.group.examples.test_examples import BY_ONE_DRIVER, EXAMPLES, LIST
from tests.support import leftovers
from tests.support.terminal import Terminal

pytestmark = [pytest.mark.processes, pytest.mark.nightly, pytest.mark.timeout(400)]

COLUMNS = 50
SECONDS = 300.0
BAR = "[━╸╺]"

SHORT = {
    "parameter_server": ["--steps", "600"],  # fewer miss the accuracy, which is said in one line
    **{name: example.short for name, example in LIST.items()},
    **{name: arguments for name, (arguments, _) in BY_ONE_DRIVER.items()},
}


def run(name: str, folder: Path) -> Terminal:
    env = (
        os.environ
        | ({} if name in ("elastic", "fsdp") else {"FARCALL_LOG": "error"})  # they kill their own workers
        | {
            "TMPDIR": str(folder),
            "PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), *sys.path]),
        }
    )
    return Terminal([sys.executable, str(EXAMPLES / f"{name}.py"), *SHORT[name]], COLUMNS, env)


@pytest.mark.parametrize("name", SHORT)
def test_no_line_is_wider_than_the_terminal(name: str, tmp_path: Path) -> None:
    with run(name, tmp_path) as terminal:
        terminal.end(SECONDS)
        assert [line for line in terminal.lines if len(line) > COLUMNS] == []


@pytest.mark.parametrize("name", SHORT)
def test_help_fits_the_terminal_except_for_commands(name: str) -> None:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--help"]
    env = os.environ | {"COLUMNS": "80", "PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), *sys.path])}
    lines = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.splitlines()
    assert [line for line in lines if len(line) > 80 and not line.startswith("    ")] == []


@pytest.mark.parametrize("name", SHORT)
def test_ctrl_c_typed_twice_ends_it_without_a_traceback(name: str, tmp_path: Path) -> None:
    with leftovers.nothing_left(), run(name, tmp_path) as terminal:
        assert terminal.read_until(BAR, SECONDS)
        for typed in (1, 2):
            terminal.type("\x03")
            terminal.read_until(rf"(\^C[^^]*){{{typed}}}", SECONDS)
        assert terminal.end(SECONDS) == 130
        assert "Traceback" not in terminal.printed
