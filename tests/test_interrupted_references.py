"""Ctrl-C right after a message with a reference has gone out: the reference is the callee's all the same."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch

import rpc
from rpc.peer import Peer
from tests.serving import first_of
from tests.workers import RunWorkers, Worker

kept: list[rpc.RRef[torch.Tensor]] = []
arrived = threading.Event()


def keep(reference: rpc.RRef[torch.Tensor]) -> None:
    kept.append(reference)
    arrived.set()


def use_kept() -> float:
    arrived.wait()  # nobody waits for the call that brings it
    return float(kept[0].to_here().sum())


def interrupted_after_sending(_: Worker) -> float:
    send_small = Peer.send_small

    def send_and_interrupt(self: Peer, *args: Any, **kwargs: Any) -> None:
        send_small(self, *args, **kwargs)
        raise KeyboardInterrupt

    rpc.rpc_sync("worker1", int)
    reference = rpc.RRef(torch.ones(5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Peer, "send_small", send_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            rpc.rpc_async("worker1", keep, args=(reference,))
    del reference
    gc.collect()
    return float(rpc.rpc_sync("worker1", use_kept))


def test_a_reference_whose_sender_was_interrupted_can_be_used(run_workers: RunWorkers) -> None:
    assert first_of(run_workers, interrupted_after_sending) == 5
