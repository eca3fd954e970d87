#!/usr/bin/env python3
"""A pipeline by `torch.distributed.pipelining`, whose schedules run on farcall's process group.

Two processes on this machine, started by the command itself; or on several (see the end of --help)::

    python examples/pipeline_schedules.py
    python examples/pipeline_schedules.py --schedule interleaved

How it works. All workers run the same program, and each has one stage of the model, or two with
`interleaved`. A schedule says when a stage computes forward and when backward, for which micro-batch, and
sends activations and gradients to its neighbours: `gpipe` does all forwards first, `1f1b` alternates, and so
keeps fewer activations, `interleaved` has shorter idle times. (`pipeline.py` has the other way: one worker
directs, and the stages are remote objects, which need not look alike and may be called by others too.)

The last worker trains the same model by itself as well. Success is that the losses agree, step by step.

Three ideas are marked (1) to (3) below: a process group, stages, and a schedule that takes a step.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.functional import cross_entropy

from farcall import rpc, spmd
from farcall.examples import (
    Images,
    Miss,
    add_group_arguments,
    example_parser,
    live_progress,
    load_images,
    parse_arguments,
    positive,
    print_figures,
    rate,
    run_workers,
)

SCHEDULES: dict[str, tuple[Any, int]] = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
}
"""Schedules, and how many stages each worker has."""


def make_stages(count: int, width: int, seed: int) -> list[nn.Module]:
    """The model in parts, one after the other: images of shape (N, 64) to scores of shape (N, 10)."""
    torch.manual_seed(seed)
    sizes = [64, *[width] * (count - 1), 10]
    stages: list[nn.Module] = []
    for number in range(count):
        layers: list[nn.Module] = [nn.Linear(sizes[number], sizes[number + 1])]
        stages.append(nn.Sequential(*layers, *([] if number == count - 1 else [nn.ReLU()])))
    return stages


def batches(options: argparse.Namespace) -> Iterator[Images]:
    """The same on each worker."""
    images = load_images()[0]
    random = torch.Generator().manual_seed(options.seed)
    for _ in range(options.steps):
        yield images[torch.randint(len(images), (options.batch,), generator=random)]


class Alone:
    """The same model in one process, with the same micro-batches.

    Gradients of whole batches are rounded differently, and training amplifies that: after 100 steps the
    losses can differ by 3e-4.
    """

    def __init__(self, stages: list[nn.Module], micro_batches: int, learning_rate: float) -> None:
        self._model = nn.Sequential(*stages)
        self._micro_batches = micro_batches
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=learning_rate)

    def step(self, batch: Images) -> float:
        """Take one step; the loss before it."""
        self._optimizer.zero_grad()
        losses = []
        for pixels, labels in zip(
            batch.pixels.chunk(self._micro_batches), batch.labels.chunk(self._micro_batches), strict=True
        ):
            loss = cross_entropy(self._model(pixels), labels)
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        for parameter in self._model.parameters():
            assert parameter.grad is not None
            parameter.grad /= self._micro_batches
        self._optimizer.step()
        return torch.stack(losses).mean().item()


def train(options: argparse.Namespace) -> None:
    """What each worker does.

    Raises:
        Miss: on the last, the losses differ.
    """
    rank, workers = dist.get_rank(), dist.get_world_size()
    make_schedule, each = SCHEDULES[options.schedule]
    count = workers * each
    modules = make_stages(count, options.width, options.seed)[rank::workers]
    # (2) A stage knows its place; what it sends to its neighbours, and gets, is seen in the first step.
    stages = [
        PipelineStage(module, rank + index * workers, count, torch.device("cpu"))
        for index, module in enumerate(modules)
    ]
    schedule = make_schedule(
        stages if each > 1 else stages[0], options.micro_batches, loss_fn=nn.CrossEntropyLoss()
    )
    optimizer = torch.optim.AdamW(
        [parameter for module in modules for parameter in module.parameters()], lr=options.learning_rate
    )
    if rank < workers - 1:
        for batch in batches(options):
            take_step(schedule, optimizer, *([batch.pixels] if rank == 0 else []))
        return
    stages_alone = make_stages(count, options.width, options.seed)
    alone = Alone(stages_alone, options.micro_batches, options.learning_rate)
    largest = 0.0
    with live_progress("steps", options.steps, plain=options.plain) as progress:
        for batch in batches(options):
            losses: list[Tensor] = []
            take_step(schedule, optimizer, target=batch.labels, losses=losses)
            loss, expected = torch.stack(losses).mean().item(), alone.step(batch)
            largest = max(largest, abs(loss - expected) / expected)
            progress.advance(f"loss {loss:.3f}, alone {expected:.3f}")
    print_figures(
        {
            "loss": f"{loss:.6f}",
            "in one process": f"{expected:.6f}",
            "largest difference": f"{largest:.1e} of the loss, over {options.steps} steps",
        }
    )
    if not largest <= options.tolerance:
        raise Miss(f"The losses differ by {largest:.1e}; it should be {options.tolerance:g} at most.")


def take_step(schedule: Any, optimizer: torch.optim.Optimizer, *inputs: Tensor, **last: Any) -> None:
    """(3) The first worker gives the inputs, the last the targets; the schedule cuts both."""
    optimizer.zero_grad()
    schedule.step(*inputs, **last)
    optimizer.step()


def run_worker(options: argparse.Namespace) -> None:
    """One worker, from joining to leaving."""
    spmd.init_process_group()  # (1) the workers of the RPC group become ranks
    miss = None
    try:
        train(options)
    except Miss as missed:  # the others did their part: all leave in order
        miss = missed
    dist.destroy_process_group()
    rpc.barrier()
    if miss is not None:
        raise miss


def main() -> None:
    """Run one worker if its name is given, otherwise all of them."""
    parser = example_parser(__doc__, needs=["scikit-learn"])
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="which (%(default)s)")
    parser.add_argument("--workers", type=positive, default=2, help="how many (%(default)s)")
    parser.add_argument("--steps", type=positive, default=100, help="of training (%(default)s)")
    parser.add_argument("--batch", type=positive, default=128, help="images per step (%(default)s)")
    parser.add_argument("--micro-batches", type=positive, default=4, help="per batch (%(default)s)")
    parser.add_argument("--width", type=positive, default=256, help="of the hidden layers (%(default)s)")
    parser.add_argument("--learning-rate", type=rate, default=0.003, help="of AdamW (%(default)s)")
    parser.add_argument(
        "--tolerance", type=float, default=1e-4, help="how much losses may differ (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="for everything random (%(default)s)")
    parser.add_argument("--plain", action="store_true", help="lines of text instead of progress bars")
    add_group_arguments(parser)
    options = parse_arguments(parser)
    workers = options.world_size or options.workers
    if workers < 2:
        parser.error("a pipeline needs 2 workers or more")
    if options.batch % options.micro_batches or options.micro_batches % workers:
        parser.error("--micro-batches must divide --batch, and be a multiple of the number of workers")
    run_workers(run_worker, options, [f"stage{rank}" for rank in range(workers)])


if __name__ == "__main__":
    main()
