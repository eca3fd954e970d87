"""Changes between forward and backward: the logical device counts those that the CPU counts, no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import _unsafe_preserve_version_counter  # type: ignore[attr-defined]
from torch.autograd.graph import increment_version
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.support.spmd_session import inline_session

pytestmark = pytest.mark.logical_device

Device = str
Change = Callable[[Tensor, Tensor], object]
"""Changes a computed tensor, whose square is being differentiated, or the leaf that it is computed from."""


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with inline_session():
        yield


def plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        return [list(value.shape), [round(each, 4) + 0.0 for each in value.flatten().tolist()]]
    return value


def outcome(run: Callable[[Device], list[Any]], device: Device) -> Any:
    """What a function returns, or its error."""
    try:
        return [plain(each) for each in run(device)]
    except RuntimeError as error:
        return str(error).partition(":")[0]


def like(other: Tensor, value: float) -> Tensor:
    return torch.full_like(other.detach(), value)


def swap(h: Tensor, w: Tensor) -> None:
    mine = h.data
    h.data = w.data
    w.data = mine


def preserve(h: Tensor, _: Tensor) -> None:
    with _unsafe_preserve_version_counter(h), torch.no_grad():
        h[0] = 9


def assign_view(h: Tensor, _: Tensor) -> None:
    h.data = like(h, 2).expand(3, 3).contiguous()[1]


def without_grad(change: Change) -> Change:
    return torch.no_grad()(change)


def in_inference(change: Change) -> Change:
    return torch.inference_mode()(change)


CHANGES: Final[dict[str, Change]] = {
    "data": lambda h, _: h.data.add_(1),
    "data twice": lambda h, _: (h.data.add_(1), h.data.mul_(2)),
    "an element of data": lambda h, _: h.data.__setitem__(0, 5.0),
    "a view of data": lambda h, _: h.data[1:].view(2, 1).zero_(),
    "data of a view": lambda h, _: h[1:].data.add_(1),
    "data of detach": lambda h, _: h.detach().data.add_(1),
    "detach of data": lambda h, _: h.data.detach().add_(1),
    "data copied": lambda h, _: h.data.copy_(torch.ones(3)),
    "data clamped": lambda h, _: h.data.clamp_(-1, 1),
    "data in a list": lambda h, _: torch._foreach_add_([h.data], 1.0),
    "data as out": lambda h, w: torch.add(w.detach(), 1, out=h.data),
    "data set": lambda h, _: h.data.set_(like(h, 2)),  # type: ignore[call-overload]
    "data reshaped": lambda h, _: h.data.unsqueeze_(0),
    "data counted": lambda h, _: increment_version(h.data),
    "data of the leaf": lambda _, w: w.data.add_(1),
    "data assigned": lambda h, _: setattr(h, "data", like(h, 7)),
    "data assigned from a view": assign_view,
    "data assigned and changed": lambda h, _: (setattr(h, "data", like(h, 7)), h.data.add_(1)),  # type: ignore[func-returns-value]
    "data assigned from detach": lambda h, _: (setattr(h, "data", h.detach()), h.data.add_(1)),  # type: ignore[func-returns-value]
    "data swapped": swap,
    "version kept": preserve,
    "detach": lambda h, _: h.detach().add_(1),
    "a view of detach": lambda h, _: h.detach()[1:].add_(1),
    "detach in a list": lambda h, _: torch._foreach_add_([h.detach()], 1.0),
    "detach as out": lambda h, w: torch.add(w.detach(), 1, out=h.detach()),
    "without grad": without_grad(lambda h, _: h.add_(1)),
    "set without grad": without_grad(lambda h, _: h.set_(like(h, 2))),  # type: ignore[call-overload]
    "set to another shape": without_grad(lambda h, _: h.set_(torch.ones(4, device=h.device))),  # type: ignore[call-overload]
    "in a graph": lambda h, _: h.add_(1),
    "counted": lambda h, _: increment_version(h),
    "inference": in_inference(lambda h, _: h.add_(1)),
    "data in inference": in_inference(lambda h, _: h.data.add_(1)),
    "detach in inference": in_inference(lambda h, _: h.detach().add_(1)),
    "a view in inference": in_inference(lambda h, _: h[1:].add_(1)),
    "parts in inference": in_inference(lambda h, _: [each.add_(1) for each in h]),
    "strides in inference": in_inference(lambda h, _: h.as_strided((2,), (2,)).add_(1)),
}


def changed(change: Change) -> Callable[[Device], list[Any]]:
    def run(device: Device) -> list[Any]:
        w = torch.arange(1.0, 4, device=device).requires_grad_()
        h = w * 2
        loss = (h * h).sum()
        change(h, w)
        torch.autograd.backward(loss)
        return [w.grad, h.detach(), w.detach(), h._version, w._version]

    return run


def ones(*shape: int, device: Device) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape, device=device))


def gradients(loss: Tensor, *tensors: Tensor) -> list[Any]:
    torch.autograd.backward(loss)
    return [each.grad for each in tensors]


def saved_output(device: Device) -> list[Any]:
    w = ones(3, device=device)
    h = w.exp()
    loss = h.sum()
    h.data.add_(1)
    return gradients(loss, w)


def assigned_leaf(device: Device) -> list[Any]:
    w, value = ones(3, device=device), torch.full((3,), 5.0, device=device)
    w.data = value
    loss = (w * w).sum()
    value.add_(1)
    return [*gradients(loss, w), w._version, value._version]


def clipped(device: Device) -> list[Any]:
    w = nn.Parameter(torch.tensor([[1.0, -2.0], [3.0, 0.5]], device=device))
    x = ones(2, 2, device=device)
    loss = (x @ w).tanh().sum()
    w.data.clamp_(-0.01, 0.01)
    return [*gradients(loss, w, x), w._version]


def averages_swapped(device: Device) -> list[Any]:
    w, x = ones(2, 2, device=device), ones(2, device=device)
    loss = (w @ x).square().sum()
    weights = w.data
    w.data = torch.full((2, 2), 9.0, device=device)
    other = (w @ x).sum().detach()
    w.data = weights
    return [*gradients(loss, w, x), other]


def averages_copied(device: Device) -> list[Any]:
    w, x = ones(2, 2, device=device), ones(2, device=device)
    loss = (w @ x).square().sum()
    weights = w.data.clone()
    w.data.copy_(torch.full((2, 2), 9.0))
    w.data.copy_(weights)
    return gradients(loss, w, x)


def from_vector(device: Device) -> list[Any]:
    w, b = ones(2, 2, device=device), ones(2, device=device)
    loss = (w @ b).square().sum()
    vector = parameters_to_vector([w, b]).detach() * 2
    vector_to_parameters(vector, [w, b])
    vector.add_(1)
    return [*gradients(loss, w, b), w.detach(), b.detach(), w._version]


class ByData(torch.optim.Optimizer):
    """Steps as old optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                each.data.add_(each.grad.data, alpha=-0.1)


def stepped(device: Device, make: Callable[..., torch.optim.Optimizer]) -> list[Any]:
    w, x = ones(3, device=device), ones(3, device=device)
    optimizer = make([w])
    loss = (w * x).sum()
    torch.autograd.backward((w * 2).sum())
    optimizer.step()
    return [*gradients(loss, x), w.detach()]


def parameters_of_data(device: Device) -> list[Any]:
    w = ones(3, device=device)
    other = nn.Parameter(w.data)
    loss = (w * w).sum()
    other.data.add_(1)
    return [*gradients(loss, w), other.detach()]


def counters(device: Device) -> list[Any]:
    h = ones(3, device=device) * 2
    versions: list[int] = []
    for make in (lambda: h.data, h.detach, lambda: h[0], lambda: h.data[0], lambda: h.view(3, 1)):
        shown = make()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            shown.add_(1)
        versions += [h._version, shown._version]
    return [h.detach(), *versions]


def set_to_views(device: Device) -> list[Any]:
    h, matrix = torch.ones(3, device=device), torch.arange(6.0, device=device).view(2, 3)
    h.set_(matrix[1])  # type: ignore[call-overload]
    h.add_(1)
    row = h.clone()
    h.set_(matrix.t())  # type: ignore[call-overload]
    h.mul_(2)
    empty = torch.ones(3, device=device)
    empty.set_()  # type: ignore[call-overload]
    return [row, h, matrix, h.stride(), empty]


def lists_that_share(device: Device) -> list[Any]:
    a, b = torch.arange(4.0, device=device), torch.ones(2, 2, device=device)
    torch._foreach_add_([a, a[1:3], a.view(2, 2)], 1.0)
    torch._foreach_mul_([b, a[:2]], [a.view(2, 2), b[0]])
    torch._foreach_copy_([b[0], b[1]], [b[1], b[0]])
    torch._foreach_add_([b[0, 0], b[0, 1]], b[0, 0])
    with pytest.raises(RuntimeError):
        torch._foreach_add_([a], [torch.ones(3, device=device)])
    return [a, b, a._version, b._version]


def resized_in_inference(device: Device) -> list[Any]:
    a, b = torch.empty(0, device=device), torch.ones(2, device=device)
    with torch.inference_mode():
        torch.cat([b, b], out=a)
    made = torch.ones(2, device=device)
    made.data = a.detach()
    return [a, made, a.is_inference(), made.is_inference()]


def inference_views(device: Device) -> list[Any]:
    w = ones(2, 3, device=device)
    with torch.inference_mode():
        turned = w.t()
        made = torch.ones(3, device=device)
        first, second = w.detach().chunk(2)
        first.add_(1)
        w.detach().t_()
    flags = [each.is_inference() for each in (turned, made, second, made[1:])]
    return [turned, w.detach(), w._version, *flags, *gradients((w[0] * 2).sum(), w)]


PROGRAMS: Final[dict[str, Callable[[Device], list[Any]]]] = {
    **{name: changed(change) for name, change in CHANGES.items()},
    "a saved output": saved_output,
    "a leaf's data assigned": assigned_leaf,
    "weights clipped": clipped,
    "averages swapped": averages_swapped,
    "averages copied": averages_copied,
    "parameters from a vector": from_vector,
    "an optimizer's step": lambda device: stepped(device, torch.optim.SGD),
    "an optimizer's step by data": lambda device: stepped(device, lambda given: ByData(given, {})),
    "a parameter of data": parameters_of_data,
    "counters": counters,
    "set to views": set_to_views,
    "lists that share memory": lists_that_share,
    "resized in inference": resized_in_inference,
    "views in inference": inference_views,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_change_is_counted_as_on_the_cpu(name: str) -> None:
    assert outcome(PROGRAMS[name], "spmd") == outcome(PROGRAMS[name], "cpu")
