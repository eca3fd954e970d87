"""What SPMD mode is measured with: a decoder and ResNet-18, each as one device's program and written by hand.

``on_device`` makes a step for the logical device: the plain model and some marks. ``by_hand`` makes the same
step for one rank of a process group: with ``DistributedDataParallel``, DTensor's styles or ``fully_shard``.
Both begin with the same weights and get the same batches, so that their losses can be compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import spmd
from spmd.fsdp import FSDPv2

__all__ = ["CASES", "Case", "Decoder", "Sizes", "Step", "by_hand", "least_bytes", "on_device", "resnet18"]


@dataclass(frozen=True)
class Sizes:
    """How large it is.

    Attributes:
        layers, width, batch, length: of the decoder; ``batch`` samples of ``length`` tokens on all workers.
        images, pixels: for ResNet-18: number of images on all workers, and their width and height in pixels.
    """

    layers: int = 4
    width: int = 512
    batch: int = 32
    length: int = 64
    vocabulary: int = 1024
    images: int = 64
    pixels: int = 32


# ---- models


class Layer(nn.Module):
    """A layer of a decoder, ``(batch, length, width)`` to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.width = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        rows = self.norm1(x)
        q, k, v = (
            each(rows).view(batch, length, -1, self.width).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        bent: Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + bent


class Decoder(nn.Module):
    """Tokens ``(batch, length)`` to scores of the next ones."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.places = nn.Embedding(sizes.length, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes.width, 8) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


class Block(nn.Module):
    """Two convolutions of 3 by 3, and what came in on top."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.short: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.short(x))


def resnet18(classes: int = 10) -> nn.Module:
    """He et al. (2015), with 18 layers: images ``(batch, 3, height, width)`` to scores."""
    blocks: list[nn.Module] = []
    before = 64
    for place, after in enumerate((64, 128, 256, 512)):
        for stride in (1, 1) if place == 0 else (2, 1):
            blocks.append(Block(before, after, stride))
            before = after
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, classes),
    )


# ---- what is measured


@dataclass(frozen=True)
class Case:
    """A way to divide a model.

    Attributes:
        name: as the command takes it.
        title: of its line.
        rival: what it is compared with.
        bar, gloo_bar: the most that our step may take, in steps by hand on our backend and on gloo.
        same_loss: both compute the same numbers.
    """

    name: str
    title: str
    rival: str
    bar: float
    gloo_bar: float
    same_loss: bool = True


CASES: Final = (
    Case("data", "decoder, data", "DDP", 1.10, 0.8),
    Case("model", "decoder, tensors", "DTensor", 1.10, 0.8),
    Case("fsdp", "decoder, FSDPv2", "fully_shard", 1.0, 0.8),
    Case("resnet", "ResNet-18, data", "DDP", 1.15, 0.8, same_loss=False),  # DDP's norms see their rank alone
)


Step = Callable[[], Tensor]
"""Does one training step and returns the loss, a tensor that is not awaited yet."""


def _model(name: str, sizes: Sizes) -> nn.Module:
    torch.manual_seed(0)
    return resnet18() if name == "resnet" else Decoder(sizes)


def _batches(name: str, sizes: Sizes) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets, the same eight again and again."""
    source = torch.Generator().manual_seed(1)
    made = []
    for _ in range(8):
        if name == "resnet":
            x = torch.randn(sizes.images, 3, sizes.pixels, sizes.pixels, generator=source)
            made.append((x, torch.randint(10, (sizes.images,), generator=source)))
        else:
            shape = (sizes.batch, sizes.length + 1)
            tokens = torch.randint(sizes.vocabulary, shape, generator=source)
            made.append((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
    return itertools.cycle(made)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    cut = [each for each in model.parameters() if isinstance(each, DTensor)]
    rest = [each for each in model.parameters() if not isinstance(each, DTensor)]
    groups = [{"params": each} for each in (cut, rest) if each]  # lists of both kinds are refused
    return torch.optim.AdamW(groups, lr=1e-4, foreach=True)


def _trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, take: Callable[[], tuple[Tensor, Tensor]]
) -> Step:
    def step() -> Tensor:
        x, y = take()
        scores = model(x)
        loss = functional.cross_entropy(scores.flatten(0, -2), y.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


# ---- one program for one device


def on_device(name: str, workers: int, sizes: Sizes) -> Step:
    """The step of a case as a program for the logical device."""
    model = _model(name, sizes)
    batches = _batches(name, sizes)
    axis = {"fsdp": "fsdp", "model": "model"}.get(name, "data")
    mesh = spmd.Mesh(range(workers), (workers,), (axis,))
    if name == "fsdp":
        assert isinstance(model, Decoder)
        model.layers = nn.ModuleList(FSDPv2(each, mesh=mesh) for each in model.layers)
        model = FSDPv2(model, mesh=mesh)
    else:
        model = model.to(spmd.device())
    if name == "model":
        assert isinstance(model, Decoder)
        for layer in model.layers:
            assert isinstance(layer, Layer)
            for each in (layer.q, layer.k, layer.v, layer.up):
                spmd.mark_sharding(each.weight, mesh, ("model", None))
                spmd.mark_sharding(each.bias, mesh, ("model",))
            for each in (layer.out, layer.down):
                spmd.mark_sharding(each.weight, mesh, (None, "model"))

    def take() -> tuple[Tensor, Tensor]:
        x, y = (each.to(spmd.device()) for each in next(batches))
        if name != "model":
            for each in (x, y):
                spmd.mark_sharding(each, mesh, (axis, *[None] * (each.dim() - 1)))
        return x, y

    return _trained(model, _optimizer(model), take)


# ---- the same by hand


def by_hand(name: str, group: Any, sizes: Sizes) -> Step:
    """The step of a case as each rank of a process group would be programmed, with its own loss."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    model = _model(name, sizes)
    batches = _batches(name, sizes)
    if name == "model":
        return _trained(_by_styles(model, group), _optimizer(model), lambda: next(batches))
    if name == "fsdp":
        assert isinstance(model, Decoder)
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model, process_group=group)

    def take() -> tuple[Tensor, Tensor]:
        x, y = next(batches)
        return x.chunk(size)[rank], y.chunk(size)[rank]

    return _trained(model, _optimizer(model), take)


def _by_styles(model: nn.Module, group: Any) -> nn.Module:
    assert isinstance(model, Decoder)
    mesh = DeviceMesh.from_group(group, "cpu")
    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = {"q": columns, "k": columns, "v": columns, "up": columns, "out": rows, "down": rows}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    return model


# ---- the least that must be sent


def least_bytes(name: str, workers: int, sizes: Sizes) -> float:
    """What a worker must send in a step, in bytes, by the best schedules.

    Data: every gradient is reduced, and the loss. Tensors: four sums of activations for each layer. FSDP:
    parameters are gathered twice, and gradients are reduced and scattered. Batch norm's statistics come with
    the gradients' bytes, since they are few.
    """
    rest = (workers - 1) / workers
    numbers = sum(each.numel() for each in _model(name, sizes).parameters())
    if name == "model":
        return sizes.layers * 4 * 2 * rest * sizes.batch * sizes.length * sizes.width * 4
    return (3 if name == "fsdp" else 2) * rest * numbers * 4
