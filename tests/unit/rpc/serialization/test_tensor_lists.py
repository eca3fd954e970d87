"""Lists of tensors, as gradients travel."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from rpc.errors import SerializationError
from rpc.serialization.safe import AllowList
from rpc.serialization.serializer import Serializer
from tests.unit.rpc.serialization.journey import SERIALIZER, safely


@dataclass
class Worker:
    name: str = "worker1"
    main: str = ""


ELSEWHERE = Worker()
KINDS = {
    "usual": torch.rand(3, 4),
    "large": torch.rand(100, 100),
    "none": None,
    "of a sum": torch.tensor(2.0).expand(5),
    "expanded and large": torch.tensor(2.0).expand(5000),
    "transposed": torch.rand(3, 4).t(),
    "sparse": torch.eye(3).to_sparse(),
    "bfloat16": torch.rand(3).to(torch.bfloat16),
    "scalar": torch.tensor(1),
    "empty": torch.empty(0, 3),
}


def reader(safe: bool) -> Serializer:
    return safely(AllowList()) if safe else SERIALIZER


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("kinds", [*([kind] for kind in KINDS), list(KINDS)], ids=str)
def test_tensors_arrive_as_they_were(kinds: list[str], safe: bool) -> None:
    tensors = [KINDS[kind] for kind in kinds]
    payload = SERIALIZER.dump_tensors(tensors, ELSEWHERE, "some tensors")
    arrived = reader(safe).load_tensors(payload.buffers, ELSEWHERE)
    assert len(arrived) == len(tensors)
    for before, after in zip(tensors, arrived, strict=True):
        if before is None or after is None:
            assert before is after
        else:
            assert (before.dtype, before.shape, before.layout) == (after.dtype, after.shape, after.layout)
            torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_what_arrives_shares_no_memory() -> None:
    tensor = torch.rand(3)
    payload = SERIALIZER.dump_tensors([tensor, tensor], ELSEWHERE, "some tensors")
    first, second = SERIALIZER.load_tensors(payload.buffers, ELSEWHERE)
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    first.zero_()
    assert torch.equal(second, tensor)


def test_what_cannot_be_sent_is_named() -> None:
    unsendable = torch.rand(2)
    unsendable.__dict__["lock"] = (each for each in "")
    with pytest.raises(SerializationError, match="cannot send the gradients of a message"):
        SERIALIZER.dump_tensors([unsendable], ELSEWHERE, "the gradients of a message")


@pytest.mark.parametrize("safe", [False, True])
def test_anything_else_is_an_error(safe: bool) -> None:
    payload = SERIALIZER.dumps([1, "two"], ELSEWHERE)
    with pytest.raises(SerializationError):
        reader(safe).load_tensors(payload.buffers, ELSEWHERE)
