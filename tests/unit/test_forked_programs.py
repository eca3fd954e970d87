"""A program that is forked behaves as one that Python starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forked_programs import is_possible

pytestmark = pytest.mark.skipif(not is_possible(), reason="programs cannot be forked here")

FACTS = """
import atexit, gc, logging, os, signal, sys, threading, warnings

print(sys.argv, sys.orig_argv[1:], sys.path, __name__, globals().get("__file__"))
print(open("/proc/self/cmdline").read().replace("\\0", " ").strip()[:200])
print(os.getcwd(), dict(os.environ))
print(threading.enumerate() == [threading.main_thread()], threading.get_native_id() == os.getpid())
print(os.getppid(), os.getpgrp(), os.getsid(0), gc.isenabled(), os.path.exists("/proc/self/fd/3"))
print([signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE)])
print(warnings.filters[-4:], logging.root.handlers)
print([(each.encoding, each.errors, each.line_buffering) for each in (sys.stdin, sys.stdout, sys.stderr)])
atexit.register(print, "at the exit")
threading.Timer(0.01, print, ["from a thread"]).start()
print(sys.stdin.read())
raise LookupError("it was not found")
"""

STARTS_OTHERS = """
import multiprocessing, os, subprocess, sys

if __name__ == "__main__":
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getppid())"], capture_output=True)
    assert int(done.stdout) == os.getpid()
    process = multiprocessing.get_context("spawn").Process(target=sys.exit, args=(3,))
    process.start()
    process.join()
    assert process.exitcode == 3
    print("torch" in sys.modules)
"""


def run(folder: Path, *command: str) -> tuple[int, str, str]:
    """Runs Python in a folder; its status, output and errors."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    for name in ("PYTHONUNBUFFERED", "PYTEST_CURRENT_TEST"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, *command],
        check=False,
        cwd=folder,
        env=environment,
        input="from the input",
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


COMMANDS = {"file": ["program.py", "an argument"], "text": ["-c", FACTS, "-x"]}
_afresh: dict[str, tuple[int, str, str]] = {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    (folder / "program.py").write_text(FACTS)
    (folder / "others.py").write_text(STARTS_OTHERS)
    return folder


@pytest.mark.fresh_interpreter
def test_programs_run_afresh_to_compare_with(folder: Path) -> None:
    _afresh.update({name: run(folder, *command) for name, command in COMMANDS.items()})
    assert {status for status, _, _ in _afresh.values()} == {1}
    assert "True" not in run(folder, "others.py")[1]  # PyTorch was not imported, as it was not asked for


@pytest.mark.parametrize("name", COMMANDS)
def test_a_forked_program_sees_prints_and_raises_the_same(folder: Path, name: str) -> None:
    for forked, afresh in zip(run(folder, *COMMANDS[name]), _afresh[name], strict=True):
        assert str(forked).splitlines() == str(afresh).splitlines()


def test_forked_programs_start_others_which_are_children_of_theirs(folder: Path) -> None:
    assert run(folder, "others.py") == (0, "True\n", "")


@pytest.mark.parametrize(
    ("program", "status", "errors"),
    [
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(7)", 7, ""),
        ("raise SystemExit('that is all')", 1, "that is all\n"),
        ("import os; os.kill(os.getpid(), 15)", -15, ""),
        ("import os; os.kill(os.getpid(), 2); os.wait()", -2, "Traceback .*\n  File .*\nKeyboardInterrupt\n"),
        ("import os, atexit; atexit.register(os._exit, 4)", 4, ""),
        ("import os; os.close(1); print(1)", 120, ".*OSError: .*\n"),
    ],
)
def test_a_forked_program_ends_as_python_does(folder: Path, program: str, status: int, errors: str) -> None:
    ended, _, said = run(folder, "-c", program)
    assert ended == status
    assert re.fullmatch(errors, said, re.DOTALL)


def test_a_forked_program_prints_without_buffers(folder: Path) -> None:
    assert run(folder, "-u", "-c", "print(1)") == (0, "1\n", "")


def test_a_module_is_found_in_the_folder_and_one_that_is_not_there_is_named(folder: Path) -> None:
    assert "['-m', 'program']" in run(folder, "-m", "program")[1]
    assert "No module named not_there" in run(folder, "-m", "not_there")[2]
