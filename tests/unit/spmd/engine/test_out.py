"""What is given as ``out=`` on the logical device gets what it gets on the CPU, or an error says why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from spmd.engine.driver import current
from tests.support.spmd_cases import same
from tests.support.spmd_session import inline_session

pytestmark = pytest.mark.logical_device


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    with inline_session():
        yield


COMPOSED: Final[dict[str, Callable[..., Any]]] = {
    "cond": torch.linalg.cond,
    "diff": torch.diff,
    "hstack": lambda x, **out: torch.hstack((x, x), **out),
    "inner": lambda x, **out: torch.inner(x, x, **out),
    "kron": lambda x, **out: torch.kron(x, x, **out),
    "matmul": lambda x, **out: torch.matmul(x[None], x, **out),
    "matrix_norm": torch.linalg.matrix_norm,
    "matrix_power": lambda x, **out: torch.linalg.matrix_power(x, 1, **out),
    "matrix_rank": torch.linalg.matrix_rank,
    "matrix_rank to a number": lambda x, **out: torch.linalg.matrix_rank(x, 1.5, **out),
    "matrix_rank to a tolerance": lambda x, **out: torch.linalg.matrix_rank(x, atol=x[0, 0], **out),
    "multi_dot": lambda x, **out: torch.linalg.multi_dot([x, x, x], **out),
    "nanmean": torch.nanmean,
    "norm": torch.linalg.norm,
    "svdvals": torch.linalg.svdvals,
    "svd": torch.svd,
    "take_along_dim": lambda x, **out: torch.take_along_dim(x, x.argsort(1), 1, **out),
    "tensordot": lambda x, **out: torch.tensordot(x, x, 1, **out),
}
"""Operators that PyTorch composes of others."""


def matrix(device: torch.device) -> Tensor:
    return torch.tensor([[1.0, 2.0], [3.0, 5.0]], device=device)


@pytest.mark.parametrize("name", COMPOSED)
@pytest.mark.parametrize("kind", ["of the shape", "empty", "part"])
def test_composed_operators_write_their_result(name: str, kind: str) -> None:
    def written(device: torch.device) -> Any:
        function, x = COMPOSED[name], matrix(device)
        owners = []

        def prepared(result: Tensor) -> Tensor:
            shape = (0,) if kind == "empty" else (2, *result.shape) if kind == "part" else result.shape
            owners.append(torch.full(shape, 7, dtype=result.dtype, device=device))
            return owners[-1][1] if kind == "part" else owners[-1]

        made = function(matrix(torch.device("cpu")))
        out = prepared(made) if isinstance(made, Tensor) else tuple(map(prepared, made))
        given_back = function(x, out=out)
        for one, other in zip(pytree.tree_leaves(given_back), pytree.tree_leaves(out), strict=True):
            assert one.shape == other.shape
        return owners, list(pytree.tree_leaves(given_back))

    assert same(written(current.DEVICE), written(torch.device("cpu")), 1e-6)


def test_a_composed_operator_may_write_over_its_argument() -> None:
    x = matrix(current.DEVICE)
    torch.matmul(x, x, out=x)
    assert x.tolist() == [[7.0, 12.0], [18.0, 31.0]]


def test_memory_is_given_another_shape() -> None:
    out = torch.zeros(0, device=current.DEVICE)
    assert torch.empty(2, out=out) is out
    assert out.shape == (2,)


def test_draws_are_of_the_dtype_of_out() -> None:
    ones = torch.ones(3, device=current.DEVICE)
    assert torch.bernoulli(ones, out=torch.zeros(3, dtype=torch.bool, device=current.DEVICE)).all()


@pytest.mark.parametrize("function", [torch.kron, torch.mul])
def test_out_has_no_gradient(function: Any) -> None:
    x, out = matrix(current.DEVICE).requires_grad_(), torch.zeros(4, 4, device=current.DEVICE)
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        function(x, x, out=out)
    assert not out.any()
    with torch.no_grad():
        assert function(x, x, out=out) is out
    assert out.any()


@pytest.mark.parametrize("function", [torch.kron, torch.mul])
def test_out_that_a_gradient_needs_is_missed_there(function: Any) -> None:
    x = matrix(current.DEVICE).requires_grad_()
    out = torch.ones(2, 2, device=current.DEVICE)
    y = (x * out).sum()
    function(out, torch.ones(1, 1, device=current.DEVICE), out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(y)


@pytest.mark.parametrize("function", [torch.kron, torch.mul])
def test_out_of_a_dtype_that_cannot_hold_the_result_is_refused(function: Any) -> None:
    x = matrix(current.DEVICE)
    for dtype in (torch.int64, torch.bool):
        out = torch.zeros(4, 4, dtype=dtype, device=current.DEVICE)
        with pytest.raises(RuntimeError, match="can't be cast to the desired output type"):
            function(x, x, out=out)
        assert not out.any()
        assert out.shape == (4, 4)
    double = torch.zeros(0, dtype=torch.float64, device=current.DEVICE)
    assert function(x, x, out=double).dtype == torch.float64


@pytest.mark.parametrize("function", [torch.kron, torch.mul])
def test_out_on_the_cpu_is_refused(function: Any) -> None:
    x = matrix(current.DEVICE)
    with pytest.raises(TypeError, match="expected a tensor on spmd:0, got one on cpu"):
        function(x, x, out=torch.zeros(2, 2))
