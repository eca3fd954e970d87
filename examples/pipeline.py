#!/usr/bin/env python3
"""A model in two stages on two workers, which work at the same time on parts of a batch.

Three processes on this machine, started by the command itself::

    python examples/pipeline.py

How it works. A classifier of handwritten digits is split in two: its first layers are on one worker, the
others on a second; a third, the trainer, feeds them. With whole batches one stage is always idle: the second
waits for the first, and on the way back the first waits for the second. So the trainer splits each batch into
micro-batches. While the second stage has the first of them, the first stage has the next. (That is GPipe:
Huang et al., NeurIPS 2019.)

Both methods compute the same gradients, so they must learn equally well. They are trained alternately, so
that other load on this machine slows both, and the speed-up is printed. It grows with the ratio of a stage's
computation to the cost of sending a micro-batch, and needs a free processor for each stage: without one,
micro-batches only add cost, and the example says so.

Three ideas are marked (1) to (3) below: the output of one stage goes to the next without passing through the
trainer; one backward for everything in flight; an optimizer whose parameters are on several workers.
"""

from __future__ import annotations

import argparse
import itertools
import threading
import time
from typing import Any

import torch
from torch import Tensor, nn

from farcall import dist_autograd, rpc
from farcall.dist_optim import DistributedOptimizer
from farcall.examples import (
    Images,
    Miss,
    add_checkpoint_argument,
    example_parser,
    live_progress,
    load_images,
    positive,
    preempted,
    print_figures,
    print_line,
    rate,
    restored,
    run_example,
    save,
)

ACCURACY = 0.93
"""Required share of held-out images whose digit is recognized."""
SAME_LOSS = 0.01
"""How far apart, in proportion, the losses of the two ways may be after the first pass."""

PAYS = 1.05
"""A speed-up below this is none."""


class Stage(nn.Module):
    """Some layers of the model. Lives on a worker of its own, and works on one micro-batch at a time."""

    def __init__(self, *sizes: int, last: bool, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self._layers = nn.Sequential(*(layers[:-1] if last else layers))
        self._lock = threading.Lock()

    def forward(self, inputs: rpc.RRef[Tensor]) -> Tensor:
        """The stage's output for inputs that are on some worker."""
        here = inputs.to_here()
        with self._lock:
            outputs: Tensor = self._layers(here)
        return outputs

    def references(self) -> list[rpc.RRef[nn.Parameter]]:
        """A reference to each parameter."""
        return [rpc.RRef(parameter) for parameter in self.parameters()]


class Pipeline:
    """The whole model as the trainer sees it.

    Args:
        width: of the hidden layers.
        micro_batches: into how many parts each batch is split.
        seed: for the first weights.
        learning_rate: of Adam.
    """

    def __init__(self, width: int, micro_batches: int, seed: int, learning_rate: float) -> None:
        self._micro_batches = micro_batches
        self._first = rpc.remote(
            "stage0", Stage, args=(64, width, width), kwargs={"last": False, "seed": seed}
        )
        self._second = rpc.remote(
            "stage1", Stage, args=(width, width, 10), kwargs={"last": True, "seed": seed}
        )
        # (3) An optimizer for parameters on both workers: each has a local one for its own.
        parameters = [*self._first.rpc_sync().references(), *self._second.rpc_sync().references()]
        self._optimizer = DistributedOptimizer(torch.optim.Adam, parameters, lr=learning_rate)

    def forward(self, pixels: Tensor) -> Tensor:
        """The scores of the ten digits for each image, of shape (N, 10)."""
        scores = []
        for part in pixels.chunk(self._micro_batches):
            # (1) `remote` leaves the output on stage0 and returns a reference at once. That goes to stage1,
            # which fetches the output itself. Nothing here waits, so all parts are soon in flight.
            hidden = self._first.remote().forward(rpc.RRef(part))
            scores.append(self._second.rpc_async().forward(hidden))
        return torch.cat(torch.futures.wait_all(scores))

    def train(self, batch: Images) -> float:
        """Takes one step; the loss before it."""
        with dist_autograd.context() as context_id:
            loss = nn.functional.cross_entropy(self.forward(batch.pixels), batch.labels)
            # (2) One backward runs through everything that the forward recorded, on all workers. Each
            # gradient goes on as soon as it is there, so the stages are both at work here too.
            dist_autograd.backward(context_id, [loss])
            self._optimizer.step(context_id)
        return loss.item()

    def state(self) -> dict[str, Any]:
        """Return the state of both workers that a later run needs to continue."""
        stages = [stage.rpc_sync().state_dict() for stage in (self._first, self._second)]
        return {"stages": stages, "optimizer": self._optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues where ``state`` was taken."""
        for stage, saved in zip((self._first, self._second), state["stages"], strict=True):
            stage.rpc_sync().load_state_dict(saved)
        self._optimizer.load_state_dict(state["optimizer"])

    def accuracy(self, images: Images) -> float:
        """The share of images whose digit the model names."""
        with torch.no_grad():
            right = self.forward(images.pixels).argmax(1) == images.labels
        return float(right.float().mean())


def direct(options: argparse.Namespace) -> None:
    """The part of rank 0, the trainer: trains both ways by turns, and compares."""
    images, held_out = load_images()
    if options.batch > len(images):
        raise Miss(f"There are only {len(images)} images, too few for a batch of {options.batch}.")
    ways = {"whole batches": 1, "micro-batches": options.micro_batches}
    pipelines = {
        way: Pipeline(options.width, parts, options.seed, options.learning_rate)
        for way, parts in ways.items()
    }
    seconds = dict.fromkeys(ways, 0.0)
    first_losses: dict[str, float] = {}
    first, saved = 0, restored(options)
    if saved is not None:
        first, seconds, first_losses = saved["passes"], saved["seconds"], saved["first losses"]
        for way, pipeline in pipelines.items():
            pipeline.restore(saved[way])
    for pipeline in pipelines.values():
        pipeline.accuracy(held_out)  # everything is loaded and connected then
    with live_progress("passes", options.passes - first, plain=options.plain) as progress:
        for number in range(first, options.passes):
            order = torch.split(torch.randperm(len(images)), options.batch)
            batches = [images[each] for each in order if len(each) == options.batch]
            for way, pipeline in pipelines.items():
                began = time.perf_counter()
                for batch in batches:
                    loss = pipeline.train(batch)
                seconds[way] += time.perf_counter() - began
                first_losses.setdefault(way, loss)
            progress.advance(f"loss {loss:.3f}")
            if preempted(options):
                states = {way: pipeline.state() for way, pipeline in pipelines.items()}
                progressed = {"passes": number + 1, "seconds": seconds, "first losses": first_losses}
                save(states | progressed, options)
    accuracies = {way: pipeline.accuracy(held_out) for way, pipeline in pipelines.items()}
    speed_up = seconds["whole batches"] / seconds["micro-batches"]
    print_figures(
        {way: f"{accuracies[way]:.3f} accuracy in {seconds[way]:.1f} s" for way in ways}
        | {"speed-up": f"{speed_up:.2f} with {options.micro_batches} micro-batches"}
    )
    check(accuracies, first_losses, speed_up, options.target)
    if speed_up < PAYS:
        print_line(
            "The micro-batches did not pay here. They do where each stage has a processor that nothing else "
            "uses, and computes for longer than it takes to send what a micro-batch needs."
        )


def check(
    accuracies: dict[str, float], first_losses: dict[str, float], speed_up: float, target: float
) -> None:
    """Raises ``Miss`` unless both ways learned alike and well, and micro-batches as fast as was asked for."""
    whole, parts = first_losses.values()
    if abs(whole - parts) > SAME_LOSS * whole:
        raise Miss(
            f"The losses after the first pass are {whole:.4f} and {parts:.4f}; they should be the same."
        )
    for way, accuracy in accuracies.items():
        if accuracy < ACCURACY:
            raise Miss(f"The accuracy with {way} is {accuracy:.3f}; it should be {ACCURACY} at least.")
    if speed_up < target:
        raise Miss(f"The speed-up is {speed_up:.2f}; it should be {target} at least.")


NAMES = ("trainer", "stage0", "stage1")


def main() -> None:
    """Run one worker if its name is given, otherwise all of them."""
    parser = example_parser(__doc__, needs=["scikit-learn"])
    parser.add_argument("--passes", type=positive, default=20, help="over the images (%(default)s)")
    parser.add_argument("--batch", type=positive, default=640, help="images per step (%(default)s)")
    parser.add_argument("--micro-batches", type=positive, default=4, help="per batch (%(default)s)")
    parser.add_argument("--width", type=positive, default=1024, help="of the hidden layers (%(default)s)")
    parser.add_argument("--learning-rate", type=rate, default=0.002, help="of Adam (%(default)s)")
    parser.add_argument(
        "--target", type=float, default=0.0, help="fail if the speed-up is less (%(default)s)"
    )
    add_checkpoint_argument(parser)
    run_example(parser, NAMES, direct)


if __name__ == "__main__":
    main()
