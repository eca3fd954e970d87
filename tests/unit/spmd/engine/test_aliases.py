"""Views and writes through them: random programs on the logical device and on the CPU end alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from spmd.engine.driver import current
from spmd.engine.driver.aliases import as_strided_steps
from spmd.engine.program.metas import Spec
from tests.support.effort import PROFILE, examples
from tests.support.spmd_session import inline_session

pytestmark = pytest.mark.logical_device

View = Callable[[Tensor, int, int], Tensor]


def _dim(x: Tensor, a: int) -> int:
    return a % x.dim()


def _merged(x: Tensor, a: int, b: int) -> Tensor:
    return x.reshape(-1) if x.is_contiguous() else x


def _sliced(x: Tensor, a: int, b: int) -> Tensor:
    length = x.shape[_dim(x, a)]
    begin = b % max(length, 1)
    index = [slice(None)] * x.dim()
    index[_dim(x, a)] = slice(begin, None, 1 + b % 3)
    return x[tuple(index)]


def _strided(x: Tensor, a: int, b: int) -> Tensor:
    if x.requires_grad and not x.is_contiguous():
        return x  # of elements that x does not show, the CPU forgets gradients, unless the base is written to
    return torch.as_strided(x, (2,), (1,), x.storage_offset()) if x.numel() > 4 else x


def _resize(x: Tensor, y: Tensor, a: int) -> None:
    """Resize a tensor. Memory that is added has no defined content, and is filled."""
    count = x.numel()
    x.resize_(max(a, 1), 2 + a)
    x.view(-1)[count:] = a


VIEWS: Final[list[View]] = [
    lambda x, a, b: x.transpose(_dim(x, a), _dim(x, b)),
    lambda x, a, b: x.select(_dim(x, a), b % x.shape[_dim(x, a)]) if x.dim() > 1 and x.numel() else x,
    _sliced,
    lambda x, a, b: x.unsqueeze(_dim(x, a)),
    lambda x, a, b: x.squeeze(),
    _merged,
    lambda x, a, b: torch.split(x, 1 + b % 3, _dim(x, a))[-1],
    lambda x, a, b: x.chunk(2, _dim(x, a))[0],
    lambda x, a, b: x.unbind(_dim(x, a))[-1] if x.dim() > 1 and x.numel() else x,
    lambda x, a, b: x.detach(),
    lambda x, a, b: x.diagonal(0, 0, 1) if x.dim() > 1 else x,
    lambda x, a, b: x.expand(2, *x.shape),
    lambda x, a, b: x.unfold(0, 1 + b % x.shape[0], 1 + a) if x.numel() else x,
    _strided,
    lambda x, a, b: x.movedim(0, -1),
    lambda x, a, b: x.view(x.shape),
]

WRITES: Final[list[Callable[[Tensor, Tensor, int], Any]]] = [
    lambda x, y, a: x.add_(a),
    lambda x, y, a: x.mul_(a),
    lambda x, y, a: x.zero_(),
    lambda x, y, a: x.copy_(y.reshape(-1)[:1].squeeze().clone() if y.numel() else x.clone()),
    lambda x, y, a: x.copy_(y.clone()) if y.shape == x.shape else x.fill_(a),
    lambda x, y, a: x.__setitem__(0, a) if x.dim() and x.shape[0] else None,
    lambda x, y, a: x.clamp_(max=a),
    lambda x, y, a: torch.add(x, 1, out=x),
    lambda x, y, a: torch._foreach_add_([x], [x.clone()]),
    lambda x, y, a: x.masked_fill_(x > a, -1.0),
    _resize,
    lambda x, y, a: (
        x.index_fill_(0, torch.zeros(1, dtype=torch.int64, device=x.device), a)
        if x.dim() and x.shape[0]
        else None
    ),
]


def _overlaps(x: Tensor) -> bool:
    """Whether two elements of a tensor may be one in memory, so that it cannot be written to."""
    numbers = torch.arange(1000).as_strided(x.shape, x.stride(), 0).reshape(-1)
    return len(set(numbers.tolist())) < numbers.numel()


Step = tuple[int, int, int, int, int]
steps = st.tuples(*[st.integers(0, 50)] * 5)


def _run(program: list[Step], where: torch.device, keep_gradients: bool) -> list[Any]:
    """The program's tensors at its end, and the gradient of what it began with."""
    leaf = torch.arange(24.0).reshape(2, 3, 4).to(where).requires_grad_(keep_gradients)
    tensors = [leaf * 1]
    for kind, which, other, a, b in program:
        x, y = tensors[which % len(tensors)], tensors[other % len(tensors)]
        if kind % 3:
            if x.dim():
                tensors.append(VIEWS[kind % len(VIEWS)](x, a % 5, b % 7))
        else:
            plain = torch.empty_strided(x.shape, x.stride())
            if not _overlaps(plain):
                WRITES[(kind // 3) % len(WRITES)](x, y, a % 5)
    found: list[Any] = [each.detach().cpu() for each in tensors]
    shapes = [
        (
            tuple(each.shape),
            [step for step, length in zip(each.stride(), each.shape, strict=True) if length > 1],
            each.storage_offset(),
        )
        for each in tensors
    ]
    if keep_gradients:
        total: Any = sum((each * each).sum() for each in tensors if each.requires_grad)
        total.backward()
        found.append(None if leaf.grad is None else leaf.grad.cpu())
    return [*found, shapes]


def _outcome(program: list[Step], where: torch.device, keep_gradients: bool) -> list[Any] | str:
    try:
        return _run(program, where, keep_gradients)
    except RuntimeError as error:
        return type(error).__name__


def _same(given: Any, expected: Any) -> bool:
    if isinstance(given, Tensor) and isinstance(expected, Tensor):
        return torch.equal(given, expected)
    if isinstance(given, list) and isinstance(expected, list):
        return len(given) == len(expected) and all(map(_same, given, expected))
    return bool(given == expected)


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    """One for all examples, so that most of what they do is known."""
    with inline_session():
        yield


@settings(PROFILE, max_examples=examples(60))
@given(st.lists(steps, min_size=2, max_size=12))
def test_random_views_and_writes_end_as_on_the_cpu(program: list[Step]) -> None:
    found = _outcome(program, current.DEVICE, keep_gradients=False)
    assert _same(found, _outcome(program, torch.device("cpu"), keep_gradients=False))


@settings(PROFILE, max_examples=examples(40))
@given(st.lists(steps, min_size=2, max_size=10))
def test_gradients_through_random_views_and_writes_are_those_of_the_cpu(program: list[Step]) -> None:
    found = _outcome(program, current.DEVICE, keep_gradients=True)
    assert _same(found, _outcome(program, torch.device("cpu"), keep_gradients=True))


OVERLAPPING: Final[dict[str, View]] = {
    "expand": lambda x, a, b: x.expand(2, *x.shape)[0],
    "expand twice": lambda x, a, b: x.expand(2, 3, *x.shape)[1, 0],
    "expand in the middle": lambda x, a, b: x.unsqueeze(1).expand(-1, 2, -1, -1)[:, 1, ::2],
    "expand, moved and sliced": lambda x, a, b: x.expand(3, *x.shape).transpose(0, 1)[:, 2:],
    "expand, its diagonal": lambda x, a, b: x.expand(2, *x.shape).diagonal(0, 0, 1),
    "transpose before": lambda x, a, b: x.transpose(0, 2).expand(2, 4, 3, 2)[1].flatten(1),
    "unfold": lambda x, a, b: x.unfold(2, 2, 1)[:, :, 1],
    "negative bit": lambda x, a, b: torch._neg_view(x.expand(2, *x.shape))[0],
}


@pytest.mark.parametrize("view", OVERLAPPING.values(), ids=OVERLAPPING)
def test_a_write_to_a_part_of_a_view_that_repeats_elements_changes_them(view: View) -> None:
    def written(where: torch.device) -> list[Tensor]:
        leaf = torch.arange(24.0).reshape(2, 3, 4).to(where).requires_grad_()
        x = leaf * 1
        repeated = x.expand(2, *x.shape)
        part = view(x, 0, 0)
        part.mul_(3)
        torch.autograd.backward((x * repeated).sum())
        assert leaf.grad is not None
        return [each.detach().cpu() for each in (x, repeated, part, leaf.grad)]

    assert _same(written(current.DEVICE), written(torch.device("cpu")))


def test_a_write_to_all_of_a_view_that_repeats_elements_is_refused_unless_it_fills() -> None:
    x = torch.arange(3.0).to(current.DEVICE)
    repeated = x.expand(2, 3)
    writes: list[Callable[[], Tensor]] = [lambda: repeated.add_(1), lambda: repeated.copy_(torch.ones(2, 3))]
    for write in writes:
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
            write()
    assert torch.equal(x.cpu(), torch.arange(3.0))
    repeated.fill_(5)
    assert torch.equal(x.cpu(), torch.full((3,), 5.0))
    assert torch.equal(repeated.cpu(), torch.full((2, 3), 5.0))


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    order=st.randoms(use_true_random=False),
    steps=st.lists(st.integers(1, 2), min_size=3, max_size=3),
    starts=st.lists(st.integers(0, 3), min_size=3, max_size=3),
)
def test_strided_views_of_a_base_are_found_as_slices_and_permutations(
    shape: list[int], order: Any, steps: list[int], starts: list[int]
) -> None:
    base = torch.arange(torch.Size(shape).numel()).reshape(shape)
    view = base
    for dim, length in enumerate(shape):
        view = view[(slice(None),) * dim + (slice(starts[dim] % length, None, steps[dim]),)]
    dims = list(range(len(shape)))
    order.shuffle(dims)
    view = view.permute(dims)
    spec = Spec.of(tuple(base.shape), base.stride(), base.dtype)
    found = as_strided_steps(spec, view.shape, view.stride(), int(view.storage_offset()))
    assert found is not None
    result = base
    for operator, args in found:
        result = operator(result, *args)
    assert torch.equal(result, view)
