"""What is put back when an attempt is repeated."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from spmd.elastic.errors import ElasticError
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


def test_repeated_attempt_draws_the_same_random_numbers() -> None:
    state = State({})
    state.keep()
    drawn = torch.rand(1)
    state.put_back()
    assert torch.equal(torch.rand(1), drawn)


class Interrupted(torch.autograd.Function):
    """The identity, whose backward raises an exception if it is told so."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, raises: bool) -> torch.Tensor:
        ctx.raises = raises
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.raises:
            raise RuntimeError("a member is lost")
        return *gradients, None


class FullySharded:
    """A model of FSDP2, and which of its parts have reduced their gradients in the last backward pass."""

    def __init__(self, mesh: DeviceMesh, reduce_dtype: torch.dtype | None) -> None:
        model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        fully_shard(model[0], mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        self.model, self.reduced, self.raises = model, list[str](), False
        model.set_all_reduce_hook(lambda _: self.reduced.append("all"))
        model[0].set_all_reduce_hook(lambda _: self.reduced.append("first"))
        interrupt: Any = Interrupted.apply
        model[0].register_forward_hook(lambda module, args, out: interrupt(out, self.raises))

    def backward(self) -> None:
        self.reduced.clear()
        self.model(torch.ones(1, 2)).sum().backward()

    def gradients(self) -> list[torch.Tensor]:
        return [each.grad.full_tensor() for each in self.model.parameters()]


@pytest.mark.parametrize("reduce_dtype", [None, torch.float64])
@pytest.mark.parametrize("ends", ["in a backward pass", "between two of them"])
def test_fully_sharded_gradients_of_a_repeated_attempt_are_its_own(
    mesh: DeviceMesh, ends: str, reduce_dtype: torch.dtype | None
) -> None:
    sharded = FullySharded(mesh, reduce_dtype)
    state = State({"model": sharded.model})
    state.clear_gradients()
    sharded.backward()
    expected, reduced = sharded.gradients(), list(sharded.reduced)
    assert sorted(reduced) == ["all", "first"]
    state.clear_gradients()
    sharded.model.set_requires_gradient_sync(False)
    sharded.backward()
    sharded.model.set_requires_gradient_sync(True)
    if ends == "in a backward pass":
        sharded.raises = True
        with pytest.raises(RuntimeError, match="a member is lost"):
            sharded.backward()
        sharded.raises = False
    for _ in range(2):
        state.clear_gradients()
        sharded.backward()
        assert sharded.reduced == reduced
        torch.testing.assert_close(sharded.gradients(), expected, rtol=0, atol=0)


class Average:
    """An object of the state whose tensors are sharded, by name and in a list."""

    def __init__(self, *values: torch.Tensor) -> None:
        self.values = list(values)

    def state_dict(self) -> dict[str, Any]:
        return {"count": len(self.values), "values": self.values, "named": dict(enumerate(self.values))}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.values = [*saved["values"], *saved["named"].values()]


def sharded(mesh: DeviceMesh, value: float) -> DTensor:
    return distribute_tensor(torch.full((2,), value), mesh, [Shard(0)])


def with_sharded_tensors(mesh: DeviceMesh, value: float) -> tuple[State, nn.Module, Average]:
    model, average = nn.Linear(2, 1), Average(sharded(mesh, value))
    model.register_buffer("scale", sharded(mesh, value))
    return State({"model": model, "average": average}), model, average


def test_newcomers_get_parts_of_sharded_tensors_that_are_no_parameters(mesh: DeviceMesh) -> None:
    member, model, _ = with_sharded_tensors(mesh, 1.0)
    newcomer, newcomers_model, newcomers_average = with_sharded_tensors(mesh, 2.0)
    member.keep()
    (buffer,) = member.buffers()
    assert not isinstance(buffer, DTensor)
    buffer.fill_(3.0)  # as a commit copies into it
    scale: Any = model.get_buffer("scale")
    assert scale.full_tensor().tolist() == [3.0, 3.0]
    newcomer.load(pickle.loads(pickle.dumps(member.give())))
    for found in (newcomers_model.get_buffer("scale"), *newcomers_average.values):
        assert isinstance(found, DTensor)
        assert found.full_tensor().tolist() == [1.0, 1.0]
    member.put_back()
    assert buffer.tolist() == [1.0, 1.0]


def test_sharded_tensor_that_a_newcomer_does_not_have_is_refused(mesh: DeviceMesh) -> None:
    member, _, _ = with_sharded_tensors(mesh, 1.0)
    member.keep()
    newcomer, _, average = with_sharded_tensors(mesh, 1.0)
    average.values.clear()
    with pytest.raises(ElasticError, match=r"sharded tensor, .* shape \(2,\), where this worker's has none"):
        newcomer.load(member.give())
