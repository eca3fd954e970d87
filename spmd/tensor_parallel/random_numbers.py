"""Random numbers for sharded tensors: those that one process would draw.

PyTorch draws each shard from the generator of its rank: equal seeds give equal shards, which one process
would never draw. Here every rank draws the whole tensor, of which it keeps its shard. So the generators of
all ranks, if seeded in the same way, keep the state that the one of a single process would have, and later
draws for replicated tensors agree as well. The cost is time and temporary memory for the whole tensor.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from spmd.tensor_parallel.errors import ParallelError
from spmd.tensor_parallel.resharding import chunk
from spmd.tensor_parallel.site import Site
from spmd.torch_internals import DropoutNd, DTensorSpec, dtensor_operators

__all__ = ["draw_as_one_process", "draw_parts", "dropout_mask", "warn_if_seeded_differently"]

_IN_PLACE: Final = (
    "normal_",
    "uniform_",
    "bernoulli_.float",
    "exponential_",
    "log_normal_",
    "cauchy_",
    "geometric_",
    "random_",
    "random_.to",
    "random_.from",
)
_NEW: Final = ("rand_like", "randn_like", "randint_like", "randint_like.low_dtype")
_DROPOUT: Final = ("native_dropout",)
"""Operators of dropout on accelerators."""
_ASKING: Final = ("any",)
"""Operators by whose results ``nn.init`` decides whether to draw again."""

_STREAM: Final = 0x9E3779B97F4A7C15


def dropout_mask(
    local: Tensor,
    p: float,
    dim: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    site: Site,
    *,
    independent: bool,
) -> Tensor:
    """This rank's part of a dropout mask: 0 with probability ``p``, else ``1 / (1 - p)``.

    Args:
        local: the part of the activations, for its shape and dtype.
        p: in ``[0, 1)``.
        dim: the dimension along which the activations are sharded.
        shape: of the whole.
        strides: of the whole; None if it has no gaps, and its dimensions are in the order of the part's.
        site: of the dropout.
        independent: draw only the part, from a stream that is this rank's own. One number is drawn from the
            generator for it, so that recomputation in backward gives the same mask again.
    """
    if independent:
        mask = torch.empty_like(local).bernoulli_(1 - p, generator=_own_stream(site.rank, local.device))
    else:
        # As the device does it: not every one draws a dropout's mask by bernoulli_.
        strides = strides or _strides_without_gaps(shape, torch.empty_like(local, device="meta").stride())
        whole = nn.functional.dropout(local.new_empty_strided(shape, strides).fill_(1), p)
        length, offset = chunk(shape[dim], site.size, site.rank)
        return whole.narrow(dim, offset, length)
    return mask.div_(1 - p)


def _strides_without_gaps(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor of this shape whose dimensions lie in memory in the order of other strides."""
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (order[dim], -dim)):
        strides[dim], step = step, step * max(shape[dim], 1)
    return tuple(strides)


def _own_stream(part: int, device: torch.device) -> torch.Generator:
    """A generator for one part of a tensor, for which one number is drawn from the common one."""
    seed = int(torch.randint(2**62, (), device="cpu").item()) ^ ((part + 1) * _STREAM % 2**62)
    return torch.Generator(device).manual_seed(seed)


def warn_if_seeded_differently(module: nn.Module, mesh: DeviceMesh) -> None:
    """Ranks whose generators differ would drop different elements of what is replicated, and drift apart.

    All ranks of the mesh call it; it communicates if the module has dropout.
    """
    if mesh.size() == 1 or not any(isinstance(each, DropoutNd) and each.p for each in module.modules()):
        return
    states = [torch.get_rng_state()]
    if mesh.device_type != "cpu":
        states.append(torch.get_device_module(mesh.device_type).get_rng_state())
    state = b"".join(each.numpy().tobytes() for each in states)
    mine = torch.tensor([int.from_bytes(hashlib.sha256(state).digest()[:7], "little")], device="cpu")
    seen = [torch.empty_like(mine) for _ in range(mesh.size())]
    dist.all_gather(seen, mine, group=mesh.get_group())
    if any(each != mine for each in seen):
        warnings.warn(
            f"rank {dist.get_rank()}: the ranks of {mesh} have different random generators, so dropout will "
            "not drop the same elements of replicated tensors: call torch.manual_seed alike on all of them",
            stacklevel=4,
        )


def draw_as_one_process() -> None:
    """From now on in this process, random numbers for ``DTensor`` s are those that one process would draw.

    ``parallelize_module`` calls it. It makes ``init.normal_(parameter)`` right for a model that was
    parallelized on the meta device, and dropout on ``DTensor`` s, wherever PyTorch has no handler of its own.
    ``any`` of a ``DTensor`` is that of the whole on all ranks from now on, which communicates.
    """
    handlers: Any = dtensor_operators._custom_op_handlers
    of_operators = ((_IN_PLACE, _draw_in_place), (_NEW, _draw_new), (_DROPOUT, _drop_out), (_ASKING, _any))
    for names, handler in of_operators:
        for name in names:
            packet, _, overload = name.partition(".")
            handlers.setdefault(getattr(getattr(torch.ops.aten, packet), overload or "default"), handler)


_by_parts: Final[ContextVar[bool]] = ContextVar("by_parts", default=False)


@contextmanager
def draw_parts() -> Iterator[None]:
    """Inside, a rank that fills a sharded tensor draws its part only, from a stream of its own.

    The whole is nowhere then, and is not what one process would draw. On one-dimensional meshes.
    """
    token = _by_parts.set(True)
    try:
        yield
    finally:
        _by_parts.reset(token)


def _draw_in_place(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    drawn, *rest = args
    local = drawn._local_tensor
    if _by_parts.get():
        (placement,) = _placements(drawn._spec)
        part = drawn.device_mesh.get_local_rank() if placement.is_shard() else 0
        operator(local, *rest, **kwargs | {"generator": _own_stream(part, local.device)})
    elif not local.is_meta:
        whole = operator(_whole_of(drawn), *rest, **kwargs)
        local.copy_(_shard_of(whole, drawn._spec))
    return cast("DTensor", drawn)


def _draw_new(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    like, *rest = args
    whole = operator(_whole_of(like), *rest, **kwargs)
    return distribute_tensor(whole, like.device_mesh, _placements(like._spec), src_data_rank=None)


def _drop_out(operator: Any, args: tuple[Any, ...], _: dict[str, Any]) -> tuple[DTensor, DTensor]:
    dropped, *rest = args
    local = dropped._local_tensor
    factors, kept = operator(_whole_of(dropped).fill_(1), *rest)
    placements, strides = _placements(dropped._spec), factors.stride()

    def sharded(part: Tensor) -> DTensor:
        return DTensor.from_local(
            part, dropped.device_mesh, placements, run_check=False, shape=dropped.shape, stride=strides
        )

    return sharded(local * _shard_of(factors, dropped._spec)), sharded(_shard_of(kept, dropped._spec))


def _any(operator: Any, args: tuple[Any, ...], _: dict[str, Any]) -> DTensor:
    """Return whether any element is true, as a replicated tensor.

    PyTorch leaves it partial, and ``bool`` of it is about this rank's shard: ``nn.init.trunc_normal_`` would
    draw again on some ranks only, and their generators would differ.
    """
    (asked,) = args
    mesh = asked.device_mesh
    replicated = (Replicate(),) * mesh.ndim
    if any(placement.is_partial() for placement in asked.placements):
        asked = asked.redistribute(placements=replicated)
    found = [Replicate() if placement.is_replicate() else Partial() for placement in asked.placements]
    part = DTensor.from_local(operator(asked._local_tensor), mesh, found, run_check=False)
    return part.redistribute(placements=replicated)


def _whole_of(sharded: DTensor) -> Tensor:
    """Return a new tensor with the memory layout of the whole.

    Which number an element gets depends on it: most operators draw in the order of memory, and some, such as
    CUDA's dropout of memory with gaps, in the order of the shape.
    """
    return sharded._local_tensor.new_empty_strided(sharded.shape, sharded.stride())


def _shard_of(whole: Tensor, spec: DTensorSpec) -> Tensor:
    return distribute_tensor(whole, spec.mesh, _placements(spec), src_data_rank=None)._local_tensor


def _placements(spec: DTensorSpec) -> tuple[Any, ...]:
    if any(placement.is_partial() for placement in spec.placements):
        raise ParallelError(
            f"rank {dist.get_rank()}: expected a sharded or replicated tensor to draw, got {spec.placements}"
        )
    return spec.placements
