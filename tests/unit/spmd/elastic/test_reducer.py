"""Gradients of parameters that a step does not use: optimizers must leave them alone, as in one process."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from spmd.elastic.reducer import Reducer


class OneOf(nn.Module):
    """Two layers, of which each call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 1, bias=False) for _ in range(2)])

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.layers[which](x)  # type: ignore[no-any-return]


class Sum:
    """A sum with another member, which has used some parameters and has gradients of one there."""

    def __init__(self, *used: int, weight: float = 0.5, fails: bool = False) -> None:
        self._used, self.weight, self.has_failed = used, weight, fails

    def start(self, tensor: torch.Tensor, *, blocks: bool = False) -> None:
        parts = torch.split(tensor, [2, 2, 1, 1])  # the gradients, the last parameter's first, and the counts
        for each in self._used:
            parts[1 - each].add_(1.0)
            parts[3 - each].add_(1.0)

    def finish(self) -> None:
        """The sum is there."""


def gradients(model: OneOf) -> list[list[float] | None]:
    found = [each.grad for each in model.parameters()]
    return [None if each is None else each.flatten().tolist() for each in found]


def attached(model: OneOf) -> Reducer:
    reducer = Reducer(model)
    reducer.attach()
    return reducer


def test_parameter_that_no_member_uses_has_no_gradient_in_that_step() -> None:
    model = OneOf()
    reducer = attached(model)
    for which, expected in ((0, [[2.0, 2.0], None]), (1, [None, [2.0, 2.0]])):
        reducer.begin(Sum(which))
        model(torch.ones(1, 2), which).sum().backward()
        assert gradients(model) == expected


def test_parameter_that_another_member_uses_has_its_gradient() -> None:
    model = OneOf()
    reducer = attached(model)
    reducer.begin(Sum(1))
    model(torch.ones(1, 2), 0).sum().backward()
    assert gradients(model) == [[1.0, 1.0], [1.0, 1.0]]


def test_member_without_samples_has_the_gradients_of_the_others() -> None:
    model = OneOf()
    reducer = attached(model)
    reducer.begin(Sum(1, weight=0.0))
    model(torch.ones(0, 2), 0).sum().backward()
    assert gradients(model) == [None, [1.0, 1.0]]


def test_gradients_that_were_accumulated_or_written_by_the_program_are_summed() -> None:
    model = OneOf()
    reducer = attached(model)
    reducer.begin(Sum())
    reducer.accumulates = True
    model(torch.ones(1, 2), 0).sum().backward()
    reducer.accumulates = False
    one, other = model.parameters()
    assert other.grad is not None
    other.grad.fill_(3.0)
    reducer.finish()
    assert gradients(model) == [[1.0, 1.0], [3.0, 3.0]]
    other.grad = None
    one.grad = torch.full((1, 2), 7.0)  # by the program, after the sum
    reducer.finish()
    assert gradients(model) == [[7.0, 7.0], None]


def test_member_without_samples_has_gradients_after_a_sum_that_has_failed() -> None:
    model = OneOf()
    reducer = attached(model)
    reducer.begin(Sum(weight=0.0, fails=True))
    model(torch.ones(0, 2), 0).sum().backward()
    assert all(each.grad is not None for each in model.parameters())


def test_sharded_gradient_that_the_program_has_written_is_there_where_its_part_is_zero(
    mesh: DeviceMesh,
) -> None:
    model = nn.ParameterList([nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Shard(0)])) for _ in "12"])
    reducer = Reducer(model)
    reducer.begin(Sum())
    written, unused = model
    assert isinstance(written.grad, DTensor)
    written.grad.copy_(torch.zeros_like(written.grad))  # another worker's part is not zero
    reducer.finish()
    assert written.grad is not None
    assert unused.grad is None
