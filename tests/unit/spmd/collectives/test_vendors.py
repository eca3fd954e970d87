"""Whether tensors go to the backends of vendors: one decision for all ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from spmd.collectives.vendors import Vendors, agreed

NCCL = Vendors({"cuda": "nccl"})
NONE = Vendors({})


def decide(*ranks: tuple[Vendors, str | None]) -> list[Vendors]:
    """What each rank is told, with the backends and the place that it has."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(lambda rank: agreed(rank[0], store, len(ranks), rank[1]), ranks))


@pytest.mark.parametrize("places", [[None] * 3, ["a cuda:0", "a cuda:1", "b cuda:0"]])
def test_the_same_backends_everywhere_are_used(places: list[str | None]) -> None:
    assert decide(*[(NCCL, place) for place in places]) == [NCCL] * 3


@pytest.mark.parametrize("odd", [NONE, Vendors({"cuda": "other"})])
@pytest.mark.parametrize("at", range(3))
def test_one_rank_without_them_decides_for_all(odd: Vendors, at: int) -> None:
    ranks = [(odd if rank == at else NCCL, None) for rank in range(3)]
    assert decide(*ranks) == [NONE] * 3


def test_ranks_that_share_a_device_decide_for_all() -> None:
    assert decide((NCCL, "a cuda:0"), (NCCL, "a cuda:1"), (NCCL, "a cuda:0")) == [NONE] * 3


def test_no_rank_has_any() -> None:
    assert decide((NONE, None), (NONE, "a")) == [NONE] * 2
