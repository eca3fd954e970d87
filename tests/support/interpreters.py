"""Python processes that tests start, made by a fork of a process that has imported PyTorch already.

After ``start_by``, ``subprocess`` and ``multiprocessing`` start ``sys.executable`` in this way where
nothing depends on a fresh interpreter: with a script, ``-c`` or ``-m``, and no option of Python's own but
``-I``. The process is a child of the one that starts it, with its arguments, environment, folder and
descriptors, and what it starts in turn is made by a fork as well. It has more modules than it has imported,
and ends without Python's finalization: a test for which that matters is marked ``fresh_interpreter``.
"""

from __future__ import annotations

import _posixsubprocess
import atexit
import contextlib
import contextvars
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import importlib.machinery
import io
import multiprocessing.process
import multiprocessing.util
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, NoReturn

__all__ = ["Fork", "Program", "run", "start_by", "take_terminal"]

_FORK_EXEC: Final[Callable[..., int]] = _posixsubprocess.fork_exec
_PYTHON: Final = sys.executable
_HARMLESS: Final = ("PYTHONPATH", "PYTHONUNBUFFERED")
_PATH: Final = [
    each for each in sys.path if each.startswith((sys.base_prefix, sys.prefix)) or "site-packages" in each
]
"""What is installed: an environment may have another one's packages, too."""


@dataclass(frozen=True)
class Program:
    """What a process runs.

    Attributes:
        arguments: after the interpreter's name.
        environ: all of its environment.
        folder: where it runs.
        session: whether it leads a session of its own.
        group: its process group, as ``subprocess`` has it.
        terminal: whether its standard input becomes the terminal of its session.
        numbers: what its descriptors are called in it.
    """

    arguments: Sequence[str]
    environ: Mapping[str, str]
    folder: str
    session: bool
    group: int
    terminal: bool
    numbers: Sequence[int]


Fork = Callable[[Program, Sequence[int]], int]
"""Makes a process that calls ``run`` with its arguments; returns its process id."""


@dataclass
class _Starts:
    """How the process with this id starts interpreters: by ``fork``, while it is there."""

    pid: int = 0
    fork: Fork | None = None


_starts: Final = _Starts()


def start_by(fork: Fork | None) -> None:
    """Have starts of interpreters made by ``fork``; as ever if it is None."""
    _starts.pid, _starts.fork = os.getpid(), fork
    subprocess._fork_exec = _posixsubprocess.fork_exec = _start  # type: ignore[attr-defined, assignment]


def take_terminal() -> None:
    """For ``preexec_fn`` of a process that leads a session: its standard input is the terminal of that."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _start(
    arguments: Sequence[Any],
    executables: Sequence[Any],
    close_others: bool,
    kept: Sequence[int],
    folder: Any,
    environ: Sequence[bytes] | None,
    *rest: Any,
) -> int:
    ends, others = rest[:8], rest[8:]
    pipe = ends[-1]
    session, group = others[1], others[2]
    variables = {**os.environ}
    if environ is not None:
        variables = dict(os.fsdecode(each).split("=", 1) for each in environ)
    words = [os.fsdecode(each) for each in arguments[1:]]
    while words[:1] == ["-B"]:  # as this process has it
        del words[0]
    plain = [os.fsdecode(each) for each in executables] == [_PYTHON] and close_others
    plain = plain and others[3:7] == (None, None, None, -1)
    plain = plain and others[7] in (None, take_terminal)
    where = os.getcwd() if folder is None else os.path.abspath(os.fsdecode(folder))
    fork = _starts.fork if _starts.pid == os.getpid() else None  # not a child's, which has no server
    if fork is None or not (plain and os.path.isdir(where) and _is_plain(words, variables, where)):
        return _FORK_EXEC(arguments, executables, close_others, kept, folder, environ, *rest)
    streams = [ours if ours >= 0 else number for number, ours in enumerate((ends[0], ends[3], ends[5]))]
    passed = [each for each in kept if each != pipe]
    terminal = others[7] is take_terminal
    program = Program(words, variables, where, bool(session), group, terminal, [0, 1, 2, *passed])
    return fork(program, [*streams, *passed])


def _is_plain(words: Sequence[str], environ: Mapping[str, str], folder: str) -> bool:
    unusual = [
        name
        for name, value in environ.items()
        if name.startswith("PYTHON") and name not in _HARMLESS and os.environ.get(name) != value
    ]
    if unusual or not words or threading.current_thread() is not threading.main_thread():
        return False
    if words[0] in ("-c", "-m"):
        return len(words) > 1
    script = words[len(words) > 1 and words[0] == "-I"]
    return script.endswith(".py") and os.path.isfile(os.path.join(folder, script))


def _fork_here(program: Program, descriptors: Sequence[int]) -> int:
    pid = os.fork()
    if pid == 0:
        run(program, descriptors)
    return pid


# ---- in the new process


def run(program: Program, descriptors: Sequence[int]) -> NoReturn:
    """Make this process, which has been forked, what the program is run in, run it, and end.

    Args:
        program: what to run.
        descriptors: what become its descriptors, in the order of ``program.numbers``.
    """
    status = 1
    try:
        gc.freeze()  # what was the parent's is never closed
        if program.session:
            os.setsid()
        elif program.group >= 0:
            os.setpgid(0, program.group)
        os.chdir(program.folder)
        _take_descriptors(program.numbers, descriptors)
        if program.terminal:
            take_terminal()
        _reset_signals()
        _reset_modules(program)
        _show(program.arguments)
        start_by(_fork_here)
        status = contextvars.Context().run(_run_to_its_end, program.arguments)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        if status == -signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(status)


def _show(arguments: Sequence[str]) -> None:
    """Have ``/proc`` show this command line, over the one of the process that has been forked, and over its
    first environment, which is not in use any more.
    """
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[48])
    shown = " ".join([_PYTHON, *arguments]).encode()
    ctypes.memmove(begin, shown.ljust(end - begin, b"\0")[: end - begin - 1], end - begin - 1)


def _take_descriptors(numbers: Sequence[int], descriptors: Sequence[int]) -> None:
    above = max(*numbers, *descriptors) + 1
    copies = [fcntl.fcntl(each, fcntl.F_DUPFD, above) for each in descriptors]
    for number, copy in zip(numbers, copies, strict=True):
        os.dup2(copy, number)
    for each in os.listdir("/proc/self/fd"):
        if int(each) not in numbers:
            with contextlib.suppress(OSError):
                os.close(int(each))


def _reset_signals() -> None:
    faulthandler.disable()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _reset_modules(program: Program) -> None:
    os.environ.clear()
    os.environ.update(program.environ)
    tempfile.tempdir = None
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    multiprocessing.process._children = set()  # type: ignore[attr-defined]
    multiprocessing.process.ORIGINAL_DIR = program.folder  # type: ignore[attr-defined]
    atexit._clear()
    if backend := sys.modules.get("rpc.lifecycle.own_backend"):
        atexit.register(backend._leave_at_exit)  # which it does on import
    sys.excepthook, threading.excepthook = sys.__excepthook__, threading.__excepthook__
    sys.unraisablehook, sys.displayhook = sys.__unraisablehook__, sys.__displayhook__
    now = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    sys.stdout = _writer(1, "strict", now=now, line_buffering=os.isatty(1))
    sys.stderr = _writer(2, "backslashreplace", now=now, line_buffering=True)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    added = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:] = [*map(os.path.abspath, added), *_PATH]
    sys.modules.pop("__mp_main__", None)
    importlib.invalidate_caches()


def _writer(number: int, errors: str, *, now: bool, line_buffering: bool) -> io.TextIOWrapper:
    raw: Any = io.FileIO(number, "w", closefd=False)
    file = raw if now else io.BufferedWriter(raw)
    return io.TextIOWrapper(file, errors=errors, line_buffering=line_buffering, write_through=now)


def _run_to_its_end(arguments: Sequence[str]) -> int:
    try:
        status = _status_of(lambda: _run_main(arguments))
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    return status


def _run_main(arguments: Sequence[str]) -> None:
    first, *rest = arguments
    sys.orig_argv[:] = [_PYTHON, *arguments]
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __spec__=None)
    sys.modules["__main__"] = main
    if first == "-m":
        sys.argv[:] = ["-m", *rest[1:]]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif first == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        if first == "-I":
            first, *rest = rest
        else:
            sys.path.insert(0, os.path.dirname(os.path.realpath(first)))
        sys.argv[:] = [first, *rest]
        path = os.path.abspath(first)
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        vars(main).update(__file__=path, __cached__=None, __loader__=loader)
        exec(loader.source_to_code(loader.get_data(path), path), vars(main))


def _status_of(function: Callable[[], None]) -> int:
    """Calls a function as Python runs a program; returns the exit status, or ``-SIGINT``."""
    try:
        function()
    except SystemExit as end:
        if isinstance(end.code, int):
            return end.code & 0xFF
        if end.code is not None:
            print(end.code, file=sys.stderr)
        return int(end.code is not None)
    except BaseException as error:
        trace = _of_program(error.__traceback__)
        error.with_traceback(trace)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error, trace)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _of_program(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace
