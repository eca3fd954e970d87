"""The program in docs/collectives.md runs, and prints what the document says."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.document_programs import printed_by_ranks
from tests.support.workers import RunWorkers

DOCUMENT = Path(__file__).resolve().parents[4] / "docs" / "collectives.md"


def test_the_program_prints_what_the_document_says(run_workers: RunWorkers) -> None:
    blocks = re.findall(r"^```(?:python)?\n(.*?)^```$", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
    program, said = blocks[:2]
    # A rank may hear of the mismatch before it sees it.
    told = r"process group '0' has failed: \S+ \S+ at rank \d \(worker 'rank\d'\): "
    printed = re.sub(told, "", printed_by_ranks(run_workers, program))
    assert [line for line in said.splitlines() if line not in printed] == []
