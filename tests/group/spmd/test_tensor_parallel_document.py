"""The program in docs/tensor_parallel.md runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent.parent


@pytest.mark.processes
def test_the_program_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "tensor_parallel.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    program = tmp_path / "mlp.py"
    program.write_text(blocks[0])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Shard(dim=0)" in done.stdout
    losses = [float(each) for each in re.findall(r"step \d: ([\d.]+)", done.stdout)]
    assert len(losses) == 3
