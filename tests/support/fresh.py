"""Programs that begin where nothing but PyTorch has been imported: forked, each, from one interpreter.

Starting Python and importing PyTorch takes seconds. The first test that asks for a program starts a real
interpreter, which imports PyTorch, and none of farcall's packages; it forks all such programs of the session.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.support import interpreters, leftovers
from tests.support.interpreters import Program

__all__ = ["RunFresh", "run_fresh"]

_ROOT = Path(__file__).resolve().parents[2]
_SERVE = "import torch, torch.distributed; from tests.support.fresh import serve; serve()"
_FORGET = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "farcall_guard")]:
    del sys.modules[name]
"""
"""What was imported to serve is forgotten, and found anew or not."""
_FIND = """
standard = [each for each in sys.path if each.startswith(sys.base_prefix)]
sys.path[:] = [*{path}, *(each for each in standard if "site-packages" not in each)]
sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in getattr(each, "__module__", "")]
"""


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
            command = [sys.executable, "-u", "-c", _SERVE]  # never forked: it has an option of Python's own
            pipe = subprocess.PIPE
            self._server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=os.environ | own)
            leftovers.SERVERS.add(self._server.pid)
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        words = ["-c", _FORGET + ("" if path is None else _FIND.format(path=[*map(str, path)])) + program]
        described = Program(
            [*words, *arguments],
            {**os.environ, "PYTHONPATH": str(_ROOT), **(environment or {})},
            str(folder or _ROOT),
            session=False,
            group=-1,
            terminal=False,
            numbers=[0, 1, 2],
        )
        with tempfile.TemporaryDirectory() as output:
            request = {"program": asdict(described), "output": output}
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
    for line in sys.stdin:
        request = json.loads(line)
        places = [os.path.join(request["output"], name) for name in ("in", "out", "err")]
        descriptors = [os.open(place, os.O_RDWR | os.O_CREAT) for place in places]
        pid = os.fork()
        if pid == 0:
            interpreters.run(Program(**request["program"]), descriptors)
        for each in descriptors:
            os.close(each)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
