"""A process that forks the tests' workers: PyTorch imported, one thread, nothing else going on.

Forking makes a worker in milliseconds where starting Python and importing PyTorch takes seconds, but only
a process without threads can be forked safely, and pytest's own has some as soon as one test starts an
agent in it. So the session forks this server first of all, while it is one bare thread, and asks it for
workers later. The server imports what workers need (once), forks, reaps, and tells how each one ended.

The two talk over a socket pair, one JSON object to a line: requests with descriptors attached one way
(``{"modules": [...]}``, with a ``"program"`` where that is to be run in place of a worker), and the other
way ``{"forked": pid}`` and ``{"exited": pid, "status": n}``. If the session goes away, however it does, the
server kills every worker and leaves.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import io
import json
import os
import resource
import selectors
import signal
import socket
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, NoReturn

from tests.support import interpreters
from tests.support.interpreters import Program
from tests.support.leftovers import SERVERS

WorkerMain = Callable[[int], int]
"""What runs in a forked worker: it gets the descriptor of its channel and returns an exit status."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class ForkServerError(RuntimeError):
    """The fork server could not do what it was asked, or is gone."""


class ForkServer:
    """The session's end of the fork server. One thread uses it, pytest's main thread.

    Example::

        server = ForkServer.start(worker_main)
        pid = server.fork(channel.fileno(), log.fileno(), modules=["torch"])
    """

    def __init__(self, pid: int, commands: socket.socket) -> None:
        self.pid = pid
        self._commands = commands
        self._unread = b""
        self._statuses: dict[int, int] = {}

    @classmethod
    def start(cls, worker_main: WorkerMain) -> ForkServer:
        """Forks the server. Call it while this process has one thread only."""
        mine, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            mine.close()
            _Server(theirs, worker_main).run()
        theirs.close()
        SERVERS.add(pid)
        return cls(pid, mine)

    def fileno(self) -> int:
        """Readable when there is news of a worker's end; see :meth:`read_news`."""
        return self._commands.fileno()

    def warm_up(self, modules: Sequence[str]) -> None:
        """Has the server import modules in the background; what cannot be imported is skipped."""
        self._request({"modules": list(modules), "fork": False}, [])

    def fork(self, channel: int, log: int, modules: Sequence[str] = ()) -> int:
        """Makes a worker and returns its process id.

        Args:
            channel: descriptor handed to ``worker_main``.
            log: descriptor that becomes the worker's standard output and error.
            modules: imported in the server first, so that later workers have them already.

        Raises:
            ForkServerError: the server is gone, or an import left threads behind in it.
        """
        return self._forked({"modules": list(modules), "fork": True}, [channel, log])

    def fork_program(self, program: Program, descriptors: Sequence[int], modules: Sequence[str] = ()) -> int:
        """Makes a child of this very process that runs a program; returns its process id.

        Args:
            program: what it runs.
            descriptors: its descriptors.
            modules: imported in the server first.
        """
        return self._forked({"modules": list(modules), "program": asdict(program)}, list(descriptors))

    def _forked(self, request: dict[str, Any], descriptors: list[int]) -> int:
        self._request(request, descriptors)
        while True:
            for message in self._receive():
                if "forked" in message:
                    return int(message["forked"])
                if "refused" in message:
                    raise ForkServerError(message["refused"])

    def read_news(self) -> None:
        """Takes in how workers ended. Blocks unless :meth:`fileno` is readable."""
        self._receive()

    def exit_status(self, pid: int) -> int | None:
        """How a worker ended: its exit status, or minus the signal's number; ``None`` if it runs."""
        return self._statuses.get(pid)

    def stop(self) -> None:
        """Ends the server and whatever it has forked, and waits for it."""
        self._commands.close()
        os.waitpid(self.pid, 0)

    def _request(self, request: dict[str, Any], descriptors: list[int]) -> None:
        try:
            socket.send_fds(self._commands, [json.dumps(request).encode() + b"\n"], descriptors)
        except OSError as error:
            raise ForkServerError("the fork server is gone, and all workers with it") from error

    def _receive(self) -> list[dict[str, Any]]:
        data = self._commands.recv(65536)
        if not data:
            raise ForkServerError("the fork server is gone, and all workers with it")
        *lines, self._unread = (self._unread + data).split(b"\n")
        messages = [json.loads(line) for line in lines]
        for message in messages:
            if "forked" in message:
                self._statuses.pop(message["forked"], None)  # of an earlier worker with the same number
            elif "exited" in message:
                self._statuses[message["exited"]] = message["status"]
        return messages


class _Server:
    """The server's side: one thread, one loop."""

    def __init__(self, commands: socket.socket, worker_main: WorkerMain) -> None:
        self._commands = commands
        self._worker_main = worker_main
        self._workers: set[int] = set()
        self._unread = b""
        self._descriptors: list[int] = []

    def run(self) -> NoReturn:
        status = 1
        try:
            self._prepare()
            with contextlib.suppress(ConnectionError):
                self._serve()
            status = 0
        except BaseException:
            with contextlib.suppress(OSError):
                self._reply({"refused": traceback.format_exc()})
        finally:
            for pid in self._workers:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            os._exit(status)

    def _prepare(self) -> None:
        os.setsid()  # a Ctrl-C at the terminal is for pytest, which then ends this process in order
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        become_subreaper()
        atexit._clear()  # what pytest's process does at its exit is not for its children to do
        if backend := sys.modules.get("rpc.lifecycle.own_backend"):
            atexit.register(backend._leave_at_exit)  # which it does on import
        self._wake, wake_writer = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake_writer, False)
        self._wake_writer = wake_writer
        signal.set_wakeup_fd(wake_writer)

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._commands, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._wake in ready:
                    self._reap()
                if self._commands in ready and not self._read_commands():
                    return

    def _read_commands(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._commands, 65536, 64)
        if not data:
            return False
        self._descriptors += descriptors
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            complaint = _import_all(request["modules"])
            if points := sys.modules.get("rpc.entry_points"):  # each worker would read them anew
                for group in ("farcall.extensions", "farcall.transports"):
                    points.entry_points(group)
            if program := request.get("program"):
                self._fork_program(Program(**program))
            elif request["fork"]:
                self._fork(complaint)
        return True

    def _fork(self, complaint: str) -> None:
        channel, log = self._descriptors[:2]
        del self._descriptors[:2]
        if complaint:
            self._reply({"refused": complaint})
        else:
            gc.freeze()  # a collection in a worker need not touch, and so copy, the server's pages
            pid = os.fork()
            if pid == 0:
                self._become_worker(channel, log)
            self._workers.add(pid)
            with contextlib.suppress(OSError):  # the worker does the same: whoever is first
                os.setpgid(pid, pid)
            self._reply({"forked": pid})
        os.close(channel)
        os.close(log)

    def _fork_program(self, program: Program) -> None:
        """Forks a child of the session's process, which adopts it: this one does not while it starts it."""
        descriptors = self._descriptors[: len(program.numbers)]
        del self._descriptors[: len(program.numbers)]
        gc.freeze()
        news, end = os.pipe()
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)
        between = os.fork()
        if between == 0:
            if pid := os.fork():
                os.write(end, str(pid).encode())
                os._exit(0)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            interpreters.run(program, descriptors)
        os.waitpid(between, 0)
        become_subreaper()
        self._reply({"forked": int(os.read(news, 20))})
        for each in (news, end, *descriptors):
            os.close(each)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake, 4096):
                pass
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                self._workers.discard(pid)
                self._reply({"exited": pid, "status": os.waitstatus_to_exitcode(status)})

    def _reply(self, message: dict[str, Any]) -> None:
        self._commands.sendall(json.dumps(message).encode() + b"\n")

    def _become_worker(self, channel: int, log: int) -> NoReturn:
        status = 1
        try:
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
            die_with_parent()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for descriptor in (self._commands.detach(), self._wake, self._wake_writer):
                os.close(descriptor)
            weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # the server's, as its exit handlers
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            with _output_to(log):
                try:
                    status = self._worker_main(channel)
                    threading._shutdown()  # type: ignore[attr-defined]  # as at the end of a program:
                    atexit._run_exitfuncs()  # threads are joined first, then exit handlers run
                except BaseException:
                    traceback.print_exc()
                    status = 1
        finally:
            os._exit(status)


def _import_all(modules: Sequence[str]) -> str:
    """Imports modules; returns what is wrong with them, or an empty string.

    That a module cannot be imported is left for the worker to find, where it has a test to tell it to.
    """
    before = threading.active_count()
    for name in modules:
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
            if threading.active_count() > before:
                started = ", ".join(thread.name for thread in threading.enumerate()[before:])
                return f"importing {name} started threads ({started}); a module must do nothing on import"
    return ""


@contextlib.contextmanager
def _output_to(log: int) -> Iterator[None]:
    """Standard output, error and crash reports go to the log's descriptor."""
    nowhere = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nowhere, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(nowhere)
    os.close(log)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), write_through=True)
    faulthandler.enable(file=2, all_threads=True)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def become_subreaper() -> None:
    """Orphans among this process's descendants become its children, so none escapes (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """This process is killed when its parent ends (Linux)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
