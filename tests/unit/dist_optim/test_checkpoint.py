"""The state of a distributed optimizer as one dict, taken apart and put together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from dist_optim.checkpoint import merge, split


def trained(*sizes: int) -> optim.Adam:
    """An optimizer with a state of its own for each parameter."""
    parameters = [nn.Parameter(torch.ones(size)) for size in sizes]
    optimizer = optim.Adam(parameters, lr=0.1)
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    return optimizer


def moments(state: dict[str, Any]) -> dict[int, list[float]]:
    return {position: kept["exp_avg"].tolist() for position, kept in state["state"].items()}


def test_parameters_are_named_by_their_positions() -> None:
    merged = merge([([[0, 3]], trained(1, 2).state_dict()), ([[1, 2]], trained(3, 4).state_dict())])
    assert {position: len(values) for position, values in moments(merged).items()} == {0: 1, 3: 2, 1: 3, 2: 4}
    assert [group["params"] for group in merged["param_groups"]] == [[0, 3], [1, 2]]
    assert [group["lr"] for group in merged["param_groups"]] == [0.1, 0.1]


def test_parameters_without_a_state_yet_have_none_afterwards() -> None:
    fresh = optim.Adam([nn.Parameter(torch.ones(1))])
    [state] = split(merge([([[0]], fresh.state_dict())]), [[[0]]])
    assert state["state"] == {}


def test_other_parameters_are_refused() -> None:
    merged = merge([([[0, 1]], trained(1, 2).state_dict())])
    with pytest.raises(ValueError, match=r"about 2 parameters \(0, 1\), this optimizer has 3 \(0, 1, 2\)"):
        split(merged, [[[0, 1]], [[2]]])


@pytest.mark.parametrize("state", [{}, {"param_groups": []}, {"param_groups": [{}]}, [1], None])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(ValueError, match="optimizer"):
        split(state, [[[0]]])


def test_groups_with_different_options_are_not_mixed() -> None:
    slow = trained(1)
    slow.param_groups[0]["lr"] = 0.01
    merged = merge([([[0]], slow.state_dict()), ([[1]], trained(1).state_dict())])
    assert len(split(merged, [[[0]], [[1]]])) == 2
    with pytest.raises(ValueError, match=r"different values of 'lr': 0\.01 and 0\.1"):
        split(merged, [[[0, 1]]])


@pytest.mark.parametrize("rates", [(0.1, 0.1), (0.1, 0.2)])
def test_rates_that_are_tensors_are_compared_as_such(rates: tuple[float, float]) -> None:
    optimizers = [trained(1), trained(1)]
    for optimizer, rate in zip(optimizers, rates, strict=True):
        optimizer.param_groups[0]["lr"] = torch.tensor(rate)
    merged = merge([([[index]], optimizer.state_dict()) for index, optimizer in enumerate(optimizers)])
    if rates[0] == rates[1]:
        assert len(split(merged, [[[0, 1]]])) == 1
    else:
        with pytest.raises(ValueError, match="different values of 'lr'"):
            split(merged, [[[0, 1]]])


def grouped(*sizes: tuple[int, ...]) -> optim.Adam:
    """A trained optimizer with a parameter group for each tuple, and a rate of its own for each group."""
    groups = [[nn.Parameter(torch.ones(size)) for size in group] for group in sizes]
    optimizer = optim.Adam([{"params": group, "lr": 0.1 + index} for index, group in enumerate(groups)])
    for parameter in (each for group in groups for each in group):
        parameter.grad = torch.full_like(parameter, parameter.numel())
    optimizer.step()
    return optimizer


def test_only_parameters_of_one_group_must_have_had_the_same_options() -> None:
    state = grouped((1,), (2,)).state_dict()
    assert len(split(state, [[[0], [1]]])) == 1
    with pytest.raises(ValueError, match=r"parameters of a group that one worker owns now .* 'lr'"):
        split(state, [[[0, 1]]])


def test_a_state_whose_groups_were_one_does_not_fit_several() -> None:
    local = torch.optim.SGD([torch.zeros(1, requires_grad=True) for _ in range(3)], lr=0.1)
    assert len(split(local.state_dict(), [[[0, 1]], [[2]]])) == 2
    with pytest.raises(
        ValueError, match=r"group 0 is about parameters that are in several groups here \(0, 1\)"
    ):
        split(local.state_dict(), [[[0], [1]], [[], [2]]])
