"""The command ``farcall``: its options, and what ``farcall env`` tells."""

from __future__ import annotations

import json

import pytest

import farcall
from farcall.cli import main


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"farcall {farcall.__version__}\n"


def test_without_a_command_it_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_env_says_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["farcall"] == farcall.__version__
    assert facts["loopback TCP"] == "ok"
    assert facts["abstract Unix sockets"] == "ok"
    assert facts.keys() >= {"python", "torch", "uvloop", "event loop", "platform", "cpus", "cuda devices"}


def test_env_shows_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    assert "loopback TCP" in capsys.readouterr().out


def test_env_keeps_secrets(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARCALL_TOKEN", "s3cret")
    monkeypatch.setenv("FARCALL_COLOUR", "blue")
    main(["env", "--json"])
    printed = capsys.readouterr().out
    assert "s3cret" not in printed
    assert json.loads(printed)["FARCALL_TOKEN"] == "is set"
    assert json.loads(printed)["FARCALL_COLOUR"] == "blue"
