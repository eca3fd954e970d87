"""Attention on the logical device: one operation where the CPU has one, and the CPU's numbers always."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from spmd.engine.driver import current
from spmd.engine.driver.session import Session
from tests.support.spmd_session import inline_session

pytestmark = pytest.mark.logical_device

CPU: Final = torch.device("cpu")
FUSED: Final = "aten::_scaled_dot_product_flash_attention_for_cpu"


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with inline_session() as (session, _):
        yield session


def _rows(heads: int = 4, length: int = 6, width: int = 8, batch: int = 2) -> Tensor:
    """Of ``(batch, heads, length, width)``, as a model has them: heads are split off a row."""
    return torch.randn(batch, length, heads, width).transpose(1, 2)


def _mask(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
    return (torch.rand(shape) > 0.2) if kind == torch.bool else torch.randn(shape)


ONE_SAMPLE_IS_FUSED: Final = torch.__version__ >= "2.14"
"""PyTorch 2.13 has another kernel for tensors without a dimension for the batch."""

Q: Final = _rows()
CASES: Final[dict[str, tuple[tuple[Any, ...], dict[str, Any], bool]]] = {
    "plain": ((Q, _rows(), _rows()), {}, True),
    "causal": ((Q, _rows(), _rows()), {"is_causal": True, "scale": 0.3}, True),
    "other length": ((Q, _rows(length=9), _rows(length=9)), {}, True),
    "grouped heads": ((Q, _rows(heads=2), _rows(heads=2)), {"enable_gqa": True}, True),
    "mask of numbers": ((Q, _rows(), _rows(), _mask(6, 6)), {}, True),
    "mask of truths": ((Q, _rows(), _rows(), _mask(2, 1, 6, 6, kind=torch.bool)), {}, True),
    "mask that is broadcast": ((Q, _rows(), _rows(), _mask(1, 1, 1, 6)), {}, True),
    "mask with a gradient": ((Q, _rows(), _rows(), _mask(6, 6).requires_grad_()), {}, False),
    "mask of three dimensions": ((Q, _rows(), _rows(), _mask(4, 6, 6)), {}, False),
    "one sample": ((Q[0], Q[1], Q[0]), {}, ONE_SAMPLE_IS_FUSED),
    "one sample with a mask": ((Q[0], Q[1], Q[0], _mask(6, 6)), {}, ONE_SAMPLE_IS_FUSED),
    "one sample with a mask of heads": (
        (Q[0], Q[1], Q[0], _mask(4, 6, 6, kind=torch.bool)),
        {},
        ONE_SAMPLE_IS_FUSED,
    ),
    "rows of one head": ((Q[0, 0], Q[0, 1], Q[1, 0]), {}, False),
    "other width": ((Q, _rows(), _rows(width=5)), {}, False),
    "columns": ((torch.randn(2, 4, 8, 6).transpose(2, 3), Q, Q), {}, False),
}


def _attended(
    where: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, list[Tensor]]:
    """The result, and the gradients of what is attended to."""
    leaves = [
        each.detach().to(where).requires_grad_(place < 3 or each.requires_grad)
        for place, each in enumerate(args)
    ]
    result = scaled_dot_product_attention(*leaves, **kwargs)
    torch.autograd.backward((result * torch.arange(result.shape[-1], device=where)).sum())
    return result, [each.grad for each in leaves if each.grad is not None]


def _recorded(session: Session) -> list[str]:
    return [entry.operator for entry, _ in session.recorder.recording.operations]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_is_that_of_the_cpu(session: Session, case: Any) -> None:
    args, kwargs, fused = case
    session.sync()
    mine, my_gradients = _attended(current.DEVICE, args, kwargs)
    names = _recorded(session)
    assert names.count(FUSED) == names.count(f"{FUSED}_backward") == int(fused)
    assert any("softmax" in name for name in names) is not fused
    result, gradients = _attended(CPU, args, kwargs)
    assert mine.stride() == result.stride()
    for one, other in zip([mine, *my_gradients], [result, *gradients], strict=True):
        torch.testing.assert_close(one.detach().cpu(), other.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_cpu_chooses_the_same(case: Any) -> None:
    (query, key, value, *mask), kwargs, fused = case
    mask = [each.float() if each.dtype == torch.bool else each for each in mask] or [None]
    choice = torch._fused_sdp_choice(query, key, value, *mask, **kwargs)
    assert choice == (SDPBackend.FLASH_ATTENTION if fused else SDPBackend.MATH).value


def test_a_mask_beside_is_causal_is_taken_or_refused_as_on_the_cpu(session: Session) -> None:
    args, kwargs = (Q, Q, Q, _mask(6, 6)), {"is_causal": True}
    if torch.__version__ >= "2.14":
        for where in (CPU, current.DEVICE):
            with pytest.raises(RuntimeError, match="attn_mask should not be set when is_causal=True"):
                _attended(where, args, kwargs)
        return
    expected, gradients = _attended(CPU, args, kwargs)
    mine, my_gradients = _attended(current.DEVICE, args, kwargs)
    for one, other in zip([mine, *my_gradients], [expected, *gradients], strict=True):
        torch.testing.assert_close(one.detach().cpu(), other.detach(), rtol=1e-5, atol=1e-6)


def test_a_mask_of_whole_numbers_is_refused_as_on_the_cpu(session: Session) -> None:
    for where in (CPU, current.DEVICE):
        x, mask = Q.to(where), torch.zeros(6, 6).to(where)
        with pytest.raises(RuntimeError, match="attn_mask dtype"):
            scaled_dot_product_attention(x, x, x, mask.long())


def test_attention_is_one_operation_in_inference_as_well(session: Session) -> None:
    session.sync()
    with torch.inference_mode():
        x = Q.to(current.DEVICE)
        found = scaled_dot_product_attention(x, x, x)
        names = _recorded(session)
        assert names.count(FUSED) == 1
        torch.testing.assert_close(found.cpu(), scaled_dot_product_attention(Q, Q, Q))


def test_dropout_and_a_program_that_asks_for_products_get_them(session: Session) -> None:
    x = Q.to(current.DEVICE)
    session.sync()
    scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    with sdpa_kernel([SDPBackend.MATH]):
        scaled_dot_product_attention(x, x, x)
    names = _recorded(session)
    assert FUSED not in names
    assert sum("softmax" in name for name in names) == 2
