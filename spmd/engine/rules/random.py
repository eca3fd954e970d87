"""Random numbers: every worker draws the whole tensor from a generator that is the same on all, and keeps its
shard.

So the numbers are those that one process would draw. The price is time and memory for the whole tensor, for a
moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Shard

from spmd.engine.program.redistribution import take_shard
from spmd.engine.rules.local_rules import Local, Site, local_rule
from spmd.engine.rules.placement_rules import OperatorCall, Row, placement_rule
from spmd.torch_internals import is_dense

__all__ = ["is_random", "with_generator"]

aten: Any = torch.ops.aten

_FILLS: Final = {
    "uniform": "uniform_",
    "normal_functional": "normal_",
    "exponential": "exponential_",
    "log_normal": "log_normal_",
    "cauchy": "cauchy_",
    "geometric": "geometric_",
    "random": "random_",
    "random.from": "random_",
    "random.to": "random_",
    "bernoulli.p": "bernoulli_",
}
"""Give a tensor of the argument's shape."""

_LIKE: Final = {
    "rand_like": "uniform_",
    "randn_like": "normal_",
    "randint_like": "",
    "randint_like.low_dtype": "",
}


def is_random(op: Any) -> bool:
    """Whether an operator draws."""
    return torch.Tag.nondeterministic_seeded in op.tags


@placement_rule(*_FILLS, *_LIKE, "native_dropout")
def _rows(call: OperatorCall) -> list[Row]:
    results = 2 if call.op.name().endswith("dropout") else 1
    dims = range(len(call.tensors[0].shape))
    return [Row((Shard(dim),), (Shard(dim),) * results) for dim in dims]


def _whole(site: Site, dtype: torch.dtype | None = None) -> Tensor:
    """Return a new tensor, with the memory layout that one process would use: numbers are drawn in the order
    of memory.

    That is the layout of the result's strides, where they are used: those of an argument are of its value,
    whose memory layout may differ from that of the user's tensor.
    """
    meta = site.results[0] or site.call.tensors[0]
    if 0 in meta.stride:
        return torch.empty(meta.shape, dtype=dtype or meta.dtype)
    return torch.empty_strided(meta.shape, meta.stride, dtype=dtype or meta.dtype)


def _whole_in_place(site: Site) -> Tensor:
    """Like ``_whole``, for operators that fill a tensor: a view has the gaps of its base."""
    meta = site.call.tensors[0]
    if 0 in meta.stride:
        return torch.empty(meta.shape, dtype=meta.dtype)
    whole = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype)
    return _whole(site) if is_dense(whole) else whole


def _ones_as_given(site: Site) -> Tensor:
    """Like ``_whole``, with ones, for operators of a device that read a tensor.

    They see whether its elements are spread or repeated in memory. Assumed of CUDA's dropout: it draws in the
    order of memory, several elements at a time, where there are no gaps, and else in the order of the shape;
    and the tensor on one device would begin where aligned memory does, as this one.
    """
    meta = site.call.tensors[0]
    given = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype)
    return (_whole(site, meta.dtype) if is_dense(given) else given).fill_(1)


@local_rule(*_FILLS)
def _fill(site: Site) -> Local:
    layout = site.call.tensors[0].layout
    fill = getattr(Tensor, _FILLS[site.call.op.name().removeprefix("aten::")])
    kwargs = site.kwargs | {"generator": site.generator}

    def draw(_: Tensor, *args: Any, **given: Any) -> Tensor:
        return take_shard(fill(_whole_in_place(site), *args, **given), layout, site.rank)

    return Local(draw, site.args, kwargs)


@local_rule(*_LIKE)
def _like(site: Site) -> Local:
    layout = site.call.tensors[0].layout
    name = site.call.op.name().removeprefix("aten::")
    dtype, generator = site.kwargs.get("dtype"), site.generator

    def draw(_: Tensor, *bounds: int) -> Tensor:
        whole = _whole(site, dtype)
        if bounds:
            low, high = bounds if len(bounds) == 2 else (0, *bounds)
            whole.random_(low, high, generator=generator)
        else:
            getattr(whole, _LIKE[name])(generator=generator)
        return take_shard(whole, layout, site.rank)

    return Local(draw, site.args, {})


@local_rule("native_dropout")
def _dropout(site: Site) -> Local:
    meta, generator = site.call.tensors[0], site.generator

    def dropout(local: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        if train is False or p == 0:
            return local.clone(), torch.ones_like(local, dtype=torch.bool)
        if p == 1:
            return torch.zeros_like(local), torch.zeros_like(local, dtype=torch.bool)
        if not local.is_cpu:  # whose own operator draws otherwise
            with _as_default(generator):
                factors, kept = aten.native_dropout(_ones_as_given(site), p, True)
            return (
                local * take_shard(factors, meta.layout, site.rank),
                take_shard(kept, meta.layout, site.rank),
            )
        whole = _whole(site, torch.bool).bernoulli_(1 - p, generator=generator)
        mask = take_shard(whole, meta.layout, site.rank)
        return (local * mask).mul_(1 / (1 - p)), mask

    return Local(dropout, site.args, site.kwargs)


@contextmanager
def _as_default(generator: torch.Generator) -> Iterator[None]:
    """Inside, operations that draw from the default generator of this one's device draw from this one."""
    if generator.device.type == "cpu":
        default: Any = torch
        where: tuple[torch.device, ...] = ()
    else:
        default, where = torch.get_device_module(generator.device), (generator.device,)
    before = default.get_rng_state(*where)
    default.set_rng_state(generator.get_state(), *where)
    try:
        yield
        generator.set_state(default.get_rng_state(*where))
    finally:
        default.set_rng_state(before, *where)


def with_generator(site: Site) -> Local:
    """Run any other operator that draws, on whole tensors."""
    op, generator = site.call.op, site.generator
    if any(argument.name == "generator" for argument in op._schema.arguments):
        return Local(op, site.args, site.kwargs | {"generator": generator})
    packet = getattr(aten, op._schema.name.removeprefix("aten::"))
    named = {"default": "generator", "low": "low_generator", "names": "generator_with_names"}
    overload = named.get(op._overloadname, "")
    if overload in packet.overloads():
        return Local(getattr(packet, overload), site.args, site.kwargs | {"generator": generator})

    def draw(*args: Any, **kwargs: Any) -> Any:
        with _as_default(generator):
            return op(*args, **kwargs)

    return Local(draw, site.args, site.kwargs)
