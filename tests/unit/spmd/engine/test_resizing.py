"""Tensors that share memory show what they show on the CPU after one of them has been resized."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from spmd.engine.driver import current
from tests.support.spmd_cases import same
from tests.support.spmd_session import inline_session

pytestmark = pytest.mark.logical_device

Device = torch.device | str


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with inline_session():
        yield


def numbers(count: int, device: Device) -> Tensor:
    return torch.arange(float(count), device=device)


def fewer_elements(device: Device) -> Any:
    x = numbers(6, device)
    rows, detached = x.view(3, 2), x.detach()
    x.resize_(2, 2).mul_(10)
    rows[0, 1] += 1
    return x, rows, detached, x.stride()


def more_elements(device: Device) -> Any:
    x = numbers(4, device)
    rows, part, detached = x.view(2, 2), x[1:3], x.detach()
    x.resize_(6)[4:] = 0
    x.add_(10)
    detached.mul_(2)
    part.sub_(1)
    return x, rows, part, detached


def fewer_and_more(device: Device) -> Any:
    x = numbers(6, device)
    rows = x.view(3, 2)
    x.resize_(0)
    rows.add_(1)
    return x.resize_(2, 3), rows


def a_view(device: Device) -> Any:
    base = numbers(6, device)
    part = base[2:4]
    part.resize_(4).add_(10)
    part.resize_(1).mul_(2)
    return base, part


def a_view_beyond_its_base(device: Device) -> Any:
    base = numbers(6, device)
    rows, part = base.view(2, 3), base[4:]
    part.resize_(3)[2] = 0
    part.add_(10)
    rows.mul_(2)
    return base, rows, part, part.storage_offset()


def several_tensors_in_turn(device: Device) -> Any:
    base = numbers(4, device)
    part = base[1:]
    last = part[1:]
    base.resize_(6)[4:] = 0
    part.resize_(9)[5:] = 1
    last.mul_(3)
    torch._foreach_add_([base, part], [base, part])
    return base, part, last, base.as_strided((3,), (2,), 1), part.as_strided((4,), (2,), 2)


def bits_in_another_dtype(device: Device) -> Any:
    x = torch.arange(4, dtype=torch.int32, device=device)
    halves = x.view(torch.float32).view(torch.int16)
    x.resize_(6)[4:] = 0
    x.add_(1)
    return x, halves, halves.as_strided((2,), (2,), 4)


def conjugates(device: Device) -> Any:
    x = numbers(4, device) * (1 + 2j)
    turned = x[2:].conj().as_strided((2,), (1,), 2)
    x.resize_(2, 2).add_(1)
    return turned.resolve_conj(), turned.as_strided((1,), (1,), 3).resolve_conj()


def a_transposed_tensor(device: Device) -> Any:
    turned = numbers(6, device).view(2, 3).t()
    column = turned[:, 1]
    turned.resize_(8)[6:] = 0
    turned.add_(1)
    return turned, column.clone()


def memory_of_a_transposed_result(device: Device) -> Any:
    x = numbers(6, device).view(2, 3).t() + 1
    x.as_strided((2, 2), (2, 1), 1).mul_(10)
    x.as_strided((2,), (4,), 0).add_(100)
    return x


def a_format(device: Device) -> Any:
    x, images = numbers(16, device), torch.zeros(1, 2, 2, 2, device=device)
    pairs = x.view(8, 2)
    x.resize_as_(images.to(memory_format=torch.channels_last), memory_format=torch.preserve_format).mul_(2)
    once = x.stride()
    x.resize_(1, 2, 2, 2, memory_format=torch.contiguous_format).add_(1)
    return x, pairs, once, x.stride()


def in_inference(device: Device) -> Any:
    x = numbers(4, device)
    part = x[1:]
    with torch.inference_mode():
        x.resize_(6)[4:] = 0
        x.add_(1)
    return x, part, x.is_inference(), x._version


def out(function: Callable[..., Any], dtype: torch.dtype = torch.float32) -> Callable[[Device], Any]:
    """What a tensor, a view of it and its base are after one or the other was given as ``out=``."""

    def run(device: Device) -> Any:
        found: list[Any] = []
        for length in (10, 2):
            whole = torch.full((length,), 7, dtype=dtype, device=device)
            rows, detached = whole.view(-1, 2), whole.detach()
            function(numbers(6, device).view(2, 3), out=whole)
            whole.add_(1)
            found += [whole, rows, detached, whole.stride()]
        base = torch.full((12,), 7, dtype=dtype, device=device)
        function(numbers(6, device).view(2, 3), out=base[1:3])
        return [*found, base]

    return run


PROGRAMS: Final[dict[str, Callable[[Device], Any]]] = {
    each.__name__: each
    for each in (
        *(fewer_elements, more_elements, fewer_and_more, a_view, a_view_beyond_its_base),
        *(several_tensors_in_turn, bits_in_another_dtype, conjugates, a_transposed_tensor, a_format),
        *(memory_of_a_transposed_result, in_inference),
    )
} | {
    "out of add": out(lambda x, out: torch.add(x, 1, out=out)),
    "out of add, transposed": out(lambda x, out: torch.add(x.t(), 1, out=out)),
    "out of add to another dtype": out(lambda x, out: torch.add(x, 1, out=out), torch.float64),
    "out of cat": out(lambda x, out: torch.cat([x, x], out=out)),
    "out of mm": out(lambda x, out: torch.mm(x.t(), x, out=out)),
    "out of matmul, which is composed": out(lambda x, out: torch.matmul(x, x.t(), out=out)),
    "out of nonzero, whose shape depends on values": out(
        lambda x, out: torch.nonzero(x > 2, out=out), torch.int64
    ),
    "out of sum": out(lambda x, out: torch.sum(x, 1, out=out)),
    "outs of sort": out(
        lambda x, out: torch.sort(x, 1, out=(out, torch.empty(0, dtype=torch.int64, device=x.device)))
    ),
    "out as detach": out(lambda x, out: torch.mul(x, 2, out=out.detach())),
    "out as data": out(lambda x, out: torch.mul(x, 2, out=out.data)),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_shared_memory_is_seen_by_all(name: str) -> None:
    assert same(PROGRAMS[name](current.DEVICE), PROGRAMS[name]("cpu"), 0)


@pytest.mark.parametrize(
    ("use", "advice"),
    [
        (lambda x: x.untyped_storage().resize_(0), r"x.resize_\(\)"),
        (lambda x: x.untyped_storage().fill_(0), r"x.copy_\(\)"),
        (lambda x: x.untyped_storage().clone(), r"x.clone\(\)"),
        (lambda x: x.set_(x.clone().untyped_storage()), r"x.set_\(other\)"),
        (lambda x: x.set_(x.clone(), 1, (2,), (1,)), r"as_strided\(size, stride, offset\)"),
        (lambda x: x.view(torch.int32).resize_(2), r"clone\(\)"),
    ],
    ids=["resize_", "fill_", "clone", "set_ to a storage", "set_ with an offset", "resize_ in another dtype"],
)
def test_storages_are_refused_with_advice(use: Callable[[Tensor], Any], advice: str) -> None:
    x = numbers(4, current.DEVICE)
    with pytest.raises(NotImplementedError, match=advice):
        use(x)
    assert x.untyped_storage().nbytes() == 16
    assert x.tolist() == [0, 1, 2, 3]


def test_elements_in_the_gaps_of_memory_are_refused() -> None:
    x = torch.empty_strided((2, 2), (3, 1), device="spmd")
    x.copy_(numbers(4, "spmd").view(2, 2))
    uses: tuple[Callable[[], object], ...] = (lambda: x.as_strided((2,), (3,), 0), lambda: x.resize_(6))
    for use in uses:
        with pytest.raises(NotImplementedError, match=r"whose memory has gaps .* by \.contiguous\(\)"):
            use()
