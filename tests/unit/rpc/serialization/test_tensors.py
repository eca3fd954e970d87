from __future__ import annotations

from typing import Any

import pytest
import torch

from rpc.errors import SerializationError
from rpc.serialization.memory import INLINE_BYTES, inline_limit
from rpc.serialization.safe import AllowList
from tests.unit.rpc.serialization.callees import null
from tests.unit.rpc.serialization.journey import CALLEE, PICKLES, SERIALIZER, safely, send, send_call

QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)} - QUANTIZED, key=str
)
SIZES = [3, INLINE_BYTES, inline_limit(1)]


def of_dtype(dtype: torch.dtype, count: int) -> torch.Tensor:
    """A tensor with known bytes in it."""
    pattern = torch.arange(count * dtype.itemsize, dtype=torch.int64).remainder(2).to(torch.uint8)
    return torch.empty(0, dtype=dtype).set_(pattern.untyped_storage(), 0, (count,), (1,))


def raw(tensor: torch.Tensor) -> bytes:
    storage = tensor.untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
    return memory.numpy().tobytes()


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives_bit_by_bit(dtype: torch.dtype, count: int) -> None:
    tensor = of_dtype(dtype, count)
    for arrived in (send(tensor), send([tensor])[0], send_call(null, (tensor,))[1][0]):
        assert arrived.dtype is dtype
        assert arrived.shape == tensor.shape
        assert raw(arrived) == raw(tensor)


BASE = torch.arange(24.0).reshape(4, 6)


def sent_bytes(tensor: torch.Tensor) -> int:
    return sum(len(segment) for segment in PICKLES.dumps(tensor, CALLEE).buffers)


def test_view_sends_its_own_elements_only() -> None:
    storage = torch.zeros(1000, 1000)
    assert sent_bytes(storage[:, 0]) < 4000 + 500
    assert sent_bytes(storage[3]) < 4000 + 500
    assert sent_bytes(storage[:2].T) < 8000 + 500
    assert sent_bytes(storage[0, 0].expand(1000, 1000)) < 500


LARGE = torch.arange(90_000.0).reshape(300, 300)


@pytest.mark.parametrize(
    ("tensor", "stride"),
    [
        (BASE.narrow(1, 2, 2), BASE.stride()),
        (BASE[::2, ::3], BASE[::2, ::3].stride()),
        ((BASE > 3)[::2], (BASE > 3)[::2].stride()),
        (BASE.to(torch.float8_e5m2)[:, 1], BASE[:, 1].stride()),
        (LARGE[:, ::2], (300, 2)),
        (LARGE[:, ::3], (100, 1)),
        (LARGE.bfloat16()[:, 1], (1,)),
        (LARGE[:, 3:4].expand(300, 9), (1, 0)),
        (torch.arange(5000.0).as_strided((3, 3, 2), (1, 1, 4000)), (6, 2, 1)),
    ],
    ids=lambda value: str(tuple(value.shape)) if isinstance(value, torch.Tensor) else "",
)
def test_small_gaps_between_elements_stay_and_large_ones_are_closed(
    tensor: torch.Tensor, stride: tuple[int, ...]
) -> None:
    for arrived in (send(tensor), send([tensor])[0]):
        assert arrived.stride() == stride
        assert torch.equal(arrived.to(torch.float32), tensor.to(torch.float32))


def test_what_lies_between_elements_is_not_sent() -> None:
    arrived = send(torch.full((4, 6), 7.0)[:, ::2])
    assert set(arrived.as_strided((23,), (1,)).tolist()) == {0.0, 7.0}


@pytest.mark.parametrize("size", [2, INLINE_BYTES])
def test_conjugate_and_negative_views_stay_lazy(size: int) -> None:
    conjugate = torch.rand(size, dtype=torch.complex64).conj()
    negative = conjugate.imag
    both = torch._neg_view(conjugate)
    for tensor in (conjugate, negative, both, conjugate[::2]):
        for arrived in (send(tensor), send([tensor])[0]):
            assert arrived.is_conj() == tensor.is_conj()
            assert arrived.is_neg() == tensor.is_neg()
            assert torch.equal(arrived, tensor)


def test_zero_tensor_without_memory_arrives_as_zeros() -> None:
    assert torch.equal(send(torch._efficientzerotensor(3)), torch.zeros(3))


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(3), torch.ones(3).bfloat16(), torch.ones(4, 4)[:, 1], torch.ones(2, dtype=torch.complex64)],
    ids=["plain", "bfloat16", "column", "complex"],
)
def test_requires_grad_is_kept_and_history_is_not(tensor: torch.Tensor) -> None:
    leaf = tensor.clone().requires_grad_()
    result = leaf * 2
    for arrived in (send(leaf), send([leaf])[0], send(result), send([result])[0]):
        assert arrived.requires_grad
        assert arrived.is_leaf
    (gradient,) = torch.autograd.grad(arrived.sum().abs() * 2, [arrived])
    assert gradient.shape == arrived.shape
    assert send(leaf).grad is None


@pytest.mark.parametrize("size", SIZES)
def test_one_tensor_twice_arrives_as_one(size: int) -> None:
    tensor = torch.zeros(size)
    first, second = send([tensor, {"again": tensor}])
    assert second["again"] is first
    _, args, kwargs = send_call(null, (tensor, tensor), {"x": tensor, "y": [tensor]})
    assert args[0] is args[1] is kwargs["x"] is kwargs["y"][0]
    _, args, kwargs = send_call(null, (tensor,), {"x": tensor})
    assert args[0] is kwargs["x"]


def test_two_views_of_one_storage_arrive_independent() -> None:
    tensor = torch.arange(6.0)
    first, second = send([tensor[:3], tensor[:3]])
    first += 1
    assert torch.equal(second, tensor[:3])


def test_freed_memory_is_refused() -> None:
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    cut = torch.ones(30)[::2]
    cut.untyped_storage().resize_(8)
    for tensor in (freed, cut):
        with pytest.raises(SerializationError, match="freed or cut short"):
            send(tensor)


def test_tensor_inside_a_transform_is_refused() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(SerializationError, match=r"argument 1, of type torch\.Tensor"):
            PICKLES.dump_call(null, (1, x), {}, CALLEE)
        return x

    torch.func.vmap(body)(torch.ones(3, 2))


EVERY_WAY = {
    "plain": torch.ones(3),
    "column": torch.ones(4, 4)[:, 1],
    "conjugate": torch.ones(3, dtype=torch.complex64).conj(),
    "sparse": torch.eye(3).to_sparse(),
    "compressed": torch.eye(3).to_sparse_csr(),
    "requires grad": torch.ones(3, requires_grad=True),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("name", EVERY_WAY)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, lambda: torch.device("meta")])
def test_receivers_modes_make_no_difference(name: str, mode: Any) -> None:
    tensor = EVERY_WAY[name]
    with mode():
        arrived = send([tensor])[0]
        again = send(tensor)
    assert arrived.device.type == again.device.type == "cpu"
    assert arrived.requires_grad == again.requires_grad == tensor.requires_grad
    assert not arrived.is_inference()
    assert torch.equal(arrived.detach().to_dense(), tensor.detach().to_dense())


# ---- lists of tensors, as gradients travel

GRADIENTS = {
    "usual": torch.rand(3, 4),
    "large": torch.rand(100, 100),
    "none": None,
    "of a sum": torch.tensor(2.0).expand(5),
    "expanded and large": torch.tensor(2.0).expand(5000),
    "sparse": torch.eye(3).to_sparse(),
    "bfloat16": torch.rand(3).to(torch.bfloat16),
    "empty": torch.empty(0, 3),
}


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("kinds", [*([kind] for kind in GRADIENTS), list(GRADIENTS)], ids=str)
def test_gradients_arrive_as_they_were(kinds: list[str], safe: bool) -> None:
    tensors = [GRADIENTS[kind] for kind in kinds]
    payload = SERIALIZER.between(safe).dump_tensors(tuple(tensors), CALLEE, "some tensors")
    reader = safely(AllowList()) if safe else SERIALIZER
    arrived = reader.between(safe).load_tensors(payload.buffers, CALLEE)
    assert len(arrived) == len(tensors)
    for before, after in zip(tensors, arrived, strict=True):
        if before is None or after is None:
            assert before is after
        else:
            assert (before.dtype, before.shape, before.layout) == (after.dtype, after.shape, after.layout)
            torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_gradients_that_arrive_share_no_memory() -> None:
    tensor = torch.rand(3)
    payload = PICKLES.dump_tensors([tensor, tensor], CALLEE, "some tensors")
    first, second = PICKLES.load_tensors(payload.buffers, CALLEE)
    assert isinstance(first, torch.Tensor)
    assert isinstance(second, torch.Tensor)
    first.zero_()
    assert torch.equal(second, tensor)


def test_gradient_that_cannot_be_sent_is_named() -> None:
    unsendable = torch.rand(2)
    unsendable.__dict__["lock"] = (each for each in "")
    with pytest.raises(SerializationError, match="cannot send the gradients of a message"):
        PICKLES.dump_tensors([unsendable], CALLEE, "the gradients of a message")


@pytest.mark.parametrize("safe", [False, True])
def test_anything_else_than_gradients_is_an_error(safe: bool) -> None:
    payload = SERIALIZER.between(safe).dumps([1, "two"], CALLEE)
    reader = safely(AllowList()) if safe else SERIALIZER
    with pytest.raises(SerializationError, match="should be tensors"):
        reader.between(safe).load_tensors(payload.buffers, CALLEE)
