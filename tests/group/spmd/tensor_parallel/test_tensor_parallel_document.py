"""The program in docs/tensor_parallel.md runs."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.default_device import not_on_devices
from tests.support.document_programs import printed_by_ranks
from tests.support.workers import RunWorkers

DOCUMENT = Path(__file__).resolve().parents[4] / "docs" / "tensor_parallel.md"


@not_on_devices("the program is for the CPU")
def test_the_program_runs(run_workers: RunWorkers) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
    printed = printed_by_ranks(run_workers, blocks[0])
    assert "Shard(dim=0)" in printed
    losses = [float(each) for each in re.findall(r"step \d: ([\d.]+)", printed)]
    assert len(losses) == 3
