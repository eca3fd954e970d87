"""Training under XLA's names."""

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


@driven
def test_their_linear_function_has_the_gradients_of_pytorchs() -> None:
    x = theirs()
    given = [torch.randn(2, 3), torch.randn(4, 3), torch.randn(4)]
    found = []
    for function in (x.xs.XLAPatchedLinear.apply, nn.functional.linear):
        leaves = [each.to("xla").requires_grad_() for each in given]
        output = function(*leaves)
        torch.autograd.backward(output.square().sum())
        found.append([output.detach().cpu(), *(each.grad.cpu() for each in leaves if each.grad is not None)])
    torch.testing.assert_close(*found)
    assert len(found[0]) == 4


@driven
def test_layers_are_wrapped_to_compute_their_activations_again() -> None:
    theirs()
    wrap: Any = importlib.import_module("torch_xla.distributed.fsdp.wrap")
    again: Any = importlib.import_module("torch_xla.distributed.fsdp.utils")
    alone = nn.Sequential(SimpleLinear(), nn.ReLU())
    policy = functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={SimpleLinear})
    model, count = wrap.recursive_wrap(
        copy.deepcopy(alone).to("xla"), policy, lambda module, *_, **__: again.checkpoint_module(module)
    )
    assert count == sum(each.numel() for each in alone.parameters())
    data = torch.randn(4, 128)
    torch.autograd.backward(model(data.to("xla").requires_grad_()).sum())
    torch.autograd.backward(alone(data).sum())
    for mine, its in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), its.grad)


@driven
def test_what_torch_compile_gives_computes_the_same() -> None:
    x = theirs()
    model: Any = SimpleLinear().to("xla").eval()
    x.xs.mark_sharding(model.fc2.weight, mesh_of(1, WORKERS), (1, 0))
    data = torch.randn(1, 128).to("xla")
    wanted = model(data).cpu()
    compiled: Any = torch.compile
    assert compiled(model, backend="openxla")(data).cpu().equal(wanted)

    def marked(t: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = model.fc1(t)
        operators: Any = torch.ops.xla
        operators.dynamo_mark_sharding(output, list(range(WORKERS)), [1, WORKERS], "('x', 'y')", "('x', 'y')")
        return output

    assert said(compiled(backend="openxla", fullgraph=True)(marked)(data)) == f"{{devices=[1,4]{IN_ORDER}}}"
