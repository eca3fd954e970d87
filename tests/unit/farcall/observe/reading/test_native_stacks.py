"""Stacks by ``py-spy``, of a process whose interpreter is held and of output that is none."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from farcall.observe.reading.native_stacks import NativeStacksError, native_stacks, read_dump, spy_program

HOLDS = """\
import ctypes, threading

def hold():
    ctypes.PyDLL(None).pause()

print("holds", flush=True)
hold()
"""

needs_py_spy = pytest.mark.skipif(spy_program() is None, reason="py-spy is not installed")


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process whose only thread holds the interpreter lock in a C function."""
    program = tmp_path / "holds.py"
    program.write_text(HOLDS)
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "holds\n"
            yield process
        finally:
            process.kill()


@needs_py_spy
def test_thread_that_holds_the_interpreter_is_known_with_its_c_function(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    while True:  # the process may not have come to the call yet
        try:
            (stack,) = native_stacks(holder.pid)
        except NativeStacksError as error:
            if "ermission" in str(error):
                pytest.skip(str(error))
            raise
        if "pause" in stack.native:
            break
    assert stack.holds_interpreter
    assert stack.name == "MainThread"
    assert ("hold", str(tmp_path / "holds.py"), 4) in stack.frames


@needs_py_spy
def test_process_that_has_ended_is_named() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    with pytest.raises(NativeStacksError, match=f"py-spy cannot look at process {process.pid}: "):
        native_stacks(process.pid)


def test_without_py_spy_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(NativeStacksError, match=r"-m pip install 'py-spy"):
        native_stacks(1)


def test_output_that_is_malformed_is_skipped() -> None:
    thread = {"thread_id": 7, "thread_name": "a\x1b", "owns_gil": 1, "frames": [{"name": "f"}, 3]}
    (stack,) = read_dump(json.dumps([5, {"thread_id": "x", "frames": []}, {"thread_id": 3}, thread]))
    assert (stack.thread, stack.name, stack.holds_interpreter) == (7, "a\\x1b", False)
    assert read_dump("{}") == []
    with pytest.raises(NativeStacksError, match="not JSON"):
        read_dump("<html>")
