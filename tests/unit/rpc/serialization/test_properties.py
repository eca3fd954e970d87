"""Whatever is built from containers, scalars and tensors arrives equal, with its identities."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from rpc.serialization.memory import layout_of
from rpc.serialization.safe import AllowList
from tests.support.effort import PROFILE
from tests.unit.rpc.serialization.callees import null
from tests.unit.rpc.serialization.journey import safely, send, send_call

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of all sorts of sizes, strides and offsets."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    seed = draw(st.integers(0, 1000))
    scale = draw(st.sampled_from([1, 1, 40]))
    if shape:
        shape[0] *= scale
    tensor = (torch.arange(math.prod(shape)).add(seed).remainder(7) - 3).reshape(shape).to(dtype)
    for _ in range(draw(st.integers(0, 3))):
        tensor = draw(st.sampled_from(VIEWS))(tensor)
    if draw(st.booleans()) and dtype.is_floating_point and dtype.itemsize > 1:
        tensor = tensor.detach().requires_grad_()
    return tensor


VIEWS = [
    lambda t: t.permute(list(reversed(range(t.dim())))),
    lambda t: t[::2] if t.dim() else t,
    lambda t: t[..., 1:] if t.dim() else t,
    lambda t: t.unsqueeze(0).expand(3, *t.shape),
    lambda t: t.unsqueeze(-1),
    lambda t: t.reshape(-1).unfold(0, 3, 1) if t.numel() > 3 else t,
    lambda t: t.conj(),
]

numbers = st.booleans() | st.integers() | st.floats() | st.complex_numbers()
scalars = st.none() | numbers | st.text() | st.binary()
keys = st.integers() | st.text() | st.tuples(st.integers(), st.text())
values = st.recursive(
    scalars | tensors(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner, max_size=4)
        | st.sets(keys, max_size=4)
        | st.frozensets(keys, max_size=4)
    ),
    max_leaves=12,
)


def steps(tensor: torch.Tensor) -> list[int]:
    """The strides that mean something."""
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def are_gaps_closed(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether a tensor is without the gaps that were there."""
    there = layout_of(theirs.shape, theirs.stride())
    return there.span > there.distinct and layout_of(mine.shape, mine.stride()).dense


def same(mine: Any, theirs: Any) -> bool:
    """Whether two objects are equal in every respect that must survive."""
    if type(mine) is not type(theirs):
        return False
    if isinstance(mine, torch.Tensor):
        return (
            mine.dtype is theirs.dtype
            and mine.shape == theirs.shape
            and mine.requires_grad == theirs.requires_grad
            and mine.is_conj() == theirs.is_conj()
            and (not mine.numel() or steps(mine) == steps(theirs) or are_gaps_closed(mine, theirs))
            and torch.equal(mine.to(torch.complex128), theirs.to(torch.complex128))
        )
    if isinstance(mine, (list, tuple)):
        return len(mine) == len(theirs) and all(map(same, mine, theirs))
    if isinstance(mine, dict):
        return list(mine) == list(theirs) and all(map(same, mine.values(), theirs.values()))
    if isinstance(mine, complex):
        return same(mine.real, theirs.real) and same(mine.imag, theirs.imag)
    if isinstance(mine, float):
        return math.copysign(1, mine) == math.copysign(1, theirs) and (
            mine == theirs or (math.isnan(mine) and math.isnan(theirs))
        )
    return bool(mine == theirs)


@PROFILE
@given(values)
def test_object_arrives_equal(value: Any) -> None:
    assert same(send(value), value)


@PROFILE
@given(values)
def test_object_arrives_equal_in_safe_mode(value: Any) -> None:
    assert same(send(value, at=safely(AllowList())), value)


@PROFILE
@given(st.lists(values, max_size=4), st.dictionaries(st.text(min_size=1), values, max_size=3))
def test_arguments_arrive_equal(args: list[Any], kwargs: dict[str, Any]) -> None:
    func, received_args, received_kwargs = send_call(null, args, kwargs)
    assert func is null
    assert same(received_args, tuple(args))
    assert same(received_kwargs, kwargs)


@PROFILE
@given(st.lists(tensors(), min_size=1, max_size=3), st.lists(st.integers(0, 2), max_size=6))
def test_identity_is_kept(parts: list[torch.Tensor], picks: list[int]) -> None:
    objects = [parts[pick % len(parts)] for pick in picks]
    arrived = send([objects, tuple(objects)])
    for one, other in ((i, j) for i in range(len(picks)) for j in range(len(picks))):
        assert (arrived[0][one] is arrived[1][other]) == (objects[one] is objects[other])
