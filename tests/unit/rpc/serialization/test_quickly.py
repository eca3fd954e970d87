"""What is serialized on the agent's loop: little, and never by code of the user's."""

from __future__ import annotations

import enum
from typing import Any

import pytest
import torch

from tests.unit.rpc.serialization.callees import Plain
from tests.unit.rpc.serialization.journey import CALLER, SERIALIZER, deliver


class Level(enum.IntEnum):
    LOW = 1


class Tracked(torch.Tensor):
    """A subclass, whose methods are the user's."""


@pytest.mark.parametrize("obj", [None, True, 3, 2.5, 1j, "a" * 1000, b"x", torch.arange(6).view(2, 3)])
def test_small_plain_objects_are_dumped_at_once(obj: Any) -> None:
    payload = SERIALIZER.dump_quickly(obj)
    assert payload is not None
    header, buffers = deliver(payload)
    arrived = SERIALIZER.loads(header, buffers, None, CALLER)
    assert torch.equal(arrived, obj) if isinstance(obj, torch.Tensor) else arrived == obj


@pytest.mark.parametrize(
    "obj",
    [
        [1],
        Plain(1),
        Level.LOW,
        "a" * 2000,
        torch.ones(1000),
        torch.nn.Parameter(torch.ones(1)),
        torch.ones(1).as_subclass(Tracked),
        torch.eye(2).to_sparse(),
    ],
    ids=lambda obj: type(obj).__name__,
)
def test_all_others_are_left_to_other_threads(obj: Any) -> None:
    assert SERIALIZER.dump_quickly(obj) is None
