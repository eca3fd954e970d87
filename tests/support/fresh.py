"""Programs that begin where nothing but PyTorch has been imported: forked, each, from one interpreter.

Starting Python and importing PyTorch takes seconds. The first test that asks for a program starts a real
interpreter, which imports PyTorch, and none of farcall's packages; it forks all such programs of the session.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.support import leftovers

__all__ = ["RunFresh", "run_fresh"]

_ROOT = Path(__file__).resolve().parents[2]
_SERVE = "import torch, torch.distributed; from tests.support.fresh import serve; serve()"


class RunFresh:
    """What the fixture ``run_fresh`` gives to a test."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def __call__(
        self,
        program: str,
        *arguments: str,
        folder: Path | None = None,
        path: Sequence[Path] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end.

        Args:
            program: its text.
            arguments: its ``sys.argv[1:]``.
            folder: where it runs, and the first entry of its ``sys.path``.
            path: what else is on ``sys.path`` besides the standard library; default: what is installed.
            environment: variables beside the test's own.
        """
        if self._server is None:
            own = {"PYTHONPATH": str(_ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
            command = [sys.executable, "-c", _SERVE]
            pipe = subprocess.PIPE
            self._server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=os.environ | own)
            leftovers.SERVERS.add(self._server.pid)
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with tempfile.TemporaryDirectory() as output:
            request = {
                "program": program,
                "arguments": arguments,
                "folder": str(folder or _ROOT),
                "path": None if path is None else [str(each) for each in path],
                "environment": {**os.environ, **(environment or {})},
                "output": output,
            }
            print(json.dumps(request), file=self._server.stdin, flush=True)
            status = int(self._server.stdout.readline())
            said = [Path(output, name).read_text() for name in ("out", "err")]
        return subprocess.CompletedProcess([program, *arguments], status, *said)

    def close(self) -> None:
        """End the interpreter."""
        if self._server is not None:
            self._server.communicate()
            leftovers.SERVERS.discard(self._server.pid)


@pytest.fixture(scope="session")
def run_fresh() -> Iterator[RunFresh]:
    """Runs programs in processes of their own that have imported PyTorch and nothing of farcall."""
    runner = RunFresh()
    yield runner
    runner.close()


def serve() -> None:
    """Fork a program for each line of the standard input, one after the other; print how it has ended."""
    gc.freeze()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _become(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _become(request: Mapping[str, Any]) -> NoReturn:
    status = 1
    try:
        output, folder = Path(request["output"]), Path(request["folder"])
        for number, name in enumerate((os.devnull, "out", "err")):
            os.dup2(os.open(output / name, os.O_RDWR | os.O_CREAT), number)
        os.closerange(3, 64)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(request["environment"])
        tempfile.tempdir = None
        _set_path(folder, request["path"])
        status = _run(request["program"], request["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]  # as at the end of a program
            atexit._run_exitfuncs()
            sys.stdout.flush()
        os._exit(status)


def _set_path(folder: Path, path: Sequence[str] | None) -> None:
    """What was imported to serve is forgotten, and found anew or not."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "farcall_guard")]:
        del sys.modules[name]
    if path is None:
        sys.path[:] = [str(folder), *filter(None, sys.path)]
    else:
        standard = [each for each in sys.path if each.startswith(sys.base_prefix)]
        sys.path[:] = [*path, *(each for each in standard if "site-packages" not in each)]
        found = [each for each in sys.meta_path if "editable" not in getattr(each, "__module__", "")]
        sys.meta_path[:] = found
    importlib.invalidate_caches()


def _run(program: str, arguments: Sequence[str]) -> int:
    sys.argv[:] = ["-c", *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(program, "<string>", "exec"), vars(main))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
