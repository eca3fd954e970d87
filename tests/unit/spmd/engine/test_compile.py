"""Models under ``torch.compile``: nothing is compiled, and results are those of the model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from spmd.engine.driver import current
from tests.support.spmd_session import inline_session

pytestmark = pytest.mark.logical_device


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    with inline_session():
        yield
    torch._dynamo.reset()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        if hidden.sum() < 0:
            hidden = -hidden
        last: Tensor = self.last(nn.functional.dropout(hidden, 0.3))
        return last


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.nightly), "inductor"])
def test_a_compiled_model_trains_as_the_model_does(backend: str) -> None:
    def train(*, compiled: bool) -> list[float]:
        torch.manual_seed(0)
        model = Model().to(current.DEVICE)
        run = torch.compile(model, backend=backend) if compiled else model
        optimizer = torch.optim.AdamW(model.parameters())
        losses = []
        for _ in range(3):
            loss = run(torch.ones(6, 8).to(current.DEVICE)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    assert train(compiled=True) == train(compiled=False)
