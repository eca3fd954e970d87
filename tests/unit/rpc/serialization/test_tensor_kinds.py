from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from rpc.errors import SerializationError
from rpc.serialization.memory import INLINE_BYTES
from tests.unit.rpc.serialization.callees import Tagged
from tests.unit.rpc.serialization.journey import CALLEE, PICKLES, send

REPEATED = torch.tensor([[0, 1, 1], [2, 0, 0]])

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    SPARSE_COO = {
        "uncoalesced": torch.sparse_coo_tensor(REPEATED, torch.tensor([3, 4, 5]), (2, 3)),
        "coalesced": torch.sparse_coo_tensor(REPEATED, torch.tensor([3, 4, 5]), (2, 3)).coalesce(),
        "hybrid": torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.rand(2, 4), (3, 4)),
        "empty": torch.sparse_coo_tensor(torch.empty(2, 0, dtype=torch.int64), torch.empty(0), (5, 6)),
        "large": torch.eye(INLINE_BYTES).to_sparse(),
        "bool": torch.eye(3, dtype=torch.bool).to_sparse(),
    }
    COMPRESSED = {
        "csr": torch.eye(4).to_sparse_csr(),
        "csc": torch.eye(4).to_sparse_csc(),
        "bsr": torch.eye(4).to_sparse_bsr((2, 2)),
        "bsc": torch.eye(4).to_sparse_bsc((2, 2)),
        "csr int32": torch.sparse_csr_tensor(
            torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32), torch.rand(2)
        ),
        "csr batched": torch.eye(3).expand(2, 3, 3).to_sparse_csr(),
    }
    QUANTIZED = {
        "per tensor": torch.quantize_per_tensor(torch.rand(3, 4), 0.1, 2, torch.quint8),
        "per tensor int32": torch.quantize_per_tensor(torch.rand(3, 4), 0.1, 0, torch.qint32),
        "per channel": torch.quantize_per_channel(
            torch.rand(3, 4), torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2]), 0, torch.qint8
        ),
        "view": torch.quantize_per_tensor(torch.rand(300, 40), 0.1, 2, torch.quint8)[3:5],
        "large": torch.quantize_per_tensor(torch.rand(300, 40), 0.1, 2, torch.qint8),
        "permuted": torch.quantize_per_tensor(torch.rand(3, 4), 0.1, 2, torch.quint8).T,
    }
    NESTED = torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 3)])
    JAGGED = torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 3)], layout=torch.jagged)


@pytest.mark.parametrize("name", SPARSE_COO)
def test_sparse_coo(name: str) -> None:
    tensor = SPARSE_COO[name]
    arrived = send(tensor)
    assert arrived.layout is torch.sparse_coo
    assert arrived.is_coalesced() == tensor.is_coalesced()
    assert arrived.shape == tensor.shape
    assert torch.equal(arrived._indices(), tensor._indices())
    assert torch.equal(arrived._values(), tensor._values())


@pytest.mark.parametrize("name", COMPRESSED)
def test_sparse_compressed(name: str) -> None:
    tensor = COMPRESSED[name]
    arrived = send(tensor)
    assert arrived.layout is tensor.layout
    assert arrived.shape == tensor.shape
    assert torch.equal(arrived.values(), tensor.values())
    assert torch.equal(arrived.to_dense(), tensor.to_dense())


def test_sparse_tensor_keeps_requires_grad() -> None:
    assert send(torch.eye(3).to_sparse().requires_grad_()).requires_grad
    assert send(torch.eye(3).requires_grad_().to_sparse()).is_leaf


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized(name: str) -> None:
    tensor = QUANTIZED[name]
    arrived = send(tensor)
    assert arrived.dtype is tensor.dtype
    assert arrived.qscheme() == tensor.qscheme()
    assert torch.equal(arrived.int_repr(), tensor.int_repr())
    assert torch.equal(arrived.dequantize(), tensor.dequantize())


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_quantized_to_four_bits() -> None:
    scales, zero_points = torch.rand(3) + 0.1, torch.rand(3)
    tensor = torch.quantize_per_channel(torch.rand(3, 4), scales, zero_points, 0, torch.quint4x2)
    arrived = send(tensor)
    assert arrived.dtype is torch.quint4x2
    assert torch.equal(arrived.dequantize(), tensor.dequantize())


def test_quantized_view_sends_its_own_elements_only() -> None:
    payload = PICKLES.dumps(QUANTIZED["view"], CALLEE)
    assert sum(len(segment) for segment in payload.buffers) < 1000


@pytest.mark.parametrize("tensor", [NESTED, JAGGED], ids=["strided", "jagged"])
def test_nested(tensor: torch.Tensor) -> None:
    arrived = send(tensor)
    assert arrived.is_nested
    assert arrived.layout is tensor.layout
    for mine, theirs in zip(arrived.unbind(), tensor.unbind(), strict=True):
        assert torch.equal(mine, theirs)


def test_mkldnn() -> None:
    arrived = send(torch.arange(6.0).to_mkldnn())
    assert arrived.is_mkldnn
    assert torch.equal(arrived.to_dense(), torch.arange(6.0))


def test_meta_tensor_sends_no_elements() -> None:
    tensor = torch.empty(1000, 1000, dtype=torch.bfloat16, device="meta", requires_grad=True).T
    payload = PICKLES.dumps(tensor, CALLEE)
    arrived = send(tensor)
    assert len(payload.buffers[0]) < 500
    assert arrived.is_meta
    assert arrived.requires_grad
    assert (arrived.shape, arrived.stride(), arrived.dtype) == (tensor.shape, tensor.stride(), torch.bfloat16)


def test_tensor_on_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(torch.Tensor):
        is_cpu = False
        device = torch.device("cuda:1")

    from rpc.serialization import tensor_kinds

    with pytest.raises(SerializationError, match=r"device cuda:1.*only supports CPU tensors.*tensor\.cpu"):
        tensor_kinds._reduce_by_layout(torch.ones(2).as_subclass(Elsewhere))


@pytest.mark.parametrize("requires_grad", [True, False])
def test_parameter(requires_grad: bool) -> None:
    parameter = nn.Parameter(torch.rand(3, 4), requires_grad=requires_grad)
    parameter.__dict__["note"] = "mine"
    arrived = send(parameter)
    assert type(arrived) is nn.Parameter
    assert arrived.requires_grad == requires_grad
    assert vars(arrived) == {"note": "mine"}
    assert torch.equal(arrived, parameter)


def test_buffer_stays_a_buffer() -> None:
    buffer = nn.Buffer(torch.rand(3), persistent=False)
    arrived = send(buffer)
    assert isinstance(arrived, nn.Buffer)
    assert not arrived.persistent


def test_attributes_of_a_tensor_travel() -> None:
    tensor = torch.ones(3)
    tensor.__dict__["note"] = {"of": tensor}
    arrived = send(tensor)
    assert arrived.note["of"] is arrived


def test_subclass() -> None:
    tensor = torch.arange(1_000_000.0).as_subclass(Tagged)[:2]
    tensor.__dict__["note"] = 1
    payload = PICKLES.dumps(tensor, CALLEE)
    arrived = send(tensor)
    assert type(arrived) is Tagged
    assert torch.equal(arrived, tensor)
    assert vars(arrived) == {"note": 1}
    assert sum(len(segment) for segment in payload.buffers) < 1000


def test_wrapper_subclass() -> None:
    tensor = TwoTensor(torch.rand(3, 4), torch.rand(3, 4))  # type: ignore[no-untyped-call]  # untyped in torch
    arrived = send(tensor)
    assert type(arrived) is TwoTensor
    assert torch.equal(arrived.a, tensor.a)
    assert torch.equal(arrived.b, tensor.b)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_masked_tensor(requires_grad: bool) -> None:
    data, mask = torch.arange(3.0), torch.tensor([True, False, True])
    arrived: Any = send(torch.masked.masked_tensor(data, mask, requires_grad=requires_grad))
    assert type(arrived).__name__ == "MaskedTensor"
    assert arrived.get_mask().equal(mask)
    assert arrived.to_tensor(-1.0).tolist() == [0.0, -1.0, 2.0]
    assert arrived.requires_grad is requires_grad


@pytest.mark.parametrize("requires_grad", [False, True])
def test_fake_tensor_is_refused_in_one_sentence(requires_grad: bool) -> None:
    with FakeTensorMode():
        fake = torch.ones(3, requires_grad=requires_grad)
    with pytest.raises(SerializationError, match="it is a fake tensor, which has a shape but no elements"):
        send([fake])


@pytest.mark.parametrize("size", [0, 3, INLINE_BYTES])
def test_storages(size: int) -> None:
    tensor = torch.arange(float(size))
    untyped = send(tensor.untyped_storage())
    assert isinstance(untyped, torch.UntypedStorage)
    assert bytes(untyped) == bytes(tensor.untyped_storage())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        typed = send(tensor.storage())  # type: ignore[no-untyped-call]  # untyped in torch
        assert isinstance(typed, torch.storage.TypedStorage)
        assert typed.dtype is torch.float32
        assert list(typed) == tensor.tolist()


@pytest.mark.parametrize(
    "value",
    [
        torch.float32,
        torch.strided,
        torch.channels_last,
        torch.per_channel_affine,
        torch.device("cuda:3"),
    ],
    ids=str,
)
def test_constants(value: Any) -> None:
    arrived = send([value])[0]
    assert arrived == value
    assert type(arrived) is type(value)


def test_module_with_tied_weights() -> None:
    module = nn.Sequential(nn.Linear(70, 70), nn.ReLU(), nn.Linear(70, 70))
    module[2].weight = module[0].weight
    module.register_buffer("mean", torch.rand(3))
    arrived = send(module)
    assert arrived[2].weight is arrived[0].weight
    assert torch.equal(arrived(torch.ones(70)), module(torch.ones(70)))
    assert [name for name, _ in arrived.named_buffers()] == ["mean"]
    optimizer = torch.optim.SGD(arrived.parameters(), lr=0.1)
    arrived(torch.ones(70)).sum().backward()
    optimizer.step()


def test_script_module() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = torch.jit.script(nn.Linear(3, 2))
        saved = io.BytesIO()
        torch.jit.save(module, saved)
        arrived = send({"module": module})["module"]
    assert isinstance(arrived, torch.jit.ScriptModule)
    assert torch.equal(arrived(torch.ones(3)), module(torch.ones(3)))
