#!/usr/bin/env python3
"""One program, one logical device, many workers: a vision and a language model, sharded in three ways.

Four workers on this machine, started by the command itself::

    python examples/spmd_training.py
    python examples/spmd_training.py --model language --cut both --workers 4

On several machines, one process is the driver, the others are workers; all have one secret in FARCALL_TOKEN::

    farcall launch -n 1 --nnodes 5 --rdzv HOST:29500 examples/spmd_training.py      # on each

How it works. Both models are plain PyTorch, for one device. A few tensors are marked: along the axis *data*
of a mesh each worker has a part of the batch; along *model* a part of the filters, heads and hidden features.
The rest follows: what a worker computes, what it sends, where gradients and the optimizer's state are. This
process, the driver, has no data of the model; it records the program, and workers run it.

The same models are trained in this process as well. Success is that the losses agree, step by step.

Three ideas are marked (1) to (3) below: the device, a mesh, and marks.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from farcall import spmd
from farcall.examples import (
    HEADS,
    Miss,
    Transformer,
    ending,
    example_parser,
    live_progress,
    load_images,
    load_text,
    positive,
    print_figures,
    print_line,
)

# ---------------------------------------------------------------- two models and their data: plain PyTorch


class Batch(NamedTuple):
    """The training data of a step: inputs and expected outputs."""

    inputs: Tensor
    targets: Tensor


def vision() -> tuple[nn.Module, Iterator[Batch]]:
    """A convolutional network with batch norm, and handwritten digits of shape (64, 1, 8, 8)."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )
    images, _ = load_images()

    def batches() -> Iterator[Batch]:
        for step in itertools.count():
            which = torch.randint(len(images), (64,), generator=torch.Generator().manual_seed(step))
            yield Batch(images.pixels[which].view(-1, 1, 8, 8), images.labels[which])

    return model, batches()


def language() -> tuple[nn.Module, Iterator[Batch]]:
    """A Transformer, and pieces of Shakespeare's sonnets of shape (16, 32)."""
    text = load_text()

    def batches() -> Iterator[Batch]:
        for step in itertools.count():
            pieces = text.batch(step, 16, 32)
            yield Batch(pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous())

    return Transformer(text.vocabulary, 32), batches()


class Trainer:
    """A model and its optimizer, on any device."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)

    def step(self, batch: Batch) -> Tensor:
        """One step of training; its loss."""
        scores = self.model(batch.inputs)
        loss = cross_entropy(scores.flatten(0, -2), batch.targets.flatten())
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        self._optimizer.step()
        return loss.detach()


# ---------------------------------------------------------------- how they are cut


def cut_vision(model: nn.Module, mesh: spmd.Mesh) -> None:
    """(3) Filters by their number; a worker then has all that comes of its filters."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 4 or name[0] in "0134":
            spmd.mark_sharding(parameter, mesh, ("model",) + (None,) * (parameter.dim() - 1))
    spmd.mark_sharding(model.get_parameter("8.weight"), mesh, (None, "model"))


def cut_language(model: nn.Module, mesh: spmd.Mesh) -> None:
    """(3) Columns first, rows next: parts are heads after ``wq``, hidden features after ``w1``."""
    model.get_submodule("head").weight = model.get_parameter("embedding.weight")  # .to() makes two of one
    for name, parameter in model.named_parameters():
        layer = name.split(".")[-2]
        if layer in ("wq", "wk", "wv", "w1", "w3"):
            spmd.mark_sharding(parameter, mesh, ("model", None))
        elif layer in ("wo", "w2"):
            spmd.mark_sharding(parameter, mesh, (None, "model"))


class Task(NamedTuple):
    """A model with its batches, and how it is cut."""

    make: Callable[[], tuple[nn.Module, Iterator[Batch]]]
    cut: Callable[[nn.Module, spmd.Mesh], None]


TASKS = {"vision": Task(vision, cut_vision), "language": Task(language, cut_language)}


def compare(name: str, how: str, options: argparse.Namespace) -> dict[str, str]:
    """Train one model, cut in one way, and alone.

    Raises:
        Miss: the losses differ.
    """
    torch.manual_seed(options.seed)
    model, batches = TASKS[name].make()
    alone = Trainer(copy.deepcopy(model))

    # (2) All workers, arranged: rows have parts of the batch, columns parts of the model.
    workers = spmd.global_device_count()
    columns = {"data": 1, "model": workers, "both": 2}[how]
    mesh = spmd.Mesh(range(workers), (workers // columns, columns), ("data", "model"))
    model.to(spmd.device())
    TASKS[name].cut(model, mesh)
    together = Trainer(model)
    specs = [spmd.ShardingSpec(mesh, ("data",) + (None,) * dims) for dims in (0, 1, 3)]

    largest, seconds = 0.0, 0.0
    with live_progress(f"{name}, {how}", options.steps, plain=options.plain) as progress:
        for batch in itertools.islice(batches, options.steps):
            expected = alone.step(batch).item()
            began = time.perf_counter()
            loss = together.step(Batch(*(on_device(each, specs) for each in batch))).item()
            seconds += time.perf_counter() - began
            largest = max(largest, abs(loss - expected) / expected)
            progress.advance(f"loss {loss:.3f}, alone {expected:.3f}")
    if not largest <= options.tolerance:
        raise Miss(f"The losses differ by {largest:.1e}; it should be {options.tolerance:g} at most.")
    milliseconds = seconds / options.steps * 1000
    return {f"{name}, {how}": f"loss {loss:.6f}, alone {expected:.6f}; {milliseconds:.0f} ms a step"}


def on_device(t: Tensor, specs: list[spmd.ShardingSpec]) -> Tensor:
    """(1) On the logical device, which is one for the program; cut by the spec for its dimensions."""
    moved = t.to(spmd.device())
    for spec in specs:
        if spec.can_apply(moved):
            spec.apply(moved)
    return moved


def make_parser() -> argparse.ArgumentParser:
    """The arguments of this example."""
    parser = example_parser(__doc__, needs=["scikit-learn"])
    parser.add_argument("--model", choices=[*TASKS, "all"], default="all", help="which model (%(default)s)")
    parser.add_argument(
        "--cut", choices=["data", "model", "both", "all"], default="all", help="in which way (%(default)s)"
    )
    parser.add_argument("--workers", type=positive, default=4, help="how many (%(default)s)")
    parser.add_argument("--steps", type=positive, default=20, help="of training each (%(default)s)")
    parser.add_argument(
        "--tolerance", type=float, default=1e-4, help="how much losses may differ (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="for the first weights (%(default)s)")
    parser.add_argument("--plain", action="store_true", help="lines of text instead of progress bars")
    return parser


def main() -> None:
    """Compares each model, cut in each way that was asked for."""
    parser = make_parser()
    options = parser.parse_args()
    if options.workers % 2 or HEADS % options.workers:
        parser.error(f"--workers must be even, and divide the {HEADS} attention heads")
    torch.set_num_threads(1)
    models = TASKS if options.model == "all" else [options.model]
    ways = ["data", "model", "both"] if options.cut == "all" else [options.cut]
    figures: dict[str, str] = {}
    with ending("spmd", spmd.shutdown):
        print_line(f"Starting {options.workers} workers on this machine.")
        spmd.use_spmd(workers=options.workers)
        for name, how in itertools.product(models, ways):
            figures |= compare(name, how, options)
        print_figures(figures)


if __name__ == "__main__":
    main()
