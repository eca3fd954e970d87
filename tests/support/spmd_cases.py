"""Small programs that give on the logical device what they give on the CPU.

Each is a function of a device that returns tensors and numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions
from torch.utils.checkpoint import checkpoint

__all__ = ["CASES", "MODELS", "same", "train"]

Case = Callable[[torch.device], Any]

CASES: Final[dict[str, Case]] = {}
"""By name."""


def case(function: Case) -> Case:
    """Note one."""
    CASES[function.__name__] = function
    return function


def same(given: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """Whether two results are the same; tensors on any device."""
    if isinstance(expected, Tensor):
        if given.shape != expected.shape or given.dtype != expected.dtype:
            return False
        ours, theirs = given.detach().cpu(), expected.detach()
        return bool(torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True))
    if isinstance(expected, (list, tuple)):
        return len(given) == len(expected) and all(
            same(*pair, tolerance) for pair in zip(given, expected, strict=True)
        )
    if isinstance(expected, float):
        return bool(abs(given - expected) <= tolerance)
    return bool(given == expected)


# ---- tensors


@case
def factories(device: torch.device) -> Any:
    torch.manual_seed(7)
    return (
        torch.zeros(2, 3, device=device),
        torch.full((2,), 1.5, device=device),
        torch.arange(5, device=device),
        torch.arange(5.0, device=device),
        torch.linspace(0, 1, 5, device=device),
        torch.eye(3, device=device),
        torch.tensor([1.0, 2.0], device=device),
        torch.randn(2, 3, device=device),
        torch.randint(9, (4,), device=device),
        torch.randperm(6, device=device),
        torch.empty(3, device=device).uniform_(-1, 1),
    )


@case
def numbers_out(device: torch.device) -> Any:
    x = torch.arange(6.0, device=device).reshape(2, 3)
    return x.sum().item(), x.tolist(), float(x[1, 2]), bool(x[0, 0] == 0), int(x.argmax()), len(x)


@case
def lower_precision(device: torch.device) -> Any:
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 8).to(device), torch.randn(4, 8).to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = layer(x)
    return y.dtype, y, f"{x.sum() * 0:.1f}"


@case
def control_flow(device: torch.device) -> Any:
    x, steps = torch.tensor(100.0, device=device), 0
    while x > 1:
        x, steps = x / 3, steps + 1
    return x, steps


@case
def mixed_with_cpu_scalars(device: torch.device) -> Any:
    return torch.ones(2, device=device) * torch.tensor(3.0) + torch.tensor(1)


@case
def data_dependent_shapes(device: torch.device) -> Any:
    x = torch.tensor([3.0, -1.0, 2.0, -5.0, 2.0], device=device)
    return (
        x[x > 0],
        torch.nonzero(x),
        torch.unique(x),
        torch.masked_select(x, x < 0),
        x.equal(x + 0),
        torch.allclose(x, x),
    )


@case
def dtypes(device: torch.device) -> Any:
    x = torch.arange(4, device=device)
    return (
        x.float() / 2,
        x.to(torch.float64),
        x.half().float(),
        x > 1,
        (x > 1).int() + x.long(),
        x.view(torch.int32),
    )


@case
def complex_numbers(device: torch.device) -> Any:
    x = torch.view_as_complex(torch.arange(8.0, device=device).reshape(2, 2, 2))
    return torch.view_as_real(x.conj() * x), torch.view_as_real(x).clone(), x.real.clone(), x.imag + 1


@case
def views_reshaped_in_place(device: torch.device) -> Any:
    x = torch.arange(20.0, device=device).view(4, 5)
    y = x[1]
    y.as_strided_((2, 2), (1, 2), 10)
    y.add_(1)
    return x, y


@case
def indices_from_the_cpu(device: torch.device) -> Any:
    x = torch.arange(20.0, device=device).view(4, 5).requires_grad_()
    order, mask = torch.tensor([2, 0, 3]), torch.tensor([True, False, False, True])
    y = x.clone()
    y[order[:2]] = x[order][1:]
    y[order, torch.tensor(1)] = -1
    y[mask] *= 2
    torch.autograd.backward(y.square().sum())
    return y, x[mask], x.grad


@case
def packed_sequences(device: torch.device) -> Any:
    torch.manual_seed(0)
    layer, padded = nn.GRU(3, 4), torch.randn(5, 3, 3).to(device)
    layer = layer.to(device)
    lengths = torch.tensor([2, 5, 3])
    packed = nn.utils.rnn.pack_padded_sequence(padded, lengths, enforce_sorted=False)
    found, hidden = layer(packed)
    y, back = nn.utils.rnn.pad_packed_sequence(found)
    torch.autograd.backward(y.sum() + hidden.sum())
    return back, [(each * 1000).round() for each in (y, hidden, *(p.grad for p in layer.parameters()))]


@case
def derivatives_forward(device: torch.device) -> Any:
    x = torch.arange(6.0, device=device).view(2, 3)
    return torch.func.jvp(lambda x: (x * x).sum(0).sin(), (x,), (x + 1,))


@case
def draws_in_the_order_of_memory(device: torch.device) -> Any:
    torch.manual_seed(7)
    images = torch.arange(96.0).view(2, 3, 4, 4).contiguous(memory_format=torch.channels_last).to(device)
    half = torch.zeros(6, 8, device=device)[:, :4]
    filled = torch.zeros(6, 8, device=device)
    filled[:, :4].normal_()
    return (
        *(torch.randn_like(each) for each in (images, half, half.t())),
        *(nn.functional.dropout(each, 0.4) for each in (images, half + 1)),
        torch.rand_like(images, dtype=torch.float64),
        filled,
    )


@case
def reshaped_in_place(device: torch.device) -> Any:
    x = torch.arange(6.0, device=device).reshape(2, 3)
    x.t_()
    x.add_(1)
    x.unsqueeze_(0)
    return x, x.squeeze_()


@case
def lazy_modules(device: torch.device) -> Any:
    layers = (nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(5))
    model, x = nn.Sequential(*layers).to(device), torch.arange(216.0).view(2, 3, 6, 6).to(device) / 100
    lazy = copy.deepcopy(nn.LazyLinear(3, device=device, dtype=torch.float64)).to(torch.float32)
    torch.manual_seed(0)
    y = lazy(model(x).relu())
    torch.autograd.backward(y.sum())
    parameters = list(model.parameters()) + list(lazy.parameters())
    assert all(type(each) is not Tensor and each.is_leaf for each in parameters)
    return y, parameters, [each.grad for each in parameters], list(model.buffers())


@case
def drawn_in_place(device: torch.device) -> Any:
    torch.manual_seed(3)
    x = torch.ones(2, 4, 3, 3, device=device)
    leaky = torch.linspace(-1, 1, 8, device=device)
    return (
        torch.empty(7, device=device).bernoulli_(),
        functional.dropout2d(x, 0.5),
        functional.alpha_dropout(x, 0.5),
        functional.rrelu(leaky, training=True),
        functional.rrelu_(leaky.clone(), training=True),
        functional.rrelu(leaky),
    )


@case
def chunked_loss(device: torch.device) -> Any:
    torch.manual_seed(0)
    rows, weight, target = torch.randn(8, 3), torch.randn(4, 3), torch.randint(4, (8,))
    options = LinearCrossEntropyOptions(batch_chunk_size=2)
    weight = weight.to(device).requires_grad_()
    loss = functional.linear_cross_entropy(rows.to(device), weight, target.to(device), options=options)
    (grad,) = torch.autograd.grad(loss, [weight])
    return loss, grad


@case
def rare_forms(device: torch.device) -> Any:
    x, shifted = torch.linspace(1, 2, 6, device=device), torch.arange(4, device=device)
    x.polygamma_(1)
    shifted <<= 2
    shifted >>= 1
    rows = torch.linspace(0, 1, 10, device=device).reshape(5, 2)
    counts, edges = torch.histogramdd(rows, [2, 3])
    cut = torch.tensor_split(rows, torch.tensor([1, 3]))  # indices are the CPU's on any device
    return x, shifted, counts, edges, cut, torch.unflatten(x.new_zeros(4, 0), 1, (2, 0))


@case
def writes_by_index(device: torch.device) -> Any:
    x = torch.zeros(5, 3, device=device)
    x[torch.tensor([1, 3], device=device)] = 2.0
    x.index_add_(0, torch.tensor([0, 0], device=device), torch.ones(2, 3, device=device))
    x.scatter_(1, torch.tensor([[2], [1]], device=device), 9.0)
    x.masked_fill_(x == 2, -1)
    x[x > 8] = 0.5
    return x


@case
def copies(device: torch.device) -> Any:
    layer = nn.Linear(2, 2)
    nn.init.ones_(layer.weight)
    nn.init.zeros_(layer.bias)
    moved = layer.to(device)
    copied = copy.deepcopy(moved)
    with torch.no_grad():
        moved.weight.add_(1)
    return copied.weight, moved.weight, copied(torch.ones(1, 2, device=device))


@case
def default_device(device: torch.device) -> Any:
    with torch.device(device):
        made = torch.ones(2)
    torch.set_default_device(device)
    try:
        layer = nn.Linear(2, 2)
    finally:
        torch.set_default_device(None)
    return made, made.device.type == device.type, layer.weight.device.type == device.type


# ---- gradients


@case
def gradients(device: torch.device) -> Any:
    x = torch.arange(6.0, device=device).reshape(2, 3).requires_grad_()
    y = (x.exp() * x[0]).sum() + x.t().matmul(x).tanh().mean()
    torch.autograd.backward(y, retain_graph=True)
    (twice,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    return x.grad, torch.autograd.grad(twice.sum(), x)[0], y


@case
def checkpoints(device: torch.device) -> Any:
    found = []
    for reentrant in (False, True):
        torch.manual_seed(3)
        x = torch.arange(4.0, device=device).requires_grad_()

        def block(z: Tensor) -> Tensor:
            return functional.dropout(z.exp(), 0.5).relu()

        y = checkpoint(block, x, use_reentrant=reentrant)
        torch.autograd.backward(y.sum())
        found += [x.grad, y]
    return found


@case
def hooks_and_functions(device: torch.device) -> Any:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            x: Tensor = ctx.saved_tensors[0]
            return gradient * x

    x: Any = torch.arange(3.0, device=device).requires_grad_()
    seen: list[Tensor] = []

    def hook(gradient: Tensor) -> Tensor:
        seen.append(gradient)
        return gradient + 1

    double: Any = Double
    x.register_hook(hook)
    double.apply(x).sum().backward()
    return x.grad, seen


# ---- models


@case
def ctc_with_targets_and_lengths_on_the_cpu(device: torch.device) -> Any:
    scores = torch.linspace(-1, 1, 60, device=device).reshape(5, 3, 4).requires_grad_()
    targets = torch.tensor([[1, 2], [3, 1], [2, 0]])
    lengths = torch.tensor([5, 4, 5]), torch.tensor([2, 2, 1])
    loss = functional.ctc_loss(scores.log_softmax(-1), targets, *lengths)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss, scores.grad


@case
def scaled_gradients(device: torch.device) -> Any:
    model = nn.Linear(3, 2)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    scaler = torch.amp.GradScaler(device.type, growth_interval=1)
    scales = []
    for size in (1.0, float("inf"), 2.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((4, 3), size, device=device)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [*scales, *model.parameters()]


def _mlp() -> tuple[nn.Module, list[Tensor]]:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4)), [torch.randn(4, 6)]


def _encoder() -> tuple[nn.Module, list[Tensor]]:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.Embedding(50, 16), layer, nn.Linear(16, 4)), [torch.randint(50, (4, 6))]


def _convolutions() -> tuple[nn.Module, list[Tensor]]:
    layers = [nn.Conv2d(3, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(4, 4, 3, 1, 1), nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten()]
    return nn.Sequential(*layers), [torch.randn(4, 3, 16, 16)]


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.rnn(x)[0]
        return found


class _Joined(nn.Module):
    """Its gradient of a group norm is the sum of a convolution's and of one half of a concatenation's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.down, self.up = nn.Conv2d(8, 8, 2, 2), nn.ConvTranspose2d(8, 8, 2, 2)
        self.last = nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = self.norm(self.first(x))
        return self.last(torch.cat([high, self.up(functional.silu(self.down(high)))], 1))  # type: ignore[no-any-return]


def _joined() -> tuple[nn.Module, list[Tensor]]:
    return _Joined(), [torch.randn(4, 3, 8, 8)]


def _recurrent() -> tuple[nn.Module, list[Tensor]]:
    return _Recurrent(), [torch.randn(4, 5, 4)]


MODELS: Final[dict[str, tuple[Callable[[], tuple[nn.Module, list[Tensor]]], Callable[[Any], Any]]]] = {
    "mlp-sgd": (_mlp, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "mlp-adam": (_mlp, lambda p: torch.optim.Adam(p, 1e-2)),
    "mlp-adam-loop": (_mlp, lambda p: torch.optim.Adam(p, 1e-2, foreach=False)),
    "mlp-adamw-fused": (_mlp, lambda p: torch.optim.AdamW(p, 1e-2, fused=True)),
    "mlp-adamw-capturable": (_mlp, lambda p: torch.optim.AdamW(p, 1e-2, amsgrad=True)),
    "encoder-adamw": (_encoder, lambda p: torch.optim.AdamW(p, 1e-2)),
    "convolutions-rmsprop": (_convolutions, lambda p: torch.optim.RMSprop(p, 1e-3)),
    "convolutions-sgd": (_convolutions, lambda p: torch.optim.SGD(p, 0.1)),
    "joined-sgd": (_joined, lambda p: torch.optim.SGD(p, 0.1)),
    "recurrent-adagrad": (_recurrent, lambda p: torch.optim.Adagrad(p, 0.1)),
}
"""A model with inputs, and an optimizer, by name."""


def train(name: str, device: torch.device, shard: Callable[[Tensor, int], None] | None = None) -> list[float]:
    """The losses of some steps, with clipping and a schedule.

    Args:
        shard: lays an input (along its first dimension) or a parameter (along its longest) out.
    """
    make, make_optimizer = MODELS[name]
    torch.manual_seed(0)
    model, inputs = make()
    model, inputs = model.to(device), [each.to(device) for each in inputs]
    if shard is not None:
        for each in inputs:
            shard(each, 0)
        for parameter in model.parameters():
            shard(parameter, max(range(parameter.dim()), key=lambda dim: parameter.shape[dim]))
    optimizer = make_optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    losses = []
    for step in range(4):
        torch.manual_seed(step)
        loss = model(*inputs).pow(2).mean()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses
