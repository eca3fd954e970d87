"""Six models in SPMD mode: are their losses those of one process, and what falls back to whole tensors.

::

    python -m benchmarks.spmd_models                          # everything: some minutes
    python -m benchmarks.spmd_models --models lstm --layouts both --optimizers adamw
    python -m benchmarks.spmd_models --output benchmarks/spmd_models.md

Each model is trained for ten steps, the last with a batch that the workers cannot share evenly, by each
optimizer and under each layout, and beside it in this process alone.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

import spmd
from spmd.fsdp import FSDPv2
from spmd.fsdp.wrap import transformer_auto_wrap_policy

__all__ = ["LAYOUTS", "MODELS", "OPTIMIZERS", "Outcome", "main", "train"]

WORKERS: Final = 4
BATCH: Final = 16
LAST_BATCH: Final = 13
"""Rows in the last step: 4, 4, 4 and 1 on four workers."""

VOCABULARY: Final = 96
WIDTH: Final = 32
LENGTH: Final = 12
CLASSES: Final = 10


# ---- models


class Block(nn.Module):
    """A residual block of ResNet-18."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut = nn.Sequential()
        if stride > 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        y += self.shortcut(x)
        return functional.relu(y, inplace=True)


class ResNet18(nn.Module):
    """He and others, 2015, with fewer channels."""

    def __init__(self) -> None:
        super().__init__()
        widths = (8, 8, 16, 32, 64)
        self.stem = nn.Sequential(
            nn.Conv2d(3, widths[0], 7, 2, 3, bias=False),
            nn.BatchNorm2d(widths[0]),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks: list[nn.Module] = []
        for place, (before, after) in enumerate(itertools.pairwise(widths)):
            blocks += [Block(before, after, 1 if place == 0 else 2), Block(after, after, 1)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(widths[-1], CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1)
        result: Tensor = self.head(torch.flatten(x, 1))
        return result


class Encoder(nn.Module):
    """PyTorch's own encoder layers, with dropout; the mean over the words is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        result: Tensor = self.head(self.layers(self.embedding(words)).mean(1))
        return result


class DecoderLayer(nn.Module):
    """Attention to what came before, and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        query, key, value = (
            each(y).unflatten(-1, (4, WIDTH // 4)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        result: Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return result


class Decoder(nn.Module):
    """A decoder-only language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(DecoderLayer(), DecoderLayer())
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(self.layers(self.embedding(words))))
        return result.flatten(0, 1)


class Recurrent(nn.Module):
    """Two layers of LSTM, and the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, words: Tensor) -> Tensor:
        found, _ = self.lstm(self.embedding(words))
        result: Tensor = self.head(found)
        return result.flatten(0, 1)


class Recommender(nn.Module):
    """Bags of items and single features, looked up in tables, and an MLP on what they and the numbers say."""

    def __init__(self) -> None:
        super().__init__()
        self.liked = nn.EmbeddingBag(4 * VOCABULARY, WIDTH, mode="mean")
        self.seen = nn.EmbeddingBag(4 * VOCABULARY, WIDTH, mode="sum")
        self.user = nn.Embedding(4 * VOCABULARY, WIDTH)
        self.bottom = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(4 * WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, 1))

    def forward(self, items: Tensor, users: Tensor, numbers: Tensor) -> Tensor:
        every = (self.liked(items), self.seen(items + 1), self.user(users), self.bottom(numbers))
        result: Tensor = self.top(torch.cat(every, 1)).squeeze(1)
        return result


def _words(rows: int) -> tuple[Tensor, ...]:
    return (torch.randint(VOCABULARY, (rows, LENGTH)),)


def _next_words(rows: int) -> tuple[Tensor, Tensor]:
    words = torch.randint(VOCABULARY, (rows, LENGTH + 1))
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def _classes(rows: int) -> Tensor:
    return torch.randint(CLASSES, (rows,))


def _visits(rows: int) -> tuple[Tensor, ...]:
    most = 4 * VOCABULARY - 1
    items, users = torch.randint(most, (rows, 6)), torch.randint(most, (rows,))
    return items, users, torch.randn(rows, 8), torch.randint(2, (rows,)).float()


@dataclass(frozen=True)
class Model:
    """One of the six.

    Attributes:
        make: makes it.
        batch: makes a batch with a number of rows: its inputs, and last its targets.
        loss: of its output and the targets.
        cut: patterns of parameters' names, each with how they lie where the model is cut.
        layers: FSDPv2 wraps each of these.
        dtype: of parameters and numbers.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, ...]]
    loss: Callable[[Tensor, Tensor], Tensor]
    cut: tuple[tuple[str, tuple[str | None, ...]], ...]
    layers: tuple[type[nn.Module], ...] = ()
    dtype: torch.dtype = torch.float32


_OUT: Final = ("model", None)
_IN: Final = (None, "model")


def _cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target.flatten())


MODELS: Final[dict[str, Model]] = {
    "mlp": Model(
        lambda: nn.Sequential(
            nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES)
        ),
        lambda rows: (torch.randn(rows, WIDTH), _classes(rows)),
        _cross_entropy,
        ((r"0\.weight", _OUT), (r"0\.bias", ("model",)), (r"2\.weight", _IN)),
        (nn.Linear,),
    ),
    "resnet18": Model(
        ResNet18,
        lambda rows: (torch.randn(rows, 3, 32, 32), _classes(rows)),
        _cross_entropy,
        ((r".*conv\d\.weight", ("model", None, None, None)), (r"head\.weight", _IN)),
        (Block,),
        torch.float64,  # with so few rows, batch norm makes much of rounding
    ),
    "encoder": Model(
        Encoder,
        lambda rows: (*_words(rows), _classes(rows)),
        _cross_entropy,
        (
            (r"embedding\.weight", _OUT),
            (r".*linear1\.weight", _OUT),
            (r".*linear1\.bias", ("model",)),
            (r".*linear2\.weight", _IN),
            (r".*out_proj\.weight", _IN),
        ),
        (nn.TransformerEncoderLayer,),
    ),
    "decoder": Model(
        Decoder,
        _next_words,
        _cross_entropy,
        (
            (r"embedding\.weight|head\.weight", _OUT),
            (r".*(query|key|value|gate|up)\.weight", _OUT),
            (r".*(output|down)\.weight", _IN),
        ),
        (DecoderLayer,),
    ),
    "lstm": Model(
        Recurrent,
        _next_words,
        _cross_entropy,
        ((r"embedding\.weight|head\.weight", _OUT), (r"lstm\.weight.*", _OUT), (r"lstm\.bias.*", ("model",))),
        (nn.LSTM,),
    ),
    "recommender": Model(
        Recommender,
        _visits,
        functional.binary_cross_entropy_with_logits,
        (
            (r"(liked|seen|user)\.weight", _OUT),
            (r"top\.0\.weight", _OUT),
            (r"top\.0\.bias", ("model",)),
            (r"top\.2\.weight", _IN),
        ),
        (nn.EmbeddingBag, nn.Embedding),
    ),
}

OPTIMIZERS: Final[dict[str, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "adam": functools.partial(torch.optim.Adam, lr=1e-3),
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-3, foreach=True),
    "adamw-fused": functools.partial(torch.optim.AdamW, lr=1e-3, fused=True),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=1e-3),
}

LAYOUTS: Final = ("data", "model", "both", "fsdp")


# ---- training


@dataclass(frozen=True)
class Outcome:
    """One model, layout and optimizer.

    Attributes:
        apart: by how much a loss differs from that of one process, at most.
        losses: of one process.
        fallbacks: operator and note, with how often and bytes: what needed its inputs elsewhere.
    """

    model: str
    layout: str
    optimizer: str
    apart: float
    losses: tuple[float, ...]
    fallbacks: dict[tuple[str, str], tuple[int, int]]


def train(model: str, layout: str, optimizer: str, steps: int = 10) -> Outcome:
    """Train in SPMD mode, which has begun, and alone."""
    torch.manual_seed(0)
    kind = MODELS[model]
    alone = kind.make().to(kind.dtype)
    batches = [
        tuple(each.to(kind.dtype) if each.is_floating_point() else each for each in kind.batch(rows))
        for rows in [BATCH] * (steps - 1) + [LAST_BATCH]
    ]
    before = _noted()
    cut, mesh, axis = _laid_out(kind, copy.deepcopy(alone), layout)
    mine = _losses(kind, cut, OPTIMIZERS[optimizer](cut.parameters()), _on_device(batches, mesh, axis))
    found = {
        key: (count - before.get(key, (0, 0))[0], size - before.get(key, (0, 0))[1])
        for key, (count, size) in _noted().items()
        if count > before.get(key, (0, 0))[0]
    }
    its = _losses(kind, alone, OPTIMIZERS[optimizer](alone.parameters()), batches)
    apart = max(abs(one - other) for one, other in zip(mine, its, strict=True))
    return Outcome(model, layout, optimizer, apart, tuple(its), found)


def _laid_out(kind: Model, module: nn.Module, layout: str) -> tuple[nn.Module, spmd.Mesh, str | None]:
    """Return a model on the device, and the mesh and axis over which its batches are sharded."""
    n = spmd.global_device_count()
    if layout == "fsdp":
        mesh = spmd.Mesh(range(n), (n,), ("fsdp",))
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=set(kind.layers))
        return FSDPv2(module, mesh=mesh, auto_wrap_policy=policy), mesh, "fsdp"
    split = {"data": (n, 1), "model": (1, n), "both": (n // 2, 2)}[layout]
    mesh = spmd.Mesh(range(n), split, ("data", "model"))
    module = module.to(spmd.device())
    if layout != "data":
        for name, parameter in module.named_parameters():
            spec = next((spec for pattern, spec in kind.cut if re.fullmatch(pattern, name)), None)
            if spec is not None:
                spmd.mark_sharding(parameter, mesh, spec)
    return module, mesh, None if layout == "model" else "data"


def _on_device(
    batches: Sequence[tuple[Tensor, ...]], mesh: spmd.Mesh, axis: str | None
) -> Iterator[tuple[Tensor, ...]]:
    for batch in batches:
        moved = tuple(each.to(spmd.device()) for each in batch)
        if axis is not None:
            for each in moved:
                spmd.mark_sharding(each, mesh, (axis, *[None] * (each.dim() - 1)))
        yield moved


def _losses(kind: Model, module: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> list[float]:
    torch.manual_seed(1)
    losses = []
    for *inputs, target in batches:
        optimizer.zero_grad()
        loss = kind.loss(module(*inputs), target)
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.detach())
    return [each.item() for each in losses]


def _noted() -> dict[tuple[str, str], tuple[int, int]]:
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for line in spmd.report().lines:
        key = (line.operator, line.note)
        count, size = found.get(key, (0, 0))
        found[key] = (count + line.count, size + line.bytes)
    return found


# ---- the page


def page(outcomes: Sequence[Outcome], steps: int) -> str:
    """The tables, in Markdown."""
    lines = [
        "# Six models in SPMD mode: the tables",
        "",
        f"Written by `python -m benchmarks.spmd_models`: {steps} steps on {WORKERS} workers and in one",
        "process. [docs/spmd_models.md](../docs/spmd_models.md) explains them.",
        "",
        "## Largest difference of losses from those of one process",
        "",
        f"| model | layout | {' | '.join(OPTIMIZERS)} |",
        f"|---|---|{'---|' * len(OPTIMIZERS)}",
    ]
    by_case: dict[tuple[str, str], dict[str, Outcome]] = {}
    for each in outcomes:
        by_case.setdefault((each.model, each.layout), {})[each.optimizer] = each
    for (model, layout), found in by_case.items():
        cells = [f"{found[name].apart:.0e}" if name in found else "" for name in OPTIMIZERS]
        lines.append(f"| {model} | {layout} | {' | '.join(cells)} |")
    lines += [
        "",
        "## Operations whose inputs had to be moved",
        "",
        "From `spmd.report()`, with the optimizers concerned. Sums over workers are not included: of",
        "gradients, and of the outputs of layers that are sharded along their inputs. Bytes are those of",
        "whole tensors.",
        "",
        "| model | layout | operation | in a run | moved | optimizers | what |",
        "|---|---|---|---|---|---|---|",
    ]
    for (model, layout), found in by_case.items():
        noted: dict[tuple[str, str], list[str]] = {}
        for name, outcome in found.items():
            for key in outcome.fallbacks:
                noted.setdefault(key, []).append(name)
        if not noted:
            lines.append(f"| {model} | {layout} | nothing | | | | |")
        for (operator, reason), names in noted.items():
            count, size = found[names[0]].fallbacks[(operator, reason)]
            who = "all" if len(names) == len(found) else ", ".join(names)
            cells = [
                model,
                layout,
                f"`{operator}`",
                str(count),
                f"{size / 1024:.0f} KB",
                who,
                shortened(reason),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def shortened(reason: str) -> str:
    """A note with its first three arguments, and without advice that is DTensor's."""
    parts = reason.replace(" Please redistribute the tensor before this operation.", "").split("; ")
    return "; ".join(parts[:3] if len(parts) < 5 else [*parts[:3], f"and {len(parts) - 3} more"])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spmd_models", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--optimizers", nargs="+", choices=tuple(OPTIMIZERS), default=tuple(OPTIMIZERS))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--output", type=Path, help="a file for the tables; default: they are printed")
    options = parser.parse_args(arguments)
    spmd.use_spmd(workers=WORKERS)
    outcomes = []
    for model in options.models:
        for layout in options.layouts:
            for optimizer in options.optimizers:
                outcomes.append(train(model, layout, optimizer, options.steps))
                print(f"{model}, {layout}, {optimizer}: {outcomes[-1].apart:.1e}", flush=True)
    spmd.shutdown()
    text = page(outcomes, options.steps)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text)
    return 0 if all(each.apart <= 1e-5 for each in outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
