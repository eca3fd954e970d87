#!/usr/bin/env python3
"""Two trainers that share an embedding on a server, and train the dense part of the model with DDP.

Three processes on this machine, started by the command itself::

    python examples/hybrid.py

How it works. A recommender, say, has an embedding too large for one trainer, and a dense part that is small
and busy. So the embedding lives once, on the server; trainers send it the rows that they need, and gradients
for just these rows. The dense part is on every trainer, and DistributedDataParallel averages its gradients
over all of them with gloo, so the copies stay equal.

The data are scikit-learn's handwritten digits as a recommender would see them: an image is a set of 64 of
320 features, one for each pixel and shade.

Three ideas are marked (1) to (3) below: a process group beside the RPC group; one forward through both kinds
of parallelism, under one autograd context; an optimizer for local and remote parameters.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # PyTorch does not say that it exports it
from torch.nn.parallel import DistributedDataParallel

from farcall import dist_autograd, rpc
from farcall.dist_optim import DistributedOptimizer
from farcall.examples import (
    Images,
    Miss,
    example_parser,
    live_progress,
    load_images,
    positive,
    print_figures,
    rate,
    run_example,
)
from farcall.rref import RemoteModule

TARGET = 0.9
"""The accuracy on held-out images that counts as success."""
SHADES = 5
FEATURES = 64 * SHADES


def features(images: Images) -> Tensor:
    """Which features each image has, of shape (N, 64): one for each pixel, by its shade of grey."""
    shades = (images.pixels * (SHADES - 1)).round().long()
    return shades + torch.arange(64) * SHADES


def make_embedding(size: int) -> nn.Module:
    """The sum of the rows of an image's features. The gradient has just these rows, too: it is sparse."""
    embedding = nn.EmbeddingBag(FEATURES, size, mode="sum", sparse=True)
    nn.init.normal_(embedding.weight, std=0.02)
    return embedding


# ---------------------------------------------------------------- what lives on each trainer


class Trainer:
    """Has a part of the images, a copy of the dense part, and a stand-in for the embedding.

    Args:
        embedding: lives on the server.
        index: which trainer this is.
        trainers: how many there are.
        host: where the server runs.
        port: at which it has trainers meet.
        options: the command line that the server was given.
    """

    def __init__(
        self,
        embedding: RemoteModule,
        index: int,
        trainers: int,
        host: str,
        port: int,
        options: argparse.Namespace,
    ) -> None:
        # (1) A process group of the trainers alone, for DDP. It has nothing to do with the RPC group, in
        # which the server is too.
        store = TCPStore(host, port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=index, world_size=trainers)
        self._embedding = embedding
        torch.manual_seed(options.seed)
        dense = nn.Sequential(nn.Linear(options.size, 64), nn.ReLU(), nn.Linear(64, 10))
        self._dense = DistributedDataParallel(dense)
        # (3) One optimizer for the embedding over there and the dense part here. Each trainer has one; on the
        # server, their steps are taken one at a time.
        here = [rpc.RRef(parameter) for parameter in self._dense.parameters()]
        self._optimizer = DistributedOptimizer(
            torch.optim.Adagrad, [*embedding.remote_parameters(), *here], lr=options.learning_rate
        )
        images = load_images()[0][index::trainers]
        count = len(load_images()[0]) // trainers  # the same everywhere: all take the same number of steps
        self._features, self._labels = features(images)[:count], images.labels[:count]
        self._batch = options.batch

    def train(self, seed: int) -> float:
        """Trains on all images of this trainer once; the latest loss."""
        order = torch.randperm(len(self._labels), generator=torch.Generator().manual_seed(seed))
        for batch in torch.split(order, self._batch):
            with dist_autograd.context() as context_id:
                # (2) The embedding by RPC, then the dense part under DDP. The one backward runs through
                # both: DDP averages its gradients as it always does, and the embedding's go to the server.
                loss = nn.functional.cross_entropy(self._scores(self._features[batch]), self._labels[batch])
                dist_autograd.backward(context_id, [loss])
                self._optimizer.step(context_id)
        return loss.item()

    def _scores(self, chosen: Tensor) -> Tensor:
        scores: Tensor = self._dense(self._embedding(chosen))
        return scores

    def accuracy(self) -> float:
        """The share of held-out images whose digit the model names."""
        held_out = load_images()[1]
        with torch.no_grad():
            right = self._scores(features(held_out)).argmax(1) == held_out.labels
        return float(right.float().mean())

    def dense_weights(self) -> list[Tensor]:
        """The weights of this trainer's copy of the dense part."""
        return [parameter.detach() for parameter in self._dense.parameters()]

    def leave(self) -> None:
        """Leaves the trainers' process group."""
        dist.destroy_process_group()


# ---------------------------------------------------------------- the workers


def direct(options: argparse.Namespace) -> None:
    """The part of rank 0, the server: makes the embedding and the trainers, has them train, compares."""
    names = NAMES[1:]
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]  # of Adagrad's own
    embedding = RemoteModule("server/cpu", make_embedding, args=(options.size,))
    host = options.master_addr or "127.0.0.1"
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    trainers = [
        rpc.remote(name, Trainer, (embedding, index, len(names), host, store.port, options), timeout=0)
        for index, name in enumerate(names)
    ]
    with live_progress("passes", options.passes, plain=options.plain) as progress:
        for turn in range(options.passes):
            losses = torch.futures.wait_all([each.rpc_async(timeout=0).train(turn) for each in trainers])
            progress.advance(f"loss {sum(losses) / len(losses):.3f}")
    accuracy = trainers[0].rpc_sync().accuracy()
    one, other = (each.rpc_sync().dense_weights() for each in trainers)
    torch.futures.wait_all([each.rpc_async().leave() for each in trainers])
    equal = all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))
    print_figures(
        {
            "accuracy": f"{accuracy:.3f} on images held out",
            "dense parts": "equal on both trainers" if equal else "different",
        }
    )
    if not equal:
        raise Miss("The dense parts of the two trainers differ; DDP should hold them equal.")
    if accuracy < TARGET:
        raise Miss(f"The accuracy is {accuracy:.3f}; it should be {TARGET} at least.")


NAMES = ("server", "trainer0", "trainer1")


def main() -> None:
    """Run one worker if its name is given, otherwise all of them."""
    parser = example_parser(__doc__, needs=["scikit-learn"])
    parser.add_argument("--passes", type=positive, default=8, help="over the images (%(default)s)")
    parser.add_argument("--batch", type=positive, default=32, help="images per step (%(default)s)")
    parser.add_argument("--size", type=positive, default=32, help="of the embedding's rows (%(default)s)")
    parser.add_argument("--learning-rate", type=rate, default=0.05, help="of Adagrad (%(default)s)")
    run_example(parser, NAMES, direct)


if __name__ == "__main__":
    main()
