#!/usr/bin/env python3
"""A Transformer whose parameters are sharded over all workers; killed midway, and resumed on fewer.

Everything on this machine, with one command::

    python examples/fsdp.py
    python examples/fsdp.py --workers 4 --then 3

On several machines, one process is the driver, the others are workers; all have one secret in FARCALL_TOKEN.
Kill it, and start it again, on as many machines as you like; all see FOLDER, which has the checkpoints::

    farcall launch -n 1 --nnodes 5 --rdzv HOST:29500 examples/fsdp.py --workers 4 --folder FOLDER   # on each

How it works. Each layer is wrapped in FSDPv2: a worker holds a part of each parameter, of its gradient and of
the optimizer's state, and has a part of the batch. Each layer's parameters are gathered while it runs.
Activations inside a layer are dropped after forward, and recomputed in backward.

Every few steps a checkpoint is taken, shard by shard. A first process, with its workers, trains until it is
killed, with SIGKILL. Then another continues from the last checkpoint, with another number of workers: the
model is made on the meta device, and each worker loads its part.

The same model is trained in this process, alone. Success is that the losses agree, step by step.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import farcall
from farcall import spmd
from farcall.examples import (
    Block,
    Miss,
    Preempted,
    Text,
    Transformer,
    ending,
    example_parser,
    live_progress,
    load_text,
    positive,
    print_figures,
    print_line,
)
from farcall.spmd.checkpoint import CheckpointManager, prime_optimizer
from farcall.spmd.fsdp import FSDPv2, checkpoint_module
from spmd.fsdp.wrap import transformer_auto_wrap_policy

BATCH, LENGTH, SIZE = 12, 32, 32


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    text: Text,
    steps: range,
    mesh: spmd.Mesh | None = None,
) -> Iterator[tuple[int, float]]:
    """Train a model, and yield each step and its loss."""
    for step in steps:
        batch = text.batch(step, BATCH, LENGTH)
        if mesh is not None:
            batch = spmd.mark_sharding(batch.to(spmd.device()), mesh, ("fsdp", None))
        loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        yield step, loss.item()


def wrapped(model: nn.Module, mesh: spmd.Mesh) -> FSDPv2:
    """The model with its parameters cut, and its layers' activations computed twice."""
    for module in model.modules():
        if isinstance(module, Block):
            checkpoint_module(module)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    return FSDPv2(model, mesh=mesh, auto_wrap_policy=policy)


def part(workers: int, folder: str, options: argparse.Namespace) -> Iterator[tuple[int, float]]:
    """The main function of a driver: continues from the last checkpoint, if there is one."""
    spmd.use_spmd(workers=workers)
    mesh = spmd.Mesh(range(workers), (workers,), ("fsdp",))
    text = load_text()
    manager = CheckpointManager(folder, options.every, max_to_keep=2)
    first = 0
    torch.manual_seed(options.seed)
    optimizer: torch.optim.Optimizer
    if not manager.all_steps():
        model = wrapped(Transformer(text.vocabulary, SIZE), mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    else:
        with torch.device("meta"):  # the model is whole nowhere
            plain = Transformer(text.vocabulary, SIZE)
        model = wrapped(plain, mesh)
        optimizer = prime_optimizer(torch.optim.AdamW(model.parameters(), lr=0.003))
        last = max(manager.all_steps())
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        manager.restore(last, state)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = last + 1
    for step, loss in trained(model, optimizer, text, range(first, options.steps), mesh):
        yield step, loss
        manager.save_async(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        if manager.reached_preemption(step):  # this step was saved
            manager.join()
            raise Preempted(f"The job is preempted. Step {step} is saved in {folder}.")
    manager.join()


def in_a_process(
    workers: int, until: int, folder: str, options: argparse.Namespace
) -> Iterator[tuple[int, float]]:
    """The main function of a driver's process, until it ends or is killed after a step."""
    command = [sys.executable, __file__, "--folder", folder, "--workers", str(workers)]
    command += ["--steps", str(options.steps), "--every", str(options.every), "--seed", str(options.seed)]
    quiet = {
        "FARCALL_LOG": "error"
    } | os.environ  # workers would say across the bar that this driver was killed
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=quiet) as process:
        assert process.stdout is not None
        for line in process.stdout:
            step, loss = line.split()
            yield int(step), float(loss)
            if int(step) == until:
                process.kill()
                return
    if process.returncode:
        raise Miss(f"The process with {workers} workers ended with status {process.returncode}.")


def compare(options: argparse.Namespace) -> None:
    """Train until the first process is killed, then in another; and alone.

    Raises:
        Miss: the losses differ.
    """
    print_line("Training in one process, to compare with.")
    text = load_text()
    torch.manual_seed(options.seed)
    model = Transformer(text.vocabulary, SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    alone = [loss for _, loss in trained(model, optimizer, text, range(options.steps))]
    largest, seen = 0.0, list[int]()
    with (
        tempfile.TemporaryDirectory(prefix="farcall-fsdp-") as folder,
        live_progress("steps", options.steps, plain=options.plain) as progress,
    ):
        for workers, until in ((options.workers, options.steps // 2), (options.then, options.steps)):
            for step, loss in in_a_process(workers, until, folder, options):
                largest = max(largest, abs(loss - alone[step]) / alone[step])
                progress.advance(
                    f"{workers} workers, loss {loss:.3f}, alone {alone[step]:.3f}", step not in seen
                )
                seen.append(step)
    resumed = next(step for step, before in zip(seen[1:], seen, strict=False) if step <= before)
    print_figures(
        {
            "loss": f"{loss:.6f}",
            "in one process": f"{alone[-1]:.6f}",
            "killed after": f"step {options.steps // 2}, with {options.workers} workers",
            "resumed at": f"step {resumed}, with {options.then} workers",
            "largest difference": f"{largest:.1e} of the loss",
        }
    )
    if not largest <= options.tolerance:
        raise Miss(f"The losses differ by {largest:.1e}; it should be {options.tolerance:g} at most.")


def make_parser() -> argparse.ArgumentParser:
    """The arguments of this example."""
    parser = example_parser(__doc__)
    parser.add_argument("--workers", type=positive, default=4, help="at first (%(default)s)")
    parser.add_argument("--then", type=positive, default=2, help="workers after that (%(default)s)")
    parser.add_argument("--steps", type=positive, default=24, help="of training (%(default)s)")
    parser.add_argument("--every", type=positive, default=5, help="steps between checkpoints (%(default)s)")
    parser.add_argument(
        "--tolerance", type=float, default=1e-4, help="how much losses may differ (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="for the first weights (%(default)s)")
    parser.add_argument("--plain", action="store_true", help="lines of text instead of progress bars")
    parser.add_argument("--folder", help="of checkpoints; only train, and print losses")
    return parser


def main() -> None:
    """Compares; or trains only, where there is a folder."""
    options = make_parser().parse_args()
    torch.set_num_threads(1)
    farcall.preempted()  # from now on the signals of preemption do not end this process, worker or driver
    with ending("fsdp", spmd.shutdown):
        if options.folder is None:
            compare(options)
        else:
            for step, loss in part(options.workers, options.folder, options):
                print(step, loss, flush=True)


if __name__ == "__main__":
    main()
