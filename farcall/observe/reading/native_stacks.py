"""Stacks of a living process from ``py-spy``: also frames of C and C++, and the thread that holds the
interpreter lock. ``py-spy`` is optional (the extra ``stacks``), and the process need not run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any, Final

from farcall.extras import install_command
from farcall.observe.format.frozen_stacks import Stack
from farcall.observe.format.legible import legible

__all__ = ["NativeStacksError", "is_native", "native_stacks", "read_dump", "spy_program"]

_SECONDS: Final = 30.0
"""Maximum time in seconds that ``py-spy`` may take for one process."""

_MAX_FRAMES: Final = 200
"""Maximum number of frames of a thread."""

_NATIVE_SUFFIXES: Final = (".so", ".c", ".cc", ".cpp", ".cxx", ".h", ".hpp", ".s", ".rs", ".pyx", ".cu")
"""Suffixes of the names of libraries, and of sources that are compiled."""


class NativeStacksError(OSError):
    """``py-spy`` is not installed, or cannot read a process."""


def spy_program() -> str | None:
    """Return the path of the program: on the path, or installed beside this interpreter; None if it is not
    installed.
    """
    return shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable))


def native_stacks(process: int, *, seconds: float = _SECONDS) -> list[Stack]:
    """Return the stacks of all threads of a process that run Python code.

    Raises:
        NativeStacksError: they are not available; the text has the reason.
    """
    program = spy_program()
    if program is None:
        raise NativeStacksError(f"py-spy is not installed: {install_command('stacks')}")
    command = [program, "dump", "--native", "--json", "--full-filenames", "--pid", str(process)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as error:
        raise NativeStacksError(f"py-spy took more than {seconds:.0f} s for process {process}") from error
    if done.returncode:
        reason = next((line for line in done.stderr.splitlines() if line.strip()), "it says nothing")
        raise NativeStacksError(f"py-spy cannot look at process {process}: {legible(reason)}")
    return read_dump(done.stdout)


def read_dump(text: str) -> list[Stack]:
    """Parse the output of ``py-spy dump --json``; anything else is skipped."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NativeStacksError("the output of py-spy is not JSON") from error
    stacks = [_stack(each) for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    return [each for each in stacks if each is not None]


def _stack(thread: dict[str, Any]) -> Stack | None:
    ident, frames = thread.get("thread_id"), thread.get("frames")
    if not isinstance(ident, int) or not isinstance(frames, list):
        return None
    places = [_place(each) for each in frames[:_MAX_FRAMES] if isinstance(each, dict)]
    name = thread.get("thread_name")
    return Stack(
        ident,
        tuple(places),
        name=legible(name) if isinstance(name, str) else "",
        holds_interpreter=thread.get("owns_gil") is True,
        native=_innermost_in_c(places),
    )


def _place(frame: dict[str, Any]) -> tuple[str, str, int]:
    name, file, line = frame.get("name"), frame.get("filename"), frame.get("line")
    return legible(str(name)), legible(str(file)), line if isinstance(line, int) else 0


def _innermost_in_c(places: list[tuple[str, str, int]]) -> tuple[str, ...]:
    """Return the names of the functions in C that a thread is in, inside its innermost Python frame."""
    names: list[str] = []
    for name, file, _ in places:
        if not is_native(file):
            break
        if not name.startswith("0x"):
            names.append(name)
    return tuple(names)


def is_native(file: str) -> bool:
    """Whether code of this file is not written in Python."""
    return ".so." in file or file.endswith(_NATIVE_SUFFIXES)
