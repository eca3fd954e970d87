"""Which workers and devices a program has named."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from spmd.engine.driver.worker_devices import WorkerDevice as At
from spmd.engine.driver.worker_devices import workers_and_devices
from spmd.engine.errors import SpmdError

MEMBERS = ("worker1", "worker2", "a/b")


@pytest.mark.parametrize(
    ("named", "device", "expected"),
    [
        (["worker2", "worker1"], None, [At("worker2"), At("worker1")]),
        (["worker1"], "cuda", [At("worker1", "cuda")]),
        (
            ["worker1/cuda", "worker2/cuda:1"],
            None,
            [At("worker1", "cuda"), At("worker2", "cuda:1")],
        ),
        (["worker1/cuda:1", "worker1/cuda:0"], None, [At("worker1", "cuda:1"), At("worker1", "cuda:0")]),
        (["worker1/cpu", "worker2"], None, [At("worker1"), At("worker2")]),
        (["worker1/cpu:0", "worker2"], None, [At("worker1"), At("worker2")]),
        (["worker1"], "cpu:0", [At("worker1")]),
        (["a/b"], "cuda", [At("a/b", "cuda")]),
        (["a/b/cuda:0"], None, [At("a/b", "cuda:0")]),
    ],
)
def test_places(named: Sequence[str], device: str | None, expected: Sequence[At]) -> None:
    assert workers_and_devices(named, MEMBERS, device) == expected


@pytest.mark.parametrize(
    ("named", "device", "said"),
    [
        ([], None, "expected names of other workers"),
        (["worker3"], None, "expected names of other workers"),
        (["worker3/cuda:0"], None, "expected names of other workers"),
        (["worker1", "worker1"], None, "each once"),
        (["worker1/cuda:0", "worker1/cuda:0"], None, "each once"),
        (["worker1/cuda:0", "worker1/cuda"], None, "expected an index of a device each time"),
        (["worker1", "worker1/cuda:0"], None, "expected an index of a device each time"),
        (["worker1/cuda:0"], "cuda", "got both: 'worker1/cuda:0'"),
        (["worker1/cuda:0", "worker2"], None, "expected devices of one type, got cpu, cuda"),
    ],
)
def test_wrong_places_are_refused(named: Sequence[str], device: str | None, said: str) -> None:
    with pytest.raises(SpmdError, match=said):
        workers_and_devices(named, MEMBERS, device)
