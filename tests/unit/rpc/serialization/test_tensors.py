from __future__ import annotations

from typing import Any

import pytest
import torch

from rpc.errors import SerializationError
from rpc.serialization.memory import INLINE_BYTES, inline_limit
from tests.unit.rpc.serialization.callees import null
from tests.unit.rpc.serialization.journey import CALLEE, SERIALIZER, send, send_call

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0), (1,), (2, 1, 3)], ids=str)
def test_shapes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.ones(shape, dtype=dtype)

    for arrived in (send(tensor), send([tensor])[0]):
        assert arrived.shape == shape
        assert arrived.stride() == tensor.stride()
        assert torch.equal(arrived, tensor)


BASE = torch.arange(24.0).reshape(4, 6)

STRIDED = {
    "transposed": BASE.T,
    "channels last": torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "narrowed": BASE.narrow(1, 2, 2),
    "stepped": BASE[::2, ::3],
    "column": BASE[:, 3],
    "row": BASE[2],
    "expanded": torch.ones(1, 3).expand(1000, 3),
    "expanded scalar": torch.tensor(5.0).expand(7, 8),
    "expanded column": BASE[:, 3:4].expand(4, 9),
    "overlapping": BASE.flatten().unfold(0, 5, 2),
    "offset": BASE.flatten()[5:9],
    "bfloat16 narrowed": BASE.bfloat16().narrow(1, 2, 2),
    "bool stepped": (BASE > 3)[::2],
    "complex permuted": torch.rand(2, 3, 4, dtype=torch.complex64).permute(2, 0, 1),
    "float8 column": BASE.to(torch.float8_e5m2)[:, 1],
}


@pytest.mark.parametrize("name", STRIDED)
def test_values_and_strides_are_kept(name: str) -> None:
    tensor = STRIDED[name]

    for arrived in (send(tensor), send([tensor])[0]):
        assert arrived.stride() == tensor.stride()
        assert arrived.dtype is tensor.dtype
        assert torch.equal(arrived.to(torch.complex64), tensor.to(torch.complex64))
        assert not arrived._is_view()


def sent_bytes(tensor: torch.Tensor) -> int:
    return sum(len(segment) for segment in SERIALIZER.dumps(tensor, CALLEE).buffers)


def test_view_sends_its_own_elements_only() -> None:
    storage = torch.zeros(1000, 1000)

    assert sent_bytes(storage[:, 0]) < 4000 + 500
    assert sent_bytes(storage[3]) < 4000 + 500
    assert sent_bytes(storage[:2].T) < 8000 + 500
    assert sent_bytes(storage[0, 0].expand(1000, 1000)) < 500


def test_large_gaps_are_closed() -> None:
    column = torch.arange(1_000_000.0).reshape(1000, 1000)[:, 3]

    arrived = send(column)

    assert arrived.stride() == (1,)
    assert arrived.untyped_storage().nbytes() == 4000
    assert torch.equal(arrived, column)


def test_gaps_no_larger_than_the_elements_are_kept() -> None:
    tensor = torch.arange(1_000_000.0).reshape(1000, 1000)[:, ::2]

    arrived = send(tensor)

    assert arrived.stride() == (1000, 2)
    assert torch.equal(arrived, tensor)


def test_expanded_dimension_stays_expanded_when_gaps_are_closed() -> None:
    tensor = torch.arange(4_000_000.0).reshape(2000, 2000)[:, 5].unsqueeze(1).expand(2000, 500)

    arrived = send(tensor)

    assert arrived.stride() == (1, 0)
    assert torch.equal(arrived, tensor)


def test_overlapping_with_gaps_arrives_by_value() -> None:
    tensor = torch.arange(5000.0).as_strided((3, 3, 2), (1, 1, 4000))

    assert torch.equal(send(tensor), tensor)


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


def test_sender_keeps_its_gradient_history() -> None:
    leaf = torch.ones(3, requires_grad=True)
    result = leaf * 2

    send([result])
    (gradient,) = torch.autograd.grad(result.sum(), [leaf])

    assert torch.equal(gradient, torch.full((3,), 2.0))


@pytest.mark.parametrize("size", SIZES)
def test_received_tensor_is_writable_and_its_own(size: int) -> None:
    tensor = torch.zeros(size)

    arrived = send(tensor)
    arrived += 1

    assert torch.equal(tensor, torch.zeros(size))
    assert arrived.untyped_storage().nbytes() == tensor.nbytes


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


def test_tensors_as_dict_keys() -> None:
    a = torch.ones(2)
    b = [a, a]

    (key, value), *_ = send({a: [a, b]}).items()

    assert key is value[0] is value[1][0] is value[1][1]


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
            SERIALIZER.dump_call(null, (1, x), {}, CALLEE)
        return x

    torch.func.vmap(body)(torch.ones(3, 2))


EVERY_WAY = {
    "plain": torch.ones(3),
    "column": torch.ones(4, 4)[:, 1],
    "permuted": torch.ones(4, 5).T,
    "bfloat16": torch.ones(3).bfloat16(),
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
