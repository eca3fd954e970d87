"""A convolutional model, its images and weights cut in the ways of their image programs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, nll_loss

from tests.group.farcall.xla.names import mesh_of, theirs
from tests.group.spmd.driven import WORKERS, driven

pytestmark = pytest.mark.processes


class Digits(nn.Module):
    """Two convolutions with batch norm, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 6, 5), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 3, 3), nn.BatchNorm2d(3)  # fewer channels than workers
        self.fc1, self.fc2 = nn.Linear(27, 20), nn.Linear(20, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(torch.relu(max_pool2d(self.conv1(x), 2)))
        x = self.bn2(torch.relu(max_pool2d(self.conv2(x), 2)))
        result: Tensor = self.fc2(torch.relu(self.fc1(x.flatten(1)))).log_softmax(1)
        return result


def cut(model: nn.Module, ways: list[str]) -> Any:
    """Mark the model's weights, and give the spec of its images."""
    x = theirs()
    for name, layer in model.named_modules():
        if "conv" in ways and "conv" in name:
            x.xs.mark_sharding(layer.weight, mesh_of(2, WORKERS // 2, 1, 1), (0, 1, 2, 3))
        if "channels" in ways and "conv" in name:
            x.xs.mark_sharding(layer.weight, mesh_of(WORKERS, 1, 1, 1), (0, 1, 2, 3))
        if "linear" in ways and "fc" in name:
            x.xs.mark_sharding(layer.weight, mesh_of(WORKERS, 1), (0, 1))
    shapes = {
        (True, True): (2, 1, 2, WORKERS // 4),
        (True, False): (WORKERS, 1, 1, 1),
        (False, True): (1, 1, WORKERS // 2, 2),
    }
    shape = shapes.get(("batch" in ways, "spatial" in ways))
    return None if shape is None else x.xs.ShardingSpec(mesh_of(*shape, names=tuple("BCWH")), (0, 1, 2, 3))


def later(ways: str, batch: int) -> Any:
    return pytest.param(ways, batch, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("ways", "batch"),
    [
        ("batch", 1),  # most workers have no image
        ("channels", 1),
        ("spatial conv", 8),
        *(later(ways, batch) for ways in ("spatial", "conv", "linear", "batch conv") for batch in (1, 8)),
        later("channels", 8),
        *(later(ways, batch) for ways in ("batch spatial", "batch spatial conv") for batch in (1, 8)),
    ],
)
@driven
def test_training_and_inference_are_those_of_one_process(ways: str, batch: int) -> None:
    x = theirs()
    torch.manual_seed(0)
    alone = Digits()
    model = copy.deepcopy(alone).to("xla")
    images, labels = torch.randn(batch, 1, 20, 20), torch.randint(10, (batch,))
    samples = x.xu.SampleGenerator((images, labels), 2)
    its, ours = (torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (alone, model))
    for there, wanted in x.pl.MpDeviceLoader(samples, "xla", input_sharding=cut(model, ways.split())):
        losses = []
        for each, optimizer, data, target in ((alone, its, images, labels), (model, ours, there, wanted)):
            optimizer.zero_grad()
            loss = nll_loss(each(data), target)
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=1e-4, abs=1e-5)
    alone.eval()
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(there).cpu(), alone(images), rtol=1e-3, atol=1e-4)
    x.torch_xla.sync()
