"""What is put back when an attempt is repeated."""

from __future__ import annotations

import torch
from torch import nn

from spmd.elastic.state import State


def test_scaler_unscales_the_gradients_of_a_repeated_attempt_again() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    state = State({"model": model, "optimizer": optimizer, "scaler": scaler})
    state.keep()
    for attempt in range(2):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.unscale_(optimizer)
        assert model.weight.grad is not None
        assert model.weight.grad.tolist() == [[1.0, 1.0]]
        if attempt == 0:  # it ends before the optimizer's step
            state.put_back()
    scaler.step(optimizer)
    scaler.update()


def test_learning_rate_that_an_attempt_has_changed_is_put_back_and_not_given_to_newcomers() -> None:
    model = nn.Linear(2, 1)
    optimizers = {
        "number": torch.optim.SGD(model.parameters(), 0.1),
        "tensor": torch.optim.SGD(model.parameters(), torch.tensor(0.1)),
    }
    state = State({"model": model, **optimizers})
    state.keep()
    for optimizer in optimizers.values():
        optimizer.param_groups[0]["lr"] *= 0.5
    given = state.give()
    state.put_back()
    for name, optimizer in optimizers.items():
        assert float(given[name]["param_groups"][0]["lr"]) == float(optimizer.param_groups[0]["lr"])
        assert abs(float(optimizer.param_groups[0]["lr"]) - 0.1) < 1e-6
        assert given[name]["param_groups"][0]["params"] == [0, 1]
