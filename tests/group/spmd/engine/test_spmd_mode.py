"""SPMD mode on real workers."""

from __future__ import annotations

import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Shard
from torch.nn import Parameter

import dist_autograd
import rpc
import spmd
from spmd.engine.api import constrain
from spmd.engine.program.program import Layout, MeshKey
from tests.support.serving import in_group, serve
from tests.support.spmd_cases import CASES, MODELS, same, train
from tests.support.workers import RunWorkers, Worker


def check(wrong: dict[str, str], name: str, find: Callable[[], Any], expected: Any) -> None:
    """Note what is wrong with what ``find`` returns."""
    try:
        found = find()
        if not same(found, expected, 1e-5):
            wrong[name] = f"{found}, expected {expected}"
    except Exception:
        wrong[name] = traceback.format_exc()


def run_all(worker: Worker) -> dict[str, str]:
    """What has gone wrong, by case."""
    spmd.use_spmd()
    device, cpu, workers = spmd.device(), torch.device("cpu"), spmd.global_device_count()
    mesh, wrong = MeshKey(tuple(range(workers)), (workers,)), dict[str, str]()

    def shard(tensor: Tensor, dim: int) -> None:
        constrain(tensor, Layout.of(mesh, (Shard(dim),)))

    for name, case in CASES.items():
        check(wrong, name, partial(case, device), case(cpu))
    for name in MODELS:
        check(wrong, name, partial(train, name, device, shard), train(name, cpu))
    spmd.shutdown()
    return wrong


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_programs_give_what_the_cpu_gives(run_workers: RunWorkers, workers: int) -> None:
    tasks = [in_group(run_all)] + [serve] * workers
    wrong = run_workers(tasks, time_limit=90)[0]
    assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())


def saved_and_sent(worker: Worker) -> str:
    spmd.use_spmd()
    path = str(worker.folder / "state.pt")
    torch.save({"weight": torch.ones(2, device=spmd.device())}, path)
    device: str = rpc.rpc_sync("worker1", device_of, args=(torch.ones(2, device=spmd.device()),))
    assert device == "cpu"
    spmd.shutdown()
    return path


def weighted(tensors: dict[str, Any]) -> Tensor:
    weight, (x, again) = tensors["weight"], tensors["inputs"]
    assert type(weight) is Tensor
    assert x is again
    answer: Tensor = (weight * x.exp()).sum()
    return answer


def on_device(x: Tensor) -> Tensor:
    return x.to(spmd.device()) ** 2


def answered_from_device(x: Tensor) -> Tensor:
    squared: Tensor = rpc.rpc_sync("worker0", on_device, args=(x,))
    assert squared.is_cpu
    return squared.sum()


def applied(module: torch.nn.Module, x: Tensor) -> Tensor:
    assert all(type(each) is Parameter for each in module.parameters())
    answer: Tensor = module(x).sum()
    return answer


def differentiated(worker: Worker) -> None:
    spmd.use_spmd()
    leaf = torch.tensor([1.0, 2.0], device=spmd.device(), requires_grad=True)
    weight = Parameter(torch.tensor([3.0, 4.0], device=spmd.device()))
    module = torch.nn.Linear(2, 1, device=spmd.device())
    with dist_autograd.context() as context:
        x = leaf * 2
        loss = rpc.rpc_sync("worker1", weighted, args=({"weight": weight, "inputs": [x, x]},))
        loss = loss + rpc.rpc_sync("worker1", answered_from_device, args=(x,))
        loss = loss + rpc.rpc_async("worker1", applied, args=(module, leaf)).wait()
        dist_autograd.backward(context, [loss])
        found = {each: gradient.cpu() for each, gradient in dist_autograd.get_gradients(context).items()}
    x, by_hand = x.detach().cpu(), weight.detach().cpu()
    torch.testing.assert_close(found[weight], x.exp())
    torch.testing.assert_close(found[leaf], 2 * (by_hand * x.exp() + 2 * x) + module.weight.detach().cpu()[0])
    assert module.weight not in found  # the copy of a module has parameters of its own
    assert rpc.rpc_sync("worker1", is_leaf_that_requires_grad, args=(leaf,))
    spmd.shutdown()


def is_leaf_that_requires_grad(x: Tensor) -> bool:
    return x.is_leaf and x.requires_grad


def test_gradients_flow_back_to_tensors_that_were_sent(run_workers: RunWorkers) -> None:
    run_workers([in_group(differentiated), serve], 2)


def device_of(t: Tensor) -> str:
    assert t.tolist() == [1, 1]
    return t.device.type


@pytest.mark.fresh_interpreter
def test_other_processes_read_the_file_and_receive_the_tensor_on_the_cpu(
    run_workers: RunWorkers,
) -> None:
    path = run_workers([in_group(saved_and_sent), serve])[0]
    program = f"import torch; print(torch.load({path!r}, map_location='cpu'))"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout == "{'weight': tensor([1., 1.])}\n"
