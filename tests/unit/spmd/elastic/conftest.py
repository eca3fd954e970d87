"""A mesh of one worker, for sharded tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("farcall", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
