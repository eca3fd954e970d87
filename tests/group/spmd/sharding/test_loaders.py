"""Loaders that shard batches, and what a training loop does with them."""

from __future__ import annotations

import copy
import dataclasses
import threading
import weakref
from collections import OrderedDict, UserDict
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import spmd
from spmd.sharding import loader
from tests.group.spmd.driven import WORKERS, driven
from tests.group.spmd.sharded_layers import layers, on_device

pytestmark = pytest.mark.processes

ROWS = f"{{devices=[{WORKERS},1]0,1,2,3}}"


def batches(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    return [(torch.full((8, 2), float(number)), torch.arange(8)) for number in range(count)]


@driven
def test_a_loader_cuts_what_the_spec_fits() -> None:
    spec = spmd.ShardingSpec(spmd.get_1d_mesh("data"), ("data", None))
    loader = spmd.DeviceLoader(batches(), spmd.device(), input_sharding=spec)
    assert len(loader) == 3
    seen = list(loader)
    assert [x.sharding_spec for x, _ in seen] == [ROWS] * 3
    assert [y.sharding_spec for _, y in seen] == [""] * 3
    assert [float(x.sum()) for x, _ in seen] == [0, 16, 32]
    assert len(list(loader)) == 3


@driven
def test_a_loader_takes_a_spec_for_each_entry() -> None:
    data = [{"x": x, "y": y} for x, y in batches(1)]
    mesh = spmd.get_1d_mesh("data")
    specs = {"x": spmd.ShardingSpec(mesh, ("data", None)), "y": None}
    (batch,) = spmd.DeviceLoader(data, spmd.device(), input_sharding=specs)
    assert batch["x"].sharding_spec == ROWS
    assert batch["y"].sharding_spec == ""
    with pytest.raises(KeyError, match=r"Keys: \['y'\] are missing from input_sharding"):
        list(spmd.DeviceLoader(data, spmd.device(), input_sharding={"x": specs["x"]}))
    with pytest.raises(ValueError, match="input batch should be a dict when input sharding is a dict"):
        list(spmd.DeviceLoader(batches(), spmd.device(), input_sharding=specs))


@dataclasses.dataclass(frozen=True)
class Pair:
    x: Tensor
    name: str


@driven
def test_a_loader_moves_what_is_in_mappings_and_dataclasses_and_keeps_their_kind() -> None:
    rows = spmd.ShardingSpec(spmd.get_1d_mesh("data"), ("data", None))
    data: list[Any] = [
        UserDict(x=torch.ones(8, 2)),
        OrderedDict(x=torch.ones(8, 2)),
        MappingProxyType({"x": torch.ones(8, 2)}),
    ]
    for specs in (rows, {"x": rows}):
        for batch, given in zip(
            spmd.DeviceLoader(data[:2], spmd.device(), input_sharding=specs), data[:2], strict=True
        ):
            assert type(batch) is type(given)
            assert batch["x"].sharding_spec == ROWS
            assert given["x"].device.type == "cpu"
    (batch,) = spmd.DeviceLoader([data[2]], spmd.device(), input_sharding=rows)
    assert batch["x"].sharding_spec == ROWS
    (pair,) = spmd.DeviceLoader([Pair(torch.ones(8, 2), "a")], spmd.device(), input_sharding=rows)
    assert pair.x.sharding_spec == ROWS
    assert pair.name == "a"


@driven
def test_what_is_no_spec_is_refused_before_anything_is_read() -> None:
    wrong: Any
    for wrong in (("data", None), {"x": ("data", None)}):
        with pytest.raises(TypeError, match=r"input_sharding is a spmd\.ShardingSpec\(mesh, spec\)"):
            spmd.DeviceLoader(batches(), spmd.device(), input_sharding=wrong)


@driven
def test_a_loader_may_ask_for_pinned_memory() -> None:
    data = torch.arange(8.0)
    (batch,) = spmd.DeviceLoader(
        DataLoader(TensorDataset(data), batch_size=8, pin_memory=True), spmd.device()
    )
    assert batch[0].cpu().equal(data)


@driven
def test_a_minibatch_must_divide() -> None:
    mesh = spmd.get_1d_mesh("data")
    data = [torch.ones(WORKERS - 1, 2)]
    (batch,) = spmd.DeviceLoader(data, spmd.device(), input_sharding=spmd.ShardingSpec(mesh, ("data", None)))
    assert batch.shape == (WORKERS - 1, 2)
    spec = spmd.ShardingSpec(mesh, ("data", None), minibatch=True)
    with pytest.raises(RuntimeError, match="must be divisible by local runtime device count"):
        list(spmd.DeviceLoader(data, spmd.device(), input_sharding=spec))


@driven
def test_a_loader_says_what_the_users_loader_raised_after_what_it_gave() -> None:
    def failing() -> Iterator[Tensor]:
        yield torch.ones(2)
        raise LookupError("no more data")

    batches = iter(spmd.DeviceLoader(failing(), spmd.device()))
    assert next(batches).cpu().tolist() == [1, 1]
    with pytest.raises(LookupError, match="no more data"):
        next(batches)


@driven
def test_a_loader_may_be_left_in_the_middle() -> None:
    endless = (torch.ones(2) for _ in iter(int, 1))
    for batch in spmd.DeviceLoader(endless, spmd.device(), loader_prefetch_size=2):
        assert batch.shape == (2,)
        break


@pytest.mark.parametrize("foreach", [True, False])
@driven
def test_clipping_sums_gradients_where_their_parameters_are(foreach: bool) -> None:
    alone = layers()
    model: Any = copy.deepcopy(alone).to(spmd.device())
    mesh = spmd.Mesh(range(WORKERS), (2, 2), ("data", "model"))
    for layer in model[:2]:
        spmd.mark_sharding(layer.up.weight, mesh, ("model", "data"))
    x = torch.randn(8, 8)
    model(spmd.mark_sharding(on_device(x), mesh, ("data", None))).square().sum().backward()
    alone(x).square().sum().backward()
    norm, expected = (
        nn.utils.clip_grad_norm_(each.parameters(), 0.5, foreach=foreach) for each in (model, alone)
    )
    torch.testing.assert_close(norm.cpu(), expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=1e-4, atol=1e-5)
    for layer in model[:2]:
        assert layer.up.weight.grad.placements == layer.up.weight.placements


@driven
def test_a_loader_that_hangs_does_not_hold_up_who_leaves_it() -> None:
    leave = threading.Event()

    def hanging() -> Iterator[Tensor]:
        yield torch.ones(2)
        leave.wait()

    with mock.patch.object(loader, "_PATIENCE", 0.2):
        batches: Any = iter(spmd.DeviceLoader(hanging(), spmd.device()))
        next(batches)
        batches.close()
    (thread,) = [each for each in threading.enumerate() if each.name == "spmd loader"]
    leave.set()
    thread.join()


@driven
def test_a_loader_keeps_no_batch_while_it_waits_for_the_next() -> None:
    given: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def batches() -> Iterator[Tensor]:
        for _ in range(4):
            batch = torch.ones(2)
            given.append(weakref.ref(batch))
            yield batch
            del batch

    for _ in spmd.DeviceLoader(batches(), spmd.device(), loader_prefetch_size=1):
        _ = None
        spmd.sync()
        alive.append(given[0]() is not None)
    assert alive[1:] == [False] * 3
