"""Large tensors between workers of one host lie in memory that both share."""

from __future__ import annotations

from typing import Any

import torch

import rpc
from rpc.bulk.shared_memory import exchange
from tests.support import backend
from tests.support.serving import in_worker0
from tests.support.shared_memory import (
    arriving_in_segment,
    echo_through_segments,
    mapped_segments,
    send_through_segments,
)
from tests.support.streams import until

MIB = 1 << 20


def echo(*values: Any) -> Any:
    return values


@in_worker0()
def test_arguments_and_results_lie_in_segments() -> None:
    echo_through_segments("worker1", MIB)
    tensor = torch.arange(MIB // 4, dtype=torch.int32)
    back = arriving_in_segment(lambda: rpc.rpc_sync("worker1", echo, args=(tensor,))[0])
    assert torch.equal(back, tensor)
    back.add_(1)
    assert not torch.equal(back, tensor)


TENSORS: dict[str, list[torch.Tensor]] = {
    "dtypes": [torch.ones(100_000, dtype=dtype) for dtype in (torch.bfloat16, torch.complex64, torch.bool)],
    "transposed": [torch.arange(90_000).view(300, 300).T],
    "gaps": [torch.arange(200_000)[::2]],
    "expanded": [torch.ones(1, 50_000, dtype=torch.float64).expand(7, 50_000)],
    "part of something large": [torch.arange(1_000_000)[10:50_000]],
    "large beside small": [torch.arange(400_000), torch.arange(3), torch.arange(2_000), torch.ones(())],
    "many": [torch.full((3_001,), i) for i in range(40)],
    "sparse": [
        torch.sparse_coo_tensor(
            torch.arange(60_000)[None], torch.ones(60_000), (70_000,), check_invariants=True
        )
    ],
    "parameter": [torch.nn.Parameter(torch.ones(50_000))],
}


@in_worker0()
def test_all_kinds_of_tensors_arrive() -> None:
    for kind, tensors in TENSORS.items():
        size = 2 * sum(each.nbytes if each.layout is torch.strided else MIB for each in tensors)
        echo_through_segments("worker1", max(size, MIB))
        for _repeat in range(4):
            for sent, back in zip(tensors, rpc.rpc_sync("worker1", echo, args=tuple(tensors)), strict=True):
                assert torch.equal(torch.Tensor.to_dense(sent), torch.Tensor.to_dense(back)), kind
                assert (sent.dtype, type(sent)) == (back.dtype, type(back)), kind
                assert sent.requires_grad == back.requires_grad, kind


@backend.over_sockets  # until memory is shared, a network's transport sends large tensors from where they are
@in_worker0()
def test_arguments_are_captured_when_the_call_returns() -> None:
    send_through_segments("worker1", 4 * MIB)
    tensor = torch.zeros(MIB)
    futures = []
    for value in range(8):
        tensor.fill_(value)
        futures.append(rpc.rpc_async("worker1", torch.sum, args=(tensor,)))
    assert [float(each.wait()) for each in futures] == [value * MIB for value in range(8)]


@in_worker0(shared_memory_bytes=0)
def test_nothing_is_shared_where_it_is_turned_off() -> None:
    tensor = torch.ones(MIB)
    for _attempt in range(5):
        assert torch.equal(rpc.rpc_sync("worker1", echo, args=(tensor,))[0], tensor)
    assert mapped_segments(1) == []
    assert rpc.rpc_sync("worker1", mapped_segments, args=(1,)) == []


def shorten_rest() -> None:
    exchange.IDLE_SECONDS = 0.2  # type: ignore[misc]  # in this process only


@in_worker0()
def test_idle_segments_are_given_back() -> None:
    shorten_rest()
    rpc.rpc_sync("worker1", shorten_rest)
    echo_through_segments("worker1", MIB)
    until(lambda: not mapped_segments())
    until(lambda: not rpc.rpc_sync("worker1", mapped_segments))
    echo_through_segments("worker1", MIB)
