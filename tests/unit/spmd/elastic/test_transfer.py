"""The state on its way to a newcomer: in pieces, to where its tensors are."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import nn

from spmd.elastic.state import State
from spmd.elastic.transfer import in_pieces, put_together

_MIB = 1 << 20


class Average:
    """An object whose state is a large tensor, and a small one."""

    def __init__(self, value: float) -> None:
        self.values = [torch.full((_MIB,), value), torch.tensor(value)]

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


def member(value: float) -> tuple[State, nn.Linear, Average]:
    layer = nn.Linear(1500, 2000)
    nn.init.constant_(layer.weight, value)
    nn.init.constant_(layer.bias, value)
    average = Average(value)
    state = State({"model": layer, "average": average})
    state.keep()
    return state, layer, average


def sent(state: State) -> list[Any]:
    return [pickle.loads(pickle.dumps(each)) for each in in_pieces(state.give())]


def test_newcomer_has_the_state_that_was_sent_in_pieces() -> None:
    old, _, _ = member(3.0)
    newcomer, layer, average = member(5.0)
    newcomer.load(put_together(iter(sent(old)), newcomer.rooms()))
    for each in (*layer.parameters(), *average.values):
        assert torch.equal(each, torch.full_like(each, 3.0))


def test_no_piece_is_large_and_parameters_are_filled_where_they_are() -> None:
    old, _, _ = member(3.0)
    newcomer, layer, _ = member(5.0)
    pieces = sent(old)
    assert max(each.nbytes for each in pieces[1:]) <= 8 * _MIB < layer.weight.nbytes
    given = put_together(iter(pieces), newcomer.rooms())
    assert given["model"]["weight"].data_ptr() == layer.weight.data_ptr()


def test_tensor_of_another_shape_gets_memory_of_its_own() -> None:
    old, layer, _ = member(3.0)
    rooms = {"model": {"weight": torch.zeros(2000, 1000)}}
    given = put_together(iter(sent(old)), rooms)
    assert torch.equal(given["model"]["weight"], layer.weight)
    assert not rooms["model"]["weight"].any()
