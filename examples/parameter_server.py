#!/usr/bin/env python3
"""A parameter server that trains a classifier of handwritten digits, with asynchronous SGD.

Three processes on this machine, started by the command itself::

    python examples/parameter_server.py

Or one process per worker, on as many machines as you like; rank 0 is the server, the others train::

    python examples/parameter_server.py --rank 0 --world-size 3 --master-addr HOST --master-port 29500
    python examples/parameter_server.py --rank 1 --world-size 3 --master-addr HOST --master-port 29500
    python examples/parameter_server.py --rank 2 --world-size 3 --master-addr HOST --master-port 29500

Or under torchrun, which gives each process its rank in the environment::

    torchrun --nproc-per-node 3 examples/parameter_server.py

How it works. The server owns the model's weights. A trainer owns a part of the images. Repeatedly, a
trainer computes gradients on a batch and sends them to the server, which takes an SGD step and answers with
the new weights. No trainer waits for another: while one computes, the weights change by the steps
of the other. (One limit: a trainer that is far ahead waits for the slowest, so that no gradient is computed
on very old weights. That is "stale synchronous parallel": Ho et al., NIPS 2013.)

All of it is five ideas, marked (1) to (5) below: a group, remote objects, references that travel, calls
through a reference, and a function that answers later.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import socket
import threading
import time
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from farcall import rpc
from farcall.examples import (
    Images,
    Miss,
    Preempted,
    add_checkpoint_argument,
    add_group_arguments,
    example_parser,
    live_progresses,
    load_images,
    parse_arguments,
    positive,
    preempted,
    print_figures,
    print_line,
    rate,
    restored,
    run_workers,
    save,
)

TARGET = 0.95
"""The accuracy on held-out images that counts as success."""

Weights: TypeAlias = list[Tensor]


# ---------------------------------------------------------------- the model: plain PyTorch


def make_model() -> nn.Module:
    """64 pixels in, one score for each of the ten digits out."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


# ---------------------------------------------------------------- what lives on the server


class ParameterServer:
    """Owns the weights. Trainers call it, several at a time: each call runs on a thread of its own."""

    def __init__(self, trainers: int, learning_rate: float, max_lead: int, saved: Any = None) -> None:
        self._model = make_model()
        self._optimizer = torch.optim.SGD(self._model.parameters(), learning_rate, momentum=0.8)
        self._max_lead = max_lead
        self._lock = threading.Lock()
        self._steps = [0] * trainers
        self._losses = [float("nan")] * trainers
        self._waiting: dict[int, torch.futures.Future[Weights]] = {}
        self._stopped = False
        if saved is not None:
            self._model.load_state_dict(saved["model"])
            self._optimizer.load_state_dict(saved["optimizer"])
            self._steps = saved["steps"]

    def stop(self) -> None:
        """Answers trainers with no weights from now on, by which they end."""
        with self._lock:
            self._stopped = True
            waiting, self._waiting = list(self._waiting.values()), {}
        for future in waiting:
            future.set_result([])

    def state(self) -> dict[str, Any]:
        """Return the state that a later run needs to continue."""
        with self._lock:
            return {
                "model": self._model.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "steps": self._steps,
            }

    def weights(self) -> Weights:
        """A copy of the weights as they are now."""
        with self._lock:
            return self._copy()

    @rpc.functions.async_execution
    def update(self, trainer: int, gradients: Weights, loss: float) -> torch.futures.Future[Weights]:
        """Takes one step with a trainer's gradients and answers with the new weights.

        (5) A function that answers later: it returns a future, and the caller gets its reply once the
        future has a result. A trainer too far ahead waits here without keeping a thread busy.
        """
        reply: torch.futures.Future[Weights] = torch.futures.Future()
        with self._lock:
            if self._stopped:
                reply.set_result([])
                return reply
            for parameter, gradient in zip(self._model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            self._optimizer.step()
            self._steps[trainer] += 1
            self._losses[trainer] = loss
            self._waiting[trainer] = reply
            limit = min(self._steps) + self._max_lead
            released = [index for index in self._waiting if self._steps[index] <= limit]
            replies = [(self._waiting.pop(index), self._copy()) for index in released]
        for future, weights in replies:
            future.set_result(weights)
        return reply

    def progress(self) -> list[tuple[int, float]]:
        """Updates so far and latest loss, for each trainer."""
        with self._lock:
            return list(zip(self._steps, self._losses, strict=True))

    def accuracy(self, images: Images) -> float:
        """The share of images whose digit the model names."""
        with self._lock, torch.no_grad():
            right = self._model(images.pixels).argmax(1) == images.labels
        return float(right.float().mean())

    def _copy(self) -> Weights:
        return [parameter.detach().clone() for parameter in self._model.parameters()]


# ---------------------------------------------------------------- what lives on each trainer


class Trainer:
    """Owns a part of the images and computes gradients on it."""

    def __init__(self, server: rpc.RRef[ParameterServer], index: int, trainers: int, batch: int) -> None:
        self._server = server
        self._index = index
        self._batch = batch
        self._images = load_images()[0][index::trainers]
        self._random = torch.Generator().manual_seed(index)
        self._model = make_model()

    def where(self) -> tuple[str, int]:
        """The host and process that this trainer is in."""
        return socket.gethostname(), os.getpid()

    def train(self, steps: int) -> None:
        """Computes gradients and has the server use them, ``steps`` times."""
        # (4) Calls through a reference: server.rpc_sync().method(...) runs the method on the worker that
        # owns the object. There are rpc_async() and remote() as well.
        self._use(self._server.rpc_sync().weights())
        for _ in range(steps):
            gradients, loss = self._gradients()
            weights = self._server.rpc_sync().update(self._index, gradients, loss)
            if not weights:
                return
            self._use(weights)

    def _use(self, weights: Weights) -> None:
        with torch.no_grad():
            for parameter, value in zip(self._model.parameters(), weights, strict=True):
                parameter.copy_(value)

    def _gradients(self) -> tuple[Weights, float]:
        batch = self._images[torch.randint(len(self._images), (self._batch,), generator=self._random)]
        loss = nn.functional.cross_entropy(self._model(batch.pixels), batch.labels)
        gradients = torch.autograd.grad(loss, list(self._model.parameters()))
        return list(gradients), loss.item()


# ---------------------------------------------------------------- the workers


def run_worker(options: argparse.Namespace) -> None:
    """The main function of each process in the group."""
    # (1) A group: every process has a name and a rank, and has met the others at one address. `rpc.spawn` or
    # `rpc.init_rpc` has seen to that, and `rpc.shutdown` ends it (in `example_run.py`). Rank 0 directs. The
    # others have nothing to do but answer calls, until all have come to the barrier. If a worker is lost, the
    # barrier raises, on all of them.
    accuracy, saved = TARGET, None
    if rpc.get_worker_info().id == 0:
        torch.manual_seed(options.seed)
        try:
            accuracy = direct(options)
        except Preempted as error:  # the others did their part: all leave in order
            saved = error
    rpc.barrier()
    if saved is not None:
        raise saved
    if accuracy < TARGET:
        raise Miss(f"The accuracy is {accuracy:.3f}; it should be {TARGET} at least.")


def worker_name(rank: int) -> str:
    """``server``, ``trainer0``, ``trainer1`` and so on."""
    return "server" if rank == 0 else f"trainer{rank - 1}"


def direct(options: argparse.Namespace) -> float:
    """The server's part: makes the objects, has the trainers train, returns the accuracy reached."""
    names = [info.name for info in rpc.get_worker_infos()[1:]]
    saved = restored(options)
    local = ParameterServer(len(names), options.learning_rate, options.max_lead, saved)
    done = [steps for steps, _ in local.progress()]
    # (2) Remote objects: rpc.remote makes one on another worker and returns a reference at once.
    # (3) References travel: `server`, a reference to the object here, is an argument like any other.
    server = rpc.RRef(local)
    trainers = [
        rpc.remote(name, Trainer, args=(server, index, len(names), options.batch), timeout=0)
        for index, name in enumerate(names)
    ]
    _, held_out = load_images()
    places = [trainer.rpc_sync(timeout=0).where() for trainer in trainers]  # once they have their data
    began = time.perf_counter()
    runs = [
        trainer.rpc_async(timeout=0).train(options.steps - steps)
        for trainer, steps in zip(trainers, done, strict=True)
    ]
    finished: queue.SimpleQueue[torch.futures.Future[None]] = queue.SimpleQueue()
    for run in runs:
        run.add_done_callback(finished.put)  # in this order: what failed first is what is reported
    for name, (host, process) in zip(names, places, strict=True):
        print_line(f"{name} on {host}, process {process}")
    with live_progresses(names, options.steps, plain=options.plain) as bars:
        shown = [0] * len(names)
        running = len(runs)
        while running:
            with contextlib.suppress(queue.Empty):
                finished.get(timeout=0.05).wait()  # raises what went wrong, a lost trainer for one
                running -= 1
            if preempted(options):
                local.stop()
            for index, (steps, loss) in enumerate(local.progress()):
                if steps > shown[index]:
                    bars[index].advance(f"loss {loss:.3f}", steps - shown[index])
                    shown[index] = steps
    if preempted(options):
        save(local.state(), options)
    seconds = time.perf_counter() - began
    accuracy = local.accuracy(held_out)
    places.insert(0, (socket.gethostname(), os.getpid()))
    print_figures(
        {
            name: f"{host}, process {process}"
            for name, (host, process) in zip(("server", *names), places, strict=True)
        }
        | {
            "accuracy": f"{accuracy:.3f} on {len(held_out)} images held out",
            "updates": f"{len(names) * options.steps - sum(done)} in {seconds:.1f} s",
            "updates per second": f"{(len(names) * options.steps - sum(done)) / seconds:,.0f}",
        }
    )
    return accuracy


# ---------------------------------------------------------------- the command line


def make_parser() -> argparse.ArgumentParser:
    """The arguments of this example, and those that tell one worker its place."""
    parser = example_parser(__doc__, needs=["scikit-learn"])
    training = parser.add_argument_group("training (what rank 0 is told counts)")
    training.add_argument(
        "--steps", type=positive, default=1500, help="updates by each trainer (%(default)s)"
    )
    training.add_argument("--batch", type=positive, default=32, help="images per update (%(default)s)")
    training.add_argument("--learning-rate", type=rate, default=0.02, help="of SGD (%(default)s)")
    training.add_argument(
        "--max-lead", type=positive, default=20, help="updates ahead of the slowest (%(default)s)"
    )
    training.add_argument("--seed", type=int, default=0, help="for the first weights (%(default)s)")
    training.add_argument("--plain", action="store_true", help="lines of text instead of progress bars")
    add_checkpoint_argument(parser)
    training.add_argument("--trainers", type=positive, default=2, help="how many to start here (%(default)s)")
    add_group_arguments(parser)
    return parser


def main() -> None:
    """Run one worker if its name is given, otherwise all of them."""
    options = parse_arguments(make_parser())
    size = options.world_size or options.trainers + 1
    run_workers(run_worker, options, [worker_name(rank) for rank in range(size)])


if __name__ == "__main__":
    main()
