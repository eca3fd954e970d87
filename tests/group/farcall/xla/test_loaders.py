"""Loaders under XLA's names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.group.farcall.xla.names import IN_ORDER, mesh_of, said, theirs
from tests.group.spmd.driven import WORKERS, driven

pytestmark = pytest.mark.processes

ROWS = f"{{devices=[4,1]{IN_ORDER}}}"


def spec(*axes: Any, **options: Any) -> Any:
    x = theirs()
    return x.xs.ShardingSpec(x.xs.get_1d_mesh("data"), axes, **options)


@driven
def test_data_is_sent_with_a_spec() -> None:
    x = theirs()
    whole, sharding = torch.arange(16.0).reshape(1, 16), x.xs.ShardingSpec(mesh_of(1, WORKERS), (0, 1))
    assert sharding.can_apply(whole)
    (sent,) = x.xm.send_cpu_data_to_device([whole], x.xm.xla_device(), input_sharding=sharding)
    marked = whole.to(x.xm.xla_device())
    x.xs.mark_sharding(marked, mesh_of(1, WORKERS), (0, 1))
    assert said(sent) == said(marked) == f"{{devices=[1,4]{IN_ORDER}}}"
    half = sent / 0.5
    x.torch_xla.sync(wait=True)
    assert half.cpu().equal(whole / 0.5)


@driven
def test_a_library_may_say_how_batches_are_cut_when_the_loader_is_there() -> None:
    x = theirs()
    loader = x.pl.MpDeviceLoader([torch.ones(8, 2)], x.torch_xla.device())
    loader._parallel_loader_kwargs["input_sharding"] = x.xs.ShardingSpec(mesh_of(4), (0, None))
    (batch,) = loader
    assert said(batch) == f"{{devices=[4,1]{IN_ORDER}}}"
