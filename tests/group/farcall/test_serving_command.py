"""The command ``farcall serve``, and a client in JavaScript."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farcall import client as clients
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
    process = subprocess.Popen(
        [sys.executable, "-m", "farcall", "serve", "made.py:make_model", "--port", "0"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    assert first.startswith("serving model at 127.0.0.1:")
    with clients.connect(f"localhost:{first.rpartition(':')[2].strip()}") as client:
        assert client.call("model", np.arange(2)).tolist() == [0, 1]
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "ending: no more calls are taken" in rest
    assert "model OK" in rest


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("made.py", "is not FILE.py:NAME"),
        ("none.py:model", "there is no file none.py"),
        ("farcall_none:model", "there is no module 'farcall_none'"),
        ("made.py:other", "made.py has no 'other'; it has add, nothing, number"),
        ("made.py:add", "missing a required argument: 'a'; to serve the function itself"),
        ("made.py:number", "3 cannot be called"),
        ("made.py:nothing", "it is empty"),
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

    (tmp_path / "made.py").write_text("def add(a, b): return a + b\nnothing = {}\nnumber = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["serve", target]) == 1
    assert text in capsys.readouterr().err
