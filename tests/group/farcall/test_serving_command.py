"""The command ``farcall serve``, and a client in JavaScript."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from farcall import client as clients
from farcall.client import CallError
from rpc import TlsOptions
from tests.support.certificates import Authority
from tests.support.gateway import Scale, Serve

ROOT = Path(__file__).resolve().parent.parent.parent.parent


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm here")
def test_a_client_in_javascript(serve: Serve, tmp_path: Path) -> None:
    folder = tmp_path / "client"
    shutil.copytree(
        ROOT / "examples" / "clients" / "node", folder, ignore=shutil.ignore_patterns("node_modules")
    )
    install = [
        "npm",
        "install",
        "--no-audit",
        "--no-fund",
        "--ignore-scripts",
        "--fetch-retries=0",
        "--fetch-timeout=10000",
    ]
    installed = subprocess.run(install, check=False, cwd=folder, capture_output=True, text=True, timeout=80)
    if installed.returncode:
        pytest.skip(f"npm cannot install gRPC here: {installed.stderr[-300:]}")
    server = serve({"scale": Scale()})

    def ask(name: str, *shape: int) -> subprocess.CompletedProcess[str]:
        command = ["node", "call.js", f"localhost:{server.port}", name, str(list(shape))]
        pixels = np.arange(6, dtype=np.float32).tobytes().decode("latin-1")
        env = {**os.environ, "FARCALL_PROTO": str(ROOT / "proto")}
        options: dict[str, Any] = {"capture_output": True, "encoding": "latin-1", "timeout": 60}
        return subprocess.run(command, check=False, cwd=folder, env=env, input=pixels, **options)

    assert json.loads(ask("scale", 2, 3).stdout) == {"shape": [2, 3], "numbers": [0, 3, 6, 9, 12, 15]}
    assert "NOT_FOUND: nothing is served as 'none'" in ask("none", 2, 3).stderr
    assert "INVALID_ARGUMENT: a tensor float32[7] has 28 bytes, but 24 came" in ask("scale", 7).stderr


# ---- the command


@pytest.mark.processes
def test_the_command_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text("from torch import nn\ndef make_model(): return nn.Identity()\n")
    process, address = command(tmp_path, "made.py:make_model")
    with clients.connect(address) as client:
        assert client.call("model", np.arange(2)).tolist() == [0, 1]
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "ending: no more calls are accepted" in rest
    assert "model OK" in rest


def command(folder: Path, target: str) -> tuple[subprocess.Popen[str], str]:
    """The command, once it serves, and where."""
    process = subprocess.Popen(
        [sys.executable, "-m", "farcall", "serve", target, "--port", "0"],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    found = re.match(r"serving model at (127\.0\.0\.1:\d+)$", first)
    assert found, first + process.communicate(timeout=60)[0]
    return process, found[1]


@pytest.mark.processes
def test_a_second_signal_ends_the_command_at_once(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text(
        "import threading\nfrom pathlib import Path\ndef wait(file):\n"
        "    Path(file).write_text('begun')\n    threading.Event().wait()\nserved = {'model': wait}\n"
    )
    process, address = command(tmp_path, "made.py:served")
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    with ThreadPoolExecutor(1) as threads, clients.connect(address) as client:
        taken = threads.submit(client.call, "model", str(begun))
        assert begun.read_text() == "begun"
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        while "another signal ends it at once" not in (line := process.stdout.readline()):
            assert line, "it has ended"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGTERM
        error = taken.exception(60)
        assert isinstance(error, CallError)
        assert error.code is grpc.StatusCode.UNAVAILABLE


PROGRAMS = {
    "made.py": """def add(a, b): return a + b
async def ask(): return add
def words(): yield "one"
nothing, number = {}, 3
def raises():
    raise LookupError("no weights")
""",
    "broken.py": "def model(:\n",
    "absent.py": "import farcall_none\n",
    "lacking.py": "import farcall_none\n",
    "leaves.py": "import sys\nsys.exit()\n",
}


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("made.py", "is not FILE.py:NAME"),
        ("none.py:model", "there is no file none.py"),
        ("farcall_none:model", "there is no module 'farcall_none'"),
        ("made.py:other", "made.py has no 'other'; it has add, ask, words, nothing, number"),
        ("made.py:add", "missing a required argument: 'a'; to serve the function itself"),
        ("made.py:ask", "an async function or a generator; to serve the function itself"),
        ("made.py:words", "an async function or a generator; to serve the function itself"),
        ("made.py:number", "3 cannot be called"),
        ("made.py:nothing", "it is empty"),
        ("made.py:raises", 'made.py", line 6, in raises\n    raise LookupError("no weights")'),
        ("broken.py:model", 'broken.py", line 1\n    def model(:'),
        ("absent.py:model", "import farcall_none\nModuleNotFoundError: No module named 'farcall_none'"),
        ("lacking:model", "import farcall_none\nModuleNotFoundError: No module named 'farcall_none'"),
        ("leaves.py:model", "leaves.py cannot be loaded. It raised:"),
    ],
)
def test_what_cannot_be_served(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    target: str,
    text: str,
) -> None:
    from farcall.cli import main

    for name, program in PROGRAMS.items():
        (tmp_path / name).write_text(program)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["serve", target]) == 1
    told = capsys.readouterr().err
    assert text in told
    assert "farcall/serving" not in told


@pytest.mark.parametrize(("option", "text"), [("--delay", "max_delay at least 0"), ("--grace", "0 or more")])
def test_a_time_that_is_no_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, text: str
) -> None:
    from farcall.cli import main

    made = tmp_path / "made.py"
    made.write_text("served = {'print': print}\n")
    assert main(["serve", f"{made}:served", "--port", "0", "--batch", "2", option, "nan"]) == 1
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cert", "key", "text"),
    [
        ("ours.cert.pem", "theirs.key.pem", "or do not belong together"),
        ("garbage", "ours.key.pem", "cert and key are not in PEM"),
    ],
)
def test_certificates_that_are_not_good(serve: Serve, tmp_path: Path, cert: str, key: str, text: str) -> None:
    for name in ("ours", "theirs"):
        Authority(tmp_path, name).issue()
    (tmp_path / "garbage").write_text("garbage")
    files = [str(tmp_path / each) for each in (cert, key, "ours.ca.pem")]
    with pytest.raises(ValueError, match=text):
        serve({"scale": Scale()}, tls=TlsOptions(*files))


def test_a_port_that_is_taken(serve: Serve) -> None:
    port = serve({"scale": Scale()}).port
    with pytest.raises(OSError, match=f"cannot listen at 127.0.0.1:{port}"):
        serve({"scale": Scale()}, port=port)
    with pytest.raises(OSError, match=f"metrics cannot be served at 127.0.0.1:{port}: Address already"):
        serve({"scale": Scale()}, metrics_port=port)
