"""FSDPv2 under XLA's names; ``tests/group/spmd/fsdp`` holds what it does."""

from __future__ import annotations

import copy
import functools
import importlib
from typing import Any

import pytest
import torch
from torch import nn

from tests.group.farcall.xla.names import IN_ORDER, SimpleLinear, mesh_of, said, theirs
from tests.group.spmd.driven import WORKERS, driven

pytestmark = pytest.mark.processes

COLUMNS = f"{{devices=[1,4]{IN_ORDER}}}"


@driven
def test_a_policy_wraps_children_whose_weights_and_outputs_are_cut_and_values_stay() -> None:
    x = theirs()
    lent: Any = importlib.import_module("torch_xla.experimental.spmd_fully_sharded_data_parallel")
    wrap: Any = importlib.import_module("torch_xla.distributed.fsdp.wrap")
    fsdp = lent.SpmdFullyShardedDataParallel
    policy = functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})
    mesh = mesh_of(WORKERS, 1, names=("fsdp", "tensor"))
    alone = SimpleLinear().to("xla")
    model: Any = fsdp(copy.deepcopy(alone), mesh=mesh, auto_wrap_policy=policy)
    assert isinstance(model.fc1, fsdp)
    assert said(model.fc1.weight) == said(model.fc2.weight) == COLUMNS
    data = torch.randn(16, 128).to("xla")
    output = model(data)
    assert said(output) == f"{{devices=[4,1]{IN_ORDER}}}"
    torch.testing.assert_close(output.cpu(), alone(data).cpu())
    torch.autograd.backward(output.sum())
    assert said(model.fc2.weight.grad) == COLUMNS
    x.xm.wait_device_ops()
    unwrapped: Any = fsdp(
        SimpleLinear(), mesh=mesh, auto_wrap_policy=policy, auto_wrapper_callable=lambda m, *_, **__: m
    )
    assert not isinstance(unwrapped.fc1, fsdp)
