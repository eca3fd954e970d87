"""``farcall metrics`` with a token that cannot be used: one sentence that says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from farcall.cli import main
from farcall.observe.format.layout import Beat
from farcall.observe.worker.state_file import StateFile

pytest.importorskip("prometheus_client")


def test_token_that_cannot_be_used_is_an_error_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    StateFile(tmp_path / "7c2f" / "here.1.1.state").beat(Beat(1, 1.0, 1.0, 0, 0, 0.0))
    monkeypatch.setenv("FARCALL_JOBS_DIR", str(tmp_path))
    monkeypatch.setenv("FARCALL_TOKEN_FILE", "/nowhere")
    assert main(["metrics", "--job", "7c2f"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("Error: metrics cannot be served: FARCALL_TOKEN_FILE: cannot read the token in ")
    assert said.count("\n") == 1
