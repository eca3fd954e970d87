"""Workers with TLS between them: all that goes over TCP works, and who has no certificate stays out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rpc
from tests.support.certificates import Authority
from tests.support.serving import first_of
from tests.support.transfers import ACROSS, MIB, echo
from tests.support.workers import RunWorkers, Worker

TOKEN = "a token that only the tests know"


def work(_: Worker) -> bool:
    large = torch.arange(4 * MIB)
    futures = [rpc.rpc_async("worker1", echo, args=(large,)) for _ in range(3)]
    small = [rpc.rpc_sync("worker1", echo, args=(number,)) for number in range(100)]
    rref = rpc.remote("worker1", echo, args=(large,))
    return small == list(range(100)) and all(
        torch.equal(each, large) for each in (*(future.wait() for future in futures), rref.to_here())
    )


@pytest.mark.parametrize("stripes", [1, 3])
def test_calls_and_large_tensors_go_over_tls(run_workers: RunWorkers, tmp_path: Path, stripes: int) -> None:
    tls = Authority(tmp_path).issue()
    assert first_of(run_workers, work, tls=tls, token=TOKEN, tcp_stripes=stripes, **ACROSS)
