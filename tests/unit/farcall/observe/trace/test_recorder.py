"""Recording for traces: bounded in number and size, whatever names there are."""

from __future__ import annotations

import threading
import tracemalloc
from pathlib import Path

import pytest

from farcall.observe.trace.merge import merge
from farcall.observe.trace.parts import open_part, read_part
from farcall.observe.trace.recorder import Recorder
from farcall.observe.tracing import write_trace
from rpc.runtime import spans
from tests.support.chrome_trace import read_trace

FULL = 2_000


def test_spans_that_are_too_many_are_counted(tmp_path: Path) -> None:
    recorder = Recorder([], limit=FULL)
    for _ in range(FULL):
        with spans.span("work"):
            pass
    part = read_part(b"".join(recorder.stop()))
    kept = len(list(part.records))
    assert 0 < kept < FULL
    assert kept + part.dropped == FULL
    write_trace(tmp_path / "run.json", merge([part]))
    trace = read_trace(tmp_path / "run.json")
    assert trace.metadata["dropped"] == {part.worker: part.dropped}
    assert len(trace.slices) == kept


@pytest.mark.parametrize("name", ["a\x00b\x1b[31m\n", "\udc80", "\u202eabc", "x" * 100_000, "</script>"])
def test_any_name_is_shown_in_one_short_line(tmp_path: Path, name: str) -> None:
    recorder = Recorder([])
    thread = threading.Thread(target=lambda: spans.span(name, detail=name).__enter__(), name=name)
    thread.start()
    thread.join()
    with spans.span(name, detail=name):
        pass
    write_trace(tmp_path / "run.json", merge([read_part(b"".join(recorder.stop()))]))
    (found,) = read_trace(tmp_path / "run.json").slices
    assert 0 < len(found["name"]) <= 201


def test_a_part_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    recorder = Recorder([])
    with spans.span("work"):
        pass
    whole = b"".join(recorder.stop())
    for size in range(len(whole)):
        path = tmp_path / "cut"
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="not a part of a trace"):
            open_part(path)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_million_spans_take_bounded_memory(tmp_path: Path) -> None:
    recorder = Recorder([])
    for number in range(1_000_000):
        with spans.span("work", number=number % 100):
            pass
    path = tmp_path / "part"
    with open(path, "wb") as file:
        file.writelines(recorder.stop())
    del recorder
    tracemalloc.start()
    write_trace(tmp_path / "run.json", merge([open_part(path)]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 700 << 20
    assert (tmp_path / "run.json").stat().st_size < 300 << 20
