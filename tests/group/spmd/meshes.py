"""Process groups and small models for tests of tensor parallelism."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tests.support.default_device import TYPE
from tests.support.process_groups import process_group
from tests.support.serving import in_standing
from tests.support.workers import Worker

__all__ = ["assert_same_gradients", "backward", "gradient_of", "in_mesh", "part", "whole"]


def in_mesh(
    world_size: int, *shape: int, names: tuple[str, ...] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of ``body(mesh, **parameters)``, run by each rank of a process group that stays, with this
    mesh, default one dimension. All ranks are seeded alike.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def run(worker: Worker, **given: Any) -> None:
            torch.manual_seed(0)
            body(_mesh(shape or (worker.world_size,), names), **given)

        of_worker = inspect.Parameter("worker", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        of_body = list(inspect.signature(body).parameters.values())[1:]
        functools.update_wrapper(run, body)
        run.__signature__ = inspect.Signature([of_worker, *of_body])  # type: ignore[attr-defined]
        return in_standing(process_group, world_size)(run)

    return decorate


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
