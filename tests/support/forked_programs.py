"""Python programs that tests start: forked from a process that has imported PyTorch, not started afresh.

To start Python and to import PyTorch takes seconds of processor time, and a fork takes milliseconds. While
:meth:`ProgramServer.install` holds, a command of ``subprocess`` or of ``multiprocessing`` that runs this
interpreter becomes a request to a server, which forks. The program is a child of the process that asked, so
signals, process groups, waiting and exit statuses are the kernel's own; it has the arguments, environment,
folder and descriptors of the command, a ``__main__`` of its own, and a server for programs that it starts in
turn. What differs: modules are imported already, its stack begins in pytest, and it ends without taking the
interpreter apart. Tests that are about any of this are marked ``fresh_interpreter``.

A command that asks for more than is imitated here (options such as ``-X``, variables such as ``PYTHONHOME``,
``preexec_fn``) starts afresh, as does every command on other machines than Linux on x86-64 and ARM.
"""

from __future__ import annotations

import _posixsubprocess
import atexit
import builtins
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import io
import json
import logging
import multiprocessing.process
import multiprocessing.util
import os
import platform
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import BuiltinImporter, SourceFileLoader
from typing import Any, AnyStr, Final, NoReturn

from tests.support.fork_server import die_with_parent
from tests.support.leftovers import SERVERS

__all__ = ["ProgramServer", "is_possible"]

_CLONE: Final = {"x86_64": 56, "aarch64": 220}.get(platform.machine(), 0)
_CLONE_PARENT: Final = 0x00008000
_CLONE_CHILD_CLEARTID: Final = 0x00200000
_CLONE_CHILD_SETTID: Final = 0x01000000
_PR_GET_TID_ADDRESS: Final = 40
_FIRST_FREE: Final = 512  # number of descriptors that are put aside
_LARGEST: Final = 100_000  # bytes of a request, which the kernel's usual limit for a socket must hold
_IMITATED: Final = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE")
_HANDLED: Final = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_PYTHON: Final = sys.executable  # which tests replace
_libc: Final = ctypes.PyDLL(None, use_errno=True)


@dataclass(frozen=True)
class _Command:
    """A command line of Python that can be imitated.

    Attributes:
        kind: ``"-c"``, ``"-m"`` or ``""``, for a file.
        target: the program's text, module or path.
        arguments: the program's own.
        isolated: whether Python is told ``-I``.
        unbuffered: whether it is told ``-u``.
    """

    kind: str
    target: str
    arguments: list[str]
    isolated: bool
    unbuffered: bool

    @classmethod
    def parse(cls, command: Sequence[str], folder: str) -> _Command | None:
        """The command as it runs in a folder, or None if it has to start afresh."""
        rest, options = list(command[1:]), set()
        while rest and rest[0] in ("-I", "-u", "-B"):
            options.add(rest.pop(0))
        if not rest:
            return None
        kind = rest.pop(0) if rest[0] in ("-c", "-m") else ""
        if not rest or not (
            kind or (rest[0].endswith(".py") and os.path.isfile(os.path.join(folder, rest[0])))
        ):
            return None
        return cls(kind, rest[0], rest[1:], "-I" in options, "-u" in options)


@dataclass(frozen=True)
class _Request:
    """A program to fork: what ``subprocess`` would tell the kernel.

    Attributes:
        command: the command line.
        folder: where it runs.
        environment: all of its variables.
        descriptors: the numbers that the descriptors sent along have in it.
        own_session: whether it leads a session.
        group: its process group; 0 for one of its own.
        ignored: signals that it ignores from the beginning.
        blocked: signals that it blocks.
        umask: of files that it makes.
    """

    command: list[str]
    folder: str
    environment: dict[str, str]
    descriptors: list[int]
    own_session: bool
    group: int
    ignored: list[int]
    blocked: list[int]
    umask: int


def is_possible() -> bool:
    """Whether a process can have children for another here."""
    return bool(_CLONE and _tid_address())


class ProgramServer:
    """A process that forks programs for the process that has started it, whose threads may all ask.

    Attributes:
        enabled: whether commands are forked; otherwise they start afresh.
    """

    def __init__(self, pid: int, requests: socket.socket) -> None:
        self.pid = pid
        self.enabled = True
        self._owner = os.getpid()
        self._requests = requests
        self._environment = dict(os.environ)

    @classmethod
    def start(cls, modules: Sequence[str] = ()) -> ProgramServer | None:
        """Forks the server. Call it while this process has one thread only.

        Args:
            modules: what it imports before its first fork.

        Returns:
            The server, or None where a process cannot have children for another.
        """
        if not is_possible():
            return None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            _serve(theirs.detach(), modules)
        theirs.close()
        SERVERS.add(pid)
        above = fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE)  # the low numbers are the program's
        ours.close()
        return cls(pid, socket.socket(fileno=above))

    def install(self) -> None:
        """From now on, commands of this process that run Python are forked."""
        start_afresh = _posixsubprocess.fork_exec

        def fork_exec(*given: Any) -> int:
            pid = self._fork(*given)
            return start_afresh(*given) if pid is None else pid

        _posixsubprocess.fork_exec = fork_exec  # what multiprocessing calls
        subprocess._fork_exec = fork_exec  # type: ignore[attr-defined]

    def stop(self) -> None:
        """Ends the server, whatever else has inherited its socket; programs go on."""
        self._requests.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def _fork(
        self,
        args: Sequence[AnyStr],
        executables: Sequence[AnyStr],
        close_fds: bool,
        kept: Sequence[int],
        folder: AnyStr | None,
        variables: Sequence[bytes] | None,
        stdin: int,
        _parents_stdin: int,
        _parents_stdout: int,
        stdout: int,
        _parents_stderr: int,
        stderr: int,
        _errors: int,
        errors: int,
        _restore_signals: bool,
        own_session: bool,
        group: int,
        *others: Any,
    ) -> int | None:
        """Forks a program; returns its process id, or None if it has to start afresh."""
        if not self.enabled or os.getpid() != self._owner or os.fsdecode(executables[0]) != _PYTHON:
            return None
        if not close_fds or any(each not in (None, -1, True, False) for each in others):  # a user, preexec_fn
            return None
        environment = dict(os.environ) if variables is None else _environment(variables)
        path = os.path.abspath(os.getcwd() if folder is None else os.fsdecode(folder))
        command = [os.fsdecode(each) for each in args]
        if self._is_odd(environment) or _Command.parse(command, path) is None or not os.access(path, os.X_OK):
            return None
        streams = enumerate((stdin, stdout, stderr))
        sent: dict[int, int] = {number: number if each == -1 else each for number, each in streams}
        sent |= {number: number for number in kept if number != errors}
        sent = {number: each for number, each in sent.items() if _is_open(each)}
        os.umask(umask := os.umask(0))
        request = _Request(
            command,
            path,
            environment,
            list(sent),
            bool(own_session),
            os.getpgrp() if group == -1 else group,
            [each for each in _HANDLED if signal.getsignal(each) is signal.SIG_IGN],
            [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            umask,
        )
        data = json.dumps(asdict(request)).encode()
        if len(data) > _LARGEST:
            return None
        answer, theirs = socket.socketpair()
        with answer, theirs:
            socket.send_fds(self._requests, [data], [theirs.fileno(), *sent.values()])
            theirs.close()
            pid = answer.recv(64)
        if not pid:
            raise OSError("the server of programs could not fork: its complaint is on standard error")
        return int(pid)

    def _is_odd(self, environment: Mapping[str, str]) -> bool:
        """Whether it has variables that Python reads when it starts, and that the server was not given."""
        return any(
            name.startswith(("PYTHON", "LD_"))
            and name not in _IMITATED
            and self._environment.get(name) != value
            for name, value in environment.items()
        )


def _environment(variables: Sequence[bytes]) -> dict[str, str]:
    pairs = (os.fsdecode(each).partition("=") for each in variables)
    return {name: value for name, _, value in pairs}


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


# ---- in the server


def _serve(requests: int, modules: Sequence[str]) -> NoReturn:
    """Forks what is asked for, until there is no one left to ask."""
    try:
        die_with_parent()
        for ignored in _HANDLED:  # a signal for the whole group is for the programs
            signal.signal(ignored, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        faulthandler.disable()
        errors, requests = (fcntl.fcntl(each, fcntl.F_DUPFD, _FIRST_FREE) for each in (2, requests))
        _close_all_but([errors, requests])
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in (1, 2):
            os.dup2(errors if number == 2 else nowhere, number)
        os.close(errors)
        channel = socket.socket(fileno=requests)
        while True:
            data, descriptors, _, _ = socket.recv_fds(channel, _LARGEST, 250)
            if not data:
                os._exit(0)
            for module in modules:
                importlib.import_module(module)
            gc.freeze()  # a collection in a program need not touch, and so copy, the server's pages
            pid = _clone()
            if pid == 0:
                _become_program(_Request(**json.loads(data)), descriptors[1:])
            os.write(descriptors[0], str(pid).encode())
            for each in descriptors:
                os.close(each)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(1)


def _tid_address() -> int:
    """Where the C library keeps the number of this thread, which a new process has to correct; 0: unknown."""
    address = ctypes.c_void_p()
    _libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0)
    return address.value or 0


def _clone() -> int:
    """``os.fork``, but the new process is a child of this one's parent."""
    address = _tid_address()
    flags = _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID | signal.SIGCHLD
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = int(_libc.syscall(*map(ctypes.c_long, (_CLONE, flags, 0, 0, address, address))))
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return pid


def _close_all_but(kept: Sequence[int]) -> None:
    first = 0
    for each in sorted(kept):
        if first < each:  # an empty range from 0 is taken for all
            os.closerange(first, each)
        first = each + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))


# ---- in the program


def _become_program(request: _Request, received: Sequence[int]) -> NoReturn:
    try:
        command = _Command.parse(request.command, request.folder)
        assert command is not None
        if request.own_session:
            os.setsid()
        else:
            with contextlib.suppress(OSError):  # the group is gone
                os.setpgid(0, request.group)
        _take_descriptors(request.descriptors, received)
        if not command.isolated and (server := ProgramServer.start()) is not None:
            server.install()
        os.chdir(request.folder)
        _forget_the_server()
        _take_signals(request)
        os.umask(request.umask)
        os.environ.clear()
        os.environ.update(request.environment)
        _show(request.command)
        time.tzset()
        _take_threads(request.environment)
        _take_paths(command)
        _open_streams(command.unbuffered or bool(request.environment.get("PYTHONUNBUFFERED")))
        sys.orig_argv[:] = request.command
        _end(_run(command))
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(1)


def _take_descriptors(wanted: Sequence[int], received: Sequence[int]) -> None:
    above = max([_FIRST_FREE, *(each + 1 for each in wanted)])
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, above) for each in received]
    for target, each in zip(wanted, moved, strict=True):
        os.dup2(each, target)
    _close_all_but(wanted)


def _take_signals(request: _Request) -> None:
    for number in _HANDLED:
        signal.signal(number, signal.SIG_IGN if number in request.ignored else signal.SIG_DFL)
    if signal.SIGINT not in request.ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)


def _show(command: Sequence[str]) -> None:
    """Has ``/proc`` show the command line, in place of what lies where the kernel reads it: arguments, and
    variables, which have been copied.
    """
    with open("/proc/self/stat") as stat:
        start, room, _, end = map(int, stat.read().rpartition(")")[2].split()[45:49])
    text = os.fsencode("\0".join(command))
    if len(text) >= room - start:  # the kernel then takes it for one string, of any length
        text = text.replace(b"\0", b" ")[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def _take_threads(environment: Mapping[str, str]) -> None:
    """PyTorch reads the number of threads when it is loaded, which it is."""
    if torch := sys.modules.get("torch"):
        threads = environment.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))
        if torch.get_num_threads() != int(threads):
            torch.set_num_threads(int(threads))


def _take_paths(command: _Command) -> None:
    archive = f"python{sys.version_info[0]}{sys.version_info[1]}.zip"  # the first of Python's own
    own = next(number for number, path in enumerate(sys.path) if path.endswith(archive))
    asked = [] if command.isolated else os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [*(os.path.abspath(path) for path in asked if path), *sys.path[own:]]
    first = {"-c": "", "-m": os.getcwd(), "": os.path.dirname(os.path.realpath(command.target))}[command.kind]
    sys.path[:] = [*([] if command.isolated else [first]), *dict.fromkeys(paths)]
    importlib.invalidate_caches()


def _forget_the_server() -> None:
    """Puts back what pytest and the server have changed in this interpreter."""
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    sys.meta_path[:] = [each for each in sys.meta_path if not type(each).__module__.startswith("_pytest")]
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    if backend := sys.modules.get("rpc.lifecycle.own_backend"):
        atexit.register(backend._leave_at_exit)  # which it does on import
    atexit.register(logging.shutdown)
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    logging.root.handlers.clear()
    vars(multiprocessing.process)["ORIGINAL_DIR"] = os.getcwd()
    tempfile.tempdir = None
    warnings.resetwarnings()
    for category in (ResourceWarning, ImportWarning, PendingDeprecationWarning, DeprecationWarning):
        warnings.simplefilter("ignore", category)
    warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    gc.enable()


def _open_streams(unbuffered: bool) -> None:
    first = sys.__stdin__  # has what the locale asks for
    encoding, errors = (first.encoding, first.errors) if first else ("utf-8", "strict")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = None
        if _is_open(number):
            raw = io.FileIO(number, "w" if number else "r", closefd=False)
            direct = unbuffered and number > 0
            stream = io.TextIOWrapper(
                raw if direct else io.BufferedWriter(raw) if number else io.BufferedReader(raw),
                encoding=encoding,
                errors="backslashreplace" if number == 2 else errors,
                line_buffering=number == 2 or raw.isatty(),
                write_through=direct,
            )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(command: _Command) -> int | None:
    """Runs it as ``__main__``; returns its exit status, or None after a Ctrl-C."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    sys.argv[:] = [command.kind or command.target, *command.arguments]
    try:
        if command.kind == "-m":
            runpy._run_module_as_main(command.target)  # type: ignore[attr-defined]
        elif command.kind == "-c":
            vars(main)["__loader__"] = BuiltinImporter
            exec(compile(command.target, "<string>", "exec"), vars(main))
        else:
            path = os.path.abspath(command.target)
            loader = SourceFileLoader("__main__", path)
            vars(main).update(__file__=path, __loader__=loader, __cached__=None)
            exec(compile(loader.get_data(path), path, "exec"), vars(main))
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return int(end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, frames
        setattr(sys, "last_exc", error)  # noqa: B010  # of Python 3.12 and newer
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        return None if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _end(status: int | None) -> NoReturn:
    """Ends as Python does, except that modules and objects are not taken apart."""
    for what in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        try:
            what()
        except BaseException:
            traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError:
            status = 120
            traceback.print_exc()
    if status is None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status or 0)
