#!/usr/bin/env python3
"""A Transformer on two by two processes: tensor and data parallelism, compared with one process.

Four processes on this machine, started by the command itself::

    python examples/tensor_parallel.py
    python examples/tensor_parallel.py --sequence-parallel --loss-parallel

Or one process per worker, on as many machines as you like, for each rank from 0 to 3::

    python examples/tensor_parallel.py --rank 0 --world-size 4 --master-addr HOST --master-port 29500

Or under torchrun, without an RPC group::

    torchrun --standalone --nproc-per-node 4 examples/tensor_parallel.py

How it works. A small Transformer learns Shakespeare's sonnets, character by character. The processes are a
mesh of two dimensions, (dp, tp). Along tp each layer is sharded: a rank has some of the attention heads, the
hidden features and the vocabulary. Along dp the model is repeated: each copy learns from its part of the
batch, and gradients are averaged. The model itself is written for one process and knows nothing of this.

Rank 0 trains the same model by itself as well, on whole batches. Success is that the losses agree, step by
step.

Four ideas are marked (1) to (4) below: a process group, a mesh, a plan, and gradients averaged over dp.

With ``--served`` rank 0 has no part of the model but a handle, (5): the others hold the shards, and it trains
through them as if the model were local, and then generates text with it::

    python examples/tensor_parallel.py --served
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import cross_entropy

from farcall import dist_autograd, rpc, spmd
from farcall.dist_optim import DistributedOptimizer
from farcall.examples import (
    HEADS,
    Miss,
    Text,
    Transformer,
    add_group_arguments,
    example_parser,
    live_progress,
    load_text,
    parse_arguments,
    positive,
    print_figures,
    rate,
    run_workers,
)
from farcall.spmd.tensor_parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

# ------------------------------------------------------------ training: plain PyTorch, except for averages


class Trainer:
    """A model and its optimizer."""

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        self.model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)

    def step(self, batch: Tensor, dp: dist.ProcessGroup | None = None) -> float:
        """One step of training; its loss. In a group, loss and gradients are averaged over its ranks."""
        scores = self.model(batch[:, :-1])
        with loss_parallel():  # changes nothing unless scores are a DTensor
            loss = cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        value = local(loss.detach())
        if dp is not None:
            # (4) A rank has the same shards as those that differ from it in dp only. So their gradients are
            # averaged shard by shard, and nothing whole is ever put together.
            gradients = [
                local(parameter.grad) for parameter in self.model.parameters() if parameter.grad is not None
            ]
            for tensor in (value, *gradients):
                dist.all_reduce(tensor, dist.ReduceOp.AVG, group=dp)
        self._optimizer.step()
        return value.item()


def local(tensor: Tensor) -> Tensor:
    """This rank's part of it."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# ---------------------------------------------------------------- how it is cut


def make_plan(options: argparse.Namespace) -> dict[str, ParallelStyle]:
    """(3) How each layer is cut.

    Columns first, rows next: between the two each rank has its share of heads or hidden features, and one
    all-reduce puts the sums together. With ``--sequence-parallel`` all else, norms for one, is cut by
    positions, and the all-reduce becomes a reduce-scatter there and an all-gather here. With
    ``--loss-parallel`` scores stay cut by characters, and the loss is computed from the parts.
    """
    plan: dict[str, ParallelStyle] = {}
    between = Shard(1) if options.sequence_parallel else Replicate()
    if options.sequence_parallel:
        plan["layers.*.*_norm"] = plan["norm"] = SequenceParallel(use_local_output=True)
    return plan | {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "layers.*.attention.w[qkv]": ColwiseParallel(input_layouts=between),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=between),
        "layers.*.feed_forward.w[13]": ColwiseParallel(input_layouts=between),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=between),
        "head": ColwiseParallel(
            input_layouts=between,
            output_layouts=Shard(-1) if options.loss_parallel else Replicate(),
            use_local_output=not options.loss_parallel,
        ),
    }


def train(options: argparse.Namespace) -> None:
    """The part of every rank. Rank 0 trains the same model alone, too, and compares."""
    # (2) Four ranks as two by two. A rank talks to those in its row, mesh["tp"], within layers, and to those
    # in its column, mesh["dp"], when it averages gradients.
    mesh = init_device_mesh("cpu", (options.dp, options.tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(options.seed)
    text = load_text()
    model = Transformer(text.vocabulary, options.size)
    alone = Trainer(copy.deepcopy(model), options.learning_rate)
    parallelize_module(model, mesh["tp"], make_plan(options), strict=True)
    together = Trainer(model, options.learning_rate)

    def take_step(step: int) -> float:
        return together.step(part(text, step, mesh, options), mesh["dp"].get_group())

    if dist.get_rank() == 0:
        here = sum(local(each).numel() for each in model.parameters())
        compare(take_step, alone, text, f"of which {here:,} on rank 0", options)
    else:
        for step in range(options.steps):
            take_step(step)


def part(text: Text, step: int, mesh: DeviceMesh, options: argparse.Namespace) -> Tensor:
    """This rank's training data of a step: the same for all ranks with the same place in dp."""
    return text.batch(step, options.batch, options.length).chunk(options.dp)[mesh["dp"].get_local_rank()]


def train_served(options: argparse.Namespace) -> None:
    """The part of rank 0 where the others hold the model."""
    torch.manual_seed(options.seed)
    text = load_text()
    alone = Trainer(Transformer(text.vocabulary, options.size), options.learning_rate)
    # (5) Each worker builds its part, and has memory for no more. What comes back is called, differentiated
    # and optimized like a module, and holds no parameters.
    model = parallelize_module(
        partial(Transformer, text.vocabulary, options.size),
        workers=[worker_name(rank) for rank in range(1, options.tp + 1)],
        parallelize_plan=make_plan(options),
        strict=True,
    )
    model.load_state_dict(alone.model.state_dict())
    optimizer = DistributedOptimizer(torch.optim.AdamW, model.remote_parameters(), lr=options.learning_rate)

    def take_step(step: int) -> float:
        batch = text.batch(step, options.batch, options.length)
        with dist_autograd.context() as context_id:
            loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            dist_autograd.backward(context_id, [loss])
            model.step(optimizer, context_id)
        return loss.item()

    compare(take_step, alone, text, "none of them here", options)
    written = text.characters[: options.length].unsqueeze(0)
    for _ in range(options.length):
        following = model(written[:, -options.length :])[:, -1].argmax(-1, keepdim=True)
        written = torch.cat([written, following], 1)
    print_figures({"it writes": repr(text.spelled(written[0, options.length :]))})
    model.close()


def compare(
    together: Callable[[int], float], alone: Trainer, text: Text, where: str, options: argparse.Namespace
) -> None:
    """Trains the model in one process beside ``together``, which takes the step of a number.

    Raises:
        Miss: the losses differ.
    """
    largest, seconds, seconds_alone = 0.0, 0.0, 0.0
    with live_progress("steps", options.steps, plain=options.plain) as progress:
        for step in range(options.steps):
            began = time.perf_counter()
            loss = together(step)
            middle = time.perf_counter()
            expected = alone.step(text.batch(step, options.batch, options.length))
            seconds, seconds_alone = seconds + middle - began, seconds_alone + time.perf_counter() - middle
            largest = max(largest, abs(loss - expected) / expected)
            progress.advance(f"loss {loss:.3f}, alone {expected:.3f}")
    milliseconds = [each / options.steps * 1000 for each in (seconds, seconds_alone)]
    count = sum(each.numel() for each in alone.model.parameters())
    print_figures(
        {
            "loss": f"{loss:.6f}",
            "in one process": f"{expected:.6f}",
            "largest difference": f"{largest:.1e} of the loss, over {options.steps} steps",
            "parameters": f"{count:,}, {where}",
            "time per step": f"{milliseconds[0]:.0f} ms, and {milliseconds[1]:.0f} ms in one process",
        }
    )
    if not largest <= options.tolerance:
        raise Miss(f"The losses differ by {largest:.1e}; it should be {options.tolerance:g} at most.")


# ---------------------------------------------------------------- starting and ending


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """PyTorch's default process group, of farcall's collectives."""
    # (1) By torchrun the backend's name is enough. Otherwise workers of an RPC group become ranks, and calls
    # go on beside collectives.
    if dist.is_torchelastic_launched():
        dist.init_process_group("farcall")
    else:
        spmd.init_process_group()
    yield
    dist.destroy_process_group()


def run_worker(options: argparse.Namespace) -> None:
    """One worker, from joining to leaving."""
    miss = None
    with contextlib.nullcontext() if options.served else process_group():
        try:
            if not options.served:
                train(options)
            elif rpc.get_worker_info().id == 0:
                train_served(options)
        except Miss as missed:  # the others did their part: all leave in order
            miss = missed
    if miss is not None:
        raise miss


def worker_name(rank: int) -> str:
    """``worker0``, ``worker1`` and so on."""
    return f"worker{rank}"


def make_parser() -> argparse.ArgumentParser:
    """The arguments of this example, and those that tell one worker its place."""
    parser = example_parser(__doc__)
    parser.add_argument(
        "--sequence-parallel", action="store_true", help="cut what is between the layers by positions"
    )
    parser.add_argument("--loss-parallel", action="store_true", help="compute the loss from parts of scores")
    parser.add_argument(
        "--served", action="store_true", help="rank 0 trains the model through a handle; all others hold it"
    )
    parser.add_argument("--dp", type=positive, help="copies of the model (2; 1 with --served)")
    parser.add_argument("--tp", type=positive, default=2, help="ranks that share a copy (%(default)s)")
    parser.add_argument("--steps", type=positive, default=100, help="of training (%(default)s)")
    parser.add_argument("--batch", type=positive, default=16, help="pieces of text per step (%(default)s)")
    parser.add_argument("--length", type=positive, default=64, help="characters of each (%(default)s)")
    parser.add_argument("--size", type=positive, default=64, help="of vectors (%(default)s)")
    parser.add_argument("--learning-rate", type=rate, default=0.003, help="of AdamW (%(default)s)")
    parser.add_argument(
        "--tolerance", type=float, default=1e-4, help="how much losses may differ (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="for the first weights (%(default)s)")
    parser.add_argument("--plain", action="store_true", help="lines of text instead of progress bars")
    add_group_arguments(parser)
    return parser


def main() -> None:
    """Run one worker if its name is given, otherwise all of them."""
    parser = make_parser()
    options = parse_arguments(parser)
    options.dp = options.dp or (1 if options.served else 2)
    size = options.dp * options.tp + options.served
    for wrong, complaint in (
        (size < 2, "--dp times --tp is how many workers there are: 2 or more"),
        (options.served and options.dp > 1, "with --served there is one copy of the model: --dp 1"),
        (options.served and options.loss_parallel, "with --served the loss is computed on rank 0, whole"),
        (
            options.served and dist.is_torchelastic_launched(),
            "--served needs an RPC group, which torchrun does not make",
        ),
        (
            options.world_size not in (None, size),
            f"--dp {options.dp} and --tp {options.tp} make {size} workers, not {options.world_size}",
        ),
        (options.batch % options.dp, "--dp must divide --batch"),
        (HEADS % options.tp, f"--tp must divide the {HEADS} attention heads"),
        (options.size % (2 * HEADS), f"--size must be a multiple of {2 * HEADS}"),
        (
            options.sequence_parallel and options.length % options.tp,
            "--tp must divide --length, which --sequence-parallel cuts",
        ),
    ):
        if wrong:
            parser.error(complaint)
    if dist.is_torchelastic_launched():
        try:
            run_worker(options)
        except Miss as error:
            sys.exit(f"{worker_name(options.rank)}: {error}")
    else:
        run_workers(run_worker, options, [worker_name(rank) for rank in range(size)])


if __name__ == "__main__":
    main()
