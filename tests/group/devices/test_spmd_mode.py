"""SPMD mode whose workers compute on devices, which the driver does not need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spmd
from farcall import rpc
from spmd.engine.errors import SpmdError
from tests.support.devices import FIRST, KIND, SECOND, device_kind, mode, use_device
from tests.support.workers import RunWorkers, Worker

__all__ = ["device_kind", "mode"]

STEPS = 3


class Net(nn.Module):
    def __init__(self, drops: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.LayerNorm(16)
        self.drop = nn.Dropout(0.5 if drops else 0.0)
        self.second = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.drop(self.norm(self.first(x).relu())))
        return out


def batches() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(8, 6) for _ in range(STEPS)]


def train(model: Any, device: Any, given: list[Tensor], mark: Callable[[Tensor], object]) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    torch.manual_seed(4)
    for x in given:
        batch = x.to(device)
        mark(batch)
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(each) for each in losses]


def drawn(device: Any) -> list[Tensor]:
    """What is drawn with a seed on a device."""
    torch.manual_seed(9)
    found = [torch.rand(4, 6, device=device), torch.randn(8, device=device)]
    found.append(nn.init.uniform_(torch.empty(6, 4, device=device)))
    x = torch.ones(4, 8, device=device)
    for given in (x, x.t(), x.t()[:6], x.t()[:, :1].expand(8, 3), x.view(2, 4, 4).transpose(1, 2)):
        found.append(nn.functional.dropout(given, 0.5))
        found.append(torch.rand_like(given))
        found.append(torch.randn_like(given))
    found.append(x.t().normal_())
    found.append(x.t()[:6].normal_())
    found.append(torch.randperm(12, device=device))
    return [each.cpu() for each in found]


def on_one_device() -> tuple[list[Tensor], list[float]]:
    """What one device gives; called on a worker."""
    torch.manual_seed(0)
    model = Net(drops=True).to(KIND)
    return drawn(KIND), train(model, KIND, batches(), lambda _: None)


def _serve(worker: Worker) -> None:
    worker.join()
    rpc.shutdown()


def _worker(worker: Worker, mode: str) -> None:
    use_device(mode, worker.rank)
    _serve(worker)


def _without_device(worker: Worker) -> None:
    _serve(worker)


def drive(worker: Worker, folder: str, begin: Callable[[], object]) -> None:
    worker.join()
    numbers, losses = rpc.rpc_sync("worker1", on_one_device, timeout=60)
    begin()
    device = spmd.device()
    mesh = spmd.Mesh(range(spmd.global_device_count()), (2, spmd.global_device_count() // 2), ("x", "y"))

    def mark(tensor: Tensor) -> None:
        spmd.mark_sharding(tensor, mesh, ("x", "y"))

    for mine, theirs in zip(drawn(device), numbers, strict=True):
        torch.testing.assert_close(mine, theirs)
    torch.manual_seed(0)
    model = Net(drops=True)
    model = model.to(device)
    mark(model.first.weight)
    found = train(model, device, batches(), mark)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses))
    state = torch.spmd.get_rng_state()  # type: ignore[attr-defined]
    first = torch.rand(3, device=device).cpu()
    torch.spmd.set_rng_state(state)  # type: ignore[attr-defined]
    assert torch.equal(torch.rand(3, device=device).cpu(), first)
    q = torch.randn(2, 2, 4, 8)
    attention = nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(attention(q.to(device), q.to(device), q.to(device)).cpu(), attention(q, q, q))
    path = Path(folder) / "state.pt"
    torch.save({name: each.cpu() for name, each in model.state_dict().items()}, path)
    again = Net()
    again.load_state_dict(torch.load(path))
    x = batches()[0]
    model.eval()
    torch.testing.assert_close(model(x.to(device)).cpu(), again.eval()(x))
    spmd.shutdown()
    rpc.shutdown()


def on_two_workers() -> None:
    spmd.use_spmd(device=KIND)


def on_two_devices_of_each_worker() -> None:
    spmd.use_spmd([f"worker{rank}/{device}" for device in (FIRST, SECOND) for rank in (1, 2)])


@pytest.mark.parametrize("begin", [on_two_workers, on_two_devices_of_each_worker])
def test_workers_compute_and_draw_as_one_device(
    run_workers: RunWorkers, mode: str, tmp_path: Path, begin: Callable[[], object]
) -> None:
    workers = run_workers.start(
        [
            lambda worker: drive(worker, str(tmp_path), begin),
            lambda worker: _worker(worker, mode),
            lambda worker: _worker(worker, mode),
        ],
        3,
        time_limit=80,
    )
    workers.results()


def drive_without_devices(worker: Worker) -> None:
    worker.join()
    with pytest.raises(SpmdError, match="worker 'worker1' was asked to compute on 'cuda:77'"):
        spmd.use_spmd(device="cuda:77")
    rpc.shutdown()


def test_a_worker_without_the_device_is_named(run_workers: RunWorkers) -> None:
    run_workers.start([drive_without_devices, _without_device], 2).results()
