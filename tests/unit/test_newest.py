"""The environment for tests on a newer PyTorch: what is in its way is said, and is no failure of CI."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.newest import environment


@pytest.fixture(autouse=True)
def no_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "FOLDER", tmp_path / "environment")
    monkeypatch.setattr(environment, "_READY", tmp_path / "environment" / ".ready")
    monkeypatch.setattr(environment, "_FREE_BYTES", 0)


@pytest.mark.parametrize("step", ["--dry-run", "venv"])
@pytest.mark.parametrize("fault", ["late", "failed"])
def test_a_step_that_fails_or_takes_too_long_means_no_environment(
    step: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[Any], **options: Any) -> subprocess.CompletedProcess[str]:
        if "config" in command:
            return subprocess.CompletedProcess(command, 0, "global.find-links='/somewhere'\n", "")
        if step in command and fault == "late":
            raise subprocess.TimeoutExpired(command, 60)
        if step in command and options.get("check"):
            raise subprocess.CalledProcessError(1, command)
        return subprocess.CompletedProcess(command, int(step in command), "", "No space left on device")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(environment.Unavailable, match="No space left" if fault == "failed" else "60 s"):
        environment.made_from_files()
