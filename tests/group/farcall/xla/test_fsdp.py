"""FSDPv2 under XLA's names."""

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
ROWS = f"{{devices=[4,1]{IN_ORDER}}}"


def fsdp() -> Any:
    module: Any = importlib.import_module("torch_xla.experimental.spmd_fully_sharded_data_parallel")
    return module.SpmdFullyShardedDataParallel


def policy() -> Any:
    wrap: Any = importlib.import_module("torch_xla.distributed.fsdp.wrap")
    return functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})


@driven
def test_weights_and_outputs_are_cut_and_values_stay() -> None:
    x = theirs()
    alone = SimpleLinear().to("xla")
    model: Any = copy.deepcopy(alone)
    mesh = mesh_of(WORKERS, 1, names=("fsdp", "tensor"))
    model.fc1, model.fc2 = fsdp()(model.fc1, mesh=mesh), fsdp()(model.fc2, mesh=mesh)
    model = fsdp()(model, mesh=mesh)
    assert said(model.fc1.weight) == said(model.fc2.weight) == COLUMNS
    data = torch.randn(16, 128).to("xla")
    given = copy.deepcopy(data)
    x.xs.mark_sharding(given, mesh, ("fsdp", None))
    output = model(given)
    assert said(output) == ROWS
    torch.testing.assert_close(output.cpu(), alone(data).cpu())
    torch.autograd.backward(output.sum())
    assert said(model.fc2.weight.grad) == COLUMNS
    x.xm.wait_device_ops()


@driven
def test_a_policy_wraps_children_by_this_class_or_by_a_function() -> None:
    theirs()
    mesh = mesh_of(WORKERS, 1, names=("fsdp", "tensor"))
    model = fsdp()(SimpleLinear().to("xla"), mesh=mesh, auto_wrap_policy=policy())
    assert isinstance(model.fc1, fsdp())
    assert isinstance(model.fc2, fsdp())
    model = fsdp()(
        SimpleLinear(), mesh=mesh, auto_wrap_policy=policy(), auto_wrapper_callable=lambda m, *_, **__: m
    )
    assert not isinstance(model.fc1, fsdp())
    assert not isinstance(model.fc2, fsdp())


@driven
def test_layers_whose_sizes_workers_cannot_share_evenly() -> None:
    x = theirs()
    x.xs.set_global_mesh(x.xs.get_1d_mesh("fsdp"))
    alone = nn.Sequential(nn.Linear(10, 21), nn.Linear(21, 30), nn.Linear(30, 39))
    model = fsdp()(copy.deepcopy(alone), auto_wrap_policy=policy())
    data = torch.randn(101, 10)
    output = model(data.to("xla"))
    x.torch_xla.sync()
    assert output.shape == (101, 39)
    torch.testing.assert_close(output.cpu(), alone(data), rtol=1e-4, atol=1e-5)
