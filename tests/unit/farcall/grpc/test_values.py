"""Values as messages of every language: between PyTorch at a server and NumPy at a client."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.masked import masked_tensor

from farcall.client.arrays import NumpyTensors
from farcall.grpc import values
from farcall.grpc.values import ITEM_SIZES, Malformed, from_value, to_value
from farcall.serving.tensors import DTYPES, TorchTensors
from farcall.v1 import service_pb2
from farcall.v1 import value_pb2 as pb
from tests.support.effort import PROFILE
from tests.support.fresh import RunFresh

TORCH, NUMPY = TorchTensors(), NumpyTensors()

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def sent(value: Any, to: Any, back: Any = TORCH) -> Any:
    """A value through the bytes of a message."""
    return from_value(pb.Value.FromString(to_value(value, back).SerializeToString()), to)


@PROFILE
@given(plain)
def test_plain_values_come_as_they_are(value: Any) -> None:
    assert sent(value, NUMPY) == value


def test_all_dtypes_of_pytorch_have_a_number() -> None:
    dense = {
        str(each).removeprefix("torch.")
        for each in vars(torch).values()
        if isinstance(each, torch.dtype) and not str(each).startswith(("torch.q", "torch.bits"))
    }
    shells = {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
    assert dense - shells == set(DTYPES)
    assert set(DTYPES) <= set(ITEM_SIZES)
    assert set(ITEM_SIZES) - set(DTYPES) <= {"bcomplex32"}  # PyTorch 2.14 has it


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.filterwarnings("ignore:BComplex32")
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_tensors_of_every_dtype_and_layout(name: str) -> None:
    most = 2 if name == "bool" else 256
    elements = torch.randint(most, (4, 6, ITEM_SIZES[name]), dtype=torch.uint8).view(DTYPES[name]).squeeze(2)
    for tensor in (elements, elements.t(), elements[1:, ::2], elements[0, 0], elements[:0]):
        array = sent(tensor, NUMPY)
        again = from_value(to_value(array.copy(order="F"), NUMPY), TORCH)
        assert array.shape == tuple(tensor.shape)
        assert again.dtype == tensor.dtype
        assert torch.equal(bits(again), bits(tensor))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("name", ["float32", "int64", "bool", "complex64", "float16", "bfloat16"])
def test_arrays_hold_the_numbers_of_tensors(name: str) -> None:
    tensor = torch.tensor([0, 1, 3]).to(DTYPES[name])
    assert sent(tensor, NUMPY).astype(complex).tolist() == tensor.to(torch.complex128).tolist()


def test_tensors_that_are_no_plain_memory() -> None:
    whole = torch.tensor([[0.0, 2.0], [3.0, 0.0]], requires_grad=True)
    assert sent(whole.to_sparse(), NUMPY).tolist() == whole.tolist()
    assert sent(torch.tensor([1 + 2j]).conj(), NUMPY).tolist() == [1 - 2j]
    with pytest.raises(TypeError, match="meta device has no elements"):
        to_value(torch.empty(2, device="meta"), TORCH)
    with pytest.raises(TypeError, match="a nested tensor has no counterpart"):
        to_value(torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged), TORCH)
    with pytest.raises(TypeError, match="quint8 has no counterpart"):
        to_value(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8), TORCH)


@pytest.mark.parametrize("back", [TORCH, NUMPY], ids=["server", "client"])
def test_arrays_that_pytorch_cannot_read(back: Any) -> None:
    """A server's functions may return what clients may send."""
    assert sent(np.arange(3, dtype=">i4"), NUMPY, back).tolist() == [0, 1, 2]
    assert sent(np.arange(3).astype(ml_dtypes.bfloat16), NUMPY, back).dtype == ml_dtypes.bfloat16
    with pytest.raises(TypeError, match=r"datetime64\[D\] has no counterpart in PyTorch; convert it first"):
        to_value(np.array(["2026-11-25"], "datetime64[D]"), back)


class WithUnit(np.ndarray[Any, Any]):
    """Such as libraries of physical quantities have."""


@pytest.mark.parametrize("back", [TORCH, NUMPY], ids=["server", "client"])
@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.ma.array([1.0, 2.0], mask=[False, True]), "a masked array cannot be sent with its mask"),
        (np.ma.array([1.0, 2.0]), "a masked array"),
        (np.ma.masked, "a masked array"),
        (np.ones(2).view(WithUnit), "an array of the class WithUnit would lose"),
        (np.zeros(2, [("a", "i4")]), "has no counterpart in PyTorch"),
        (np.array([1, None], object), "object has no counterpart in PyTorch"),
        (np.array(["a"]), "<U1 has no counterpart in PyTorch"),
        (np.array(["a"], np.dtypes.StringDType()), "StringDType.. has no counterpart in PyTorch"),
        (np.datetime64("2026-11-25"), "has no counterpart in PyTorch"),
        (np.longdouble(1), "float128 has no counterpart in PyTorch"),
    ],
)
def test_arrays_with_more_than_their_elements_are_refused(array: Any, text: str, back: Any) -> None:
    for value in (array, [array], {"x": array}):
        with pytest.raises(TypeError, match=text):
            to_value(value, back)


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("back", [TORCH, NUMPY], ids=["server", "client"])
def test_arrays_of_any_layout_have_their_elements(back: Any, tmp_path: Path) -> None:
    plain = np.arange(6.0).reshape(2, 3)
    mapped = np.memmap(tmp_path / "mapped", plain.dtype, "w+", shape=plain.shape)
    mapped[:] = plain
    constant = plain.copy()
    constant.flags.writeable = False
    views = [plain.T, plain[::-1], plain[:, ::2], np.broadcast_to(plain, (2, 2, 3)), plain[:0], plain[0, 0]]
    kinds = [mapped, constant, np.matrix(plain), np.asfortranarray(plain), plain.astype(">f4"), np.array(2.5)]
    for array in (*views, *kinds):
        assert np.array_equal(sent(array, NUMPY, back), np.asarray(array))
        assert np.array_equal(sent(array, TORCH, back), np.asarray(array))


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_tensors_of_other_classes_are_refused_by_name() -> None:
    masked = masked_tensor(torch.tensor([1.0, 2.0]), torch.tensor([True, False]))
    with pytest.raises(TypeError, match="a tensor of the class MaskedTensor cannot be sent"):
        to_value(masked, TORCH)


def test_members_of_enumerations_are_what_they_are_made_of() -> None:
    assert sent([HTTPStatus.OK, signal.SIGINT], NUMPY) == [200, 2]


def test_what_is_received_has_memory_of_its_own() -> None:
    message = to_value(torch.zeros(1, dtype=torch.uint8), TORCH)
    from_value(message, TORCH).fill_(7)
    from_value(message, NUMPY).fill(7)
    assert from_value(message, TORCH).tolist() == [0]


def nested(deep: int, outer: Callable[[Any], Any] = lambda inner: [inner]) -> Any:
    return outer(nested(deep - 1, outer)) if deep else torch.ones(1)


@pytest.mark.parametrize(("deep", "outer"), [(45, lambda inner: [inner]), (30, lambda inner: {"": inner})])
def test_what_is_written_can_be_read_however_deep(deep: int, outer: Callable[[Any], Any]) -> None:
    request = service_pb2.BatchRequest()
    to_value(nested(deep, outer), TORCH, request.calls.add().kwargs["x"])
    again = service_pb2.BatchRequest.FromString(request.SerializeToString())
    assert str(from_value(again.calls[0].kwargs["x"], TORCH)) == str(nested(deep, outer))


def test_booleans_are_0_or_1_whatever_came() -> None:
    message = pb.Value(tensor=pb.Tensor(dtype=pb.DTYPE_BOOL, shape=[2], data=b"\x02\x00"))
    assert bits(from_value(message, TORCH)).tolist() == [1, 0]
    assert from_value(message, NUMPY).view(np.uint8).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (object(), TypeError, "a value of type object has no counterpart"),
        ({1: 2}, TypeError, "the keys of a dict must be str, 1 is int"),
        (1 << 63, OverflowError, "needs more than the 64 bits"),
        (nested(50), ValueError, "nested too deeply"),
    ],
)
def test_what_other_languages_do_not_have(value: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        to_value([value], TORCH)


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (pb.Tensor(shape=[1], data=b"1234"), "dtype is 0"),
        (pb.Tensor(dtype=99, shape=[1], data=b"1234"), "dtype is 99"),  # type: ignore[arg-type]
        (pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[2], data=b"1234"), r"float32\[2\] has 8 bytes, but 4 came"),
        (pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[-1, -1], data=b"1234"), r"shape is \[-1, -1\]"),
        (pb.Tensor(dtype=pb.DTYPE_UINT8, shape=[1 << 62, 1 << 62], data=b"1"), "but 1 came"),
    ],
)
def test_malformed_tensors_are_refused_before_memory_is_taken(tensor: pb.Tensor, text: str) -> None:
    with pytest.raises(Malformed, match=text):
        from_value(pb.Value(tensor=tensor), TORCH)


def test_a_tensor_that_fits_no_message_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_TENSOR_BYTES", 7)  # two gigabytes take too long
    with pytest.raises(ValueError, match=r"a tensor float32\[2\] has 8 bytes; a message has less than 2 GiB"):
        to_value(torch.ones(2), TORCH)


def test_a_value_without_a_kind_is_malformed() -> None:
    with pytest.raises(Malformed, match="no kind"):
        from_value(pb.Value(list=pb.List(items=[pb.Value()])), TORCH)


def test_numbers_that_are_none_come_too() -> None:
    assert math.isnan(sent(math.nan, NUMPY))
    assert sent(-math.inf, NUMPY) == -math.inf


def test_clients_need_no_pytorch(run_fresh: RunFresh) -> None:
    gone = "sys.modules |= dict.fromkeys(name for name in sys.modules if name.partition('.')[0] == 'torch')"
    done = run_fresh(f"import sys\n{gone}\nimport farcall.client")
    assert done.returncode == 0, done.stderr
