"""The program in docs/collectives.md runs, and prints what the document says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent.parent


@pytest.mark.processes
def test_the_program_prints_what_the_document_says(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "collectives.md").read_text()
    program, said = re.findall(r"^```(?:python)?\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[:2]
    (tmp_path / "collectives.py").write_text(program)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            "collectives.py",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Under torchrun lines may run together; and a rank may hear of the mismatch before it sees it.
    told = r"process group '0' has failed: \S+ \S+ at rank \d \(worker 'rank\d'\): "
    printed = re.sub(told, "", done.stdout)
    assert [line for line in said.splitlines() if line not in printed] == []
