"""Process groups and small models for tests of tensor parallelism."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tests.support.default_device import TYPE
from tests.support.process_groups import process_group
from tests.support.standing import Shared
from tests.support.workers import Worker

__all__ = ["assert_same_gradients", "backward", "gradient_of", "in_mesh", "part", "whole"]


def in_mesh(task: Callable[..., Any], *shape: int, names: tuple[str, ...] | None = None) -> Shared:
    """A task for ``run_workers``: ``task(mesh, *args)`` in a group with this mesh, default one dimension. All
    ranks are seeded alike.
    """

    def run(worker: Worker, *args: Any) -> Any:
        torch.manual_seed(0)
        return task(_mesh(shape or (worker.world_size,), names), *args)

    run.__module__ = task.__module__  # which the fork server then has imported before it forks
    return Shared(process_group, run)


@functools.cache
def _mesh(shape: tuple[int, ...], names: tuple[str, ...] | None) -> DeviceMesh:
    return init_device_mesh(TYPE, shape, mesh_dim_names=names)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def backward(result: Tensor, gradient: Tensor | None = None) -> None:
    """``result.backward(gradient)``, typed."""
    torch.autograd.backward(result, gradient)


def gradient_of(tensor: Tensor | nn.Parameter) -> Tensor:
    """Its gradient, whole."""
    assert tensor.grad is not None
    return whole(tensor.grad)


def assert_same_gradients(parallel: nn.Module, alone: nn.Module) -> None:
    """Each parameter of the two has the same gradient."""
    expected = dict(alone.named_parameters())
    for name, parameter in parallel.named_parameters():
        wanted = expected[name].grad
        if wanted is None:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, name
        assert isinstance(parameter.grad, DTensor) == isinstance(parameter, DTensor), name
        torch.testing.assert_close(whole(parameter.grad), wanted, msg=name)


def part(tensor: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """This rank's chunk along a dimension."""
    chunks = tensor.chunk(mesh.size(), dim)
    rank = mesh.get_local_rank()
    return chunks[rank] if rank < len(chunks) else tensor.narrow(dim, 0, 0)
