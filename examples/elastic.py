#!/usr/bin/env python3
"""Training that continues while trainers are killed and replaced. Start it with one command::

    python examples/elastic.py

How it works. The process that you start is the server. It owns a classifier of handwritten digits, and a
dynamic group, which workers join and leave at any time. It starts trainers as processes, which join the group
and send it gradients (asynchronous SGD, as in `parameter_server.py`). Now and then one of them is killed, as
by `kill -9`. The server is notified of who joins and who is lost, marked (1) below: it replaces a lost
trainer with another of the same name, and gives work to those that join. No work is repeated, since the
server has the weights. At the end nobody is sent a message that it is over, which a trainer that is just
starting would miss: each learns it from the server's next answer, marked (2).

It ends after a fixed number of steps, and says how many trainers that took.

Trainers on other machines can join at any time, with the same secret in FARCALL_TOKEN::

    python examples/elastic.py --meet HOST:29500                        # the server, on HOST
    python examples/elastic.py --meet HOST:29500 --join trainer9        # one more trainer, anywhere
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import queue
import signal
import tempfile
import threading
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from farcall import rpc
from farcall.examples import (
    Images,
    Miss,
    add_checkpoint_argument,
    ending,
    example_parser,
    live_progress,
    load_images,
    positive,
    preempted,
    print_figures,
    print_line,
    rate,
    restored,
    save,
)

TARGET = 0.93
LOST_SECONDS = 120.0


class Server:
    """Owns the weights, and takes a step with each gradient that comes."""

    def __init__(self, learning_rate: float, saved: Any = None) -> None:
        self._model = make_model()
        self._optimizer = torch.optim.SGD(self._model.parameters(), learning_rate, momentum=0.8)
        self._lock = threading.Lock()
        self.steps: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.enough = False
        if saved is not None:
            self._model.load_state_dict(saved["model"])
            self._optimizer.load_state_dict(saved["optimizer"])

    def state(self) -> dict[str, Any]:
        """Return the state that a later run needs to continue."""
        with self._lock:
            return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def update(self, trainer: str, gradients: list[Tensor] | None) -> list[Tensor]:
        """Take a step, and answer with the new weights; with none when training is over."""
        with self._lock:
            if self.enough:
                return []
            if gradients is not None:
                for parameter, gradient in zip(self._model.parameters(), gradients, strict=True):
                    parameter.grad = gradient
                self._optimizer.step()
                self.steps.put(trainer)
            return [parameter.detach().clone() for parameter in self._model.parameters()]

    def accuracy(self, images: Images) -> float:
        """The share of images whose digit the model names."""
        with self._lock, torch.no_grad():
            right = self._model(images.pixels).argmax(1) == images.labels
        return float(right.float().mean())


def make_model() -> nn.Module:
    """64 pixels in, one score for each of the ten digits out."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


class Trainer:
    """Computes gradients on all images, in an order of its own."""

    def __init__(self, server: rpc.RRef[Server], seed: int) -> None:
        self._server = server
        self._images = load_images()[0]
        self._random = torch.Generator().manual_seed(seed)
        self._model = make_model()

    def train(self, batch: int) -> None:
        """Compute gradients and have the server use them, until it has had enough."""
        name = rpc.get_worker_info().name
        try:
            weights = self._server.rpc_sync().update(name, None)
            while weights:
                with torch.no_grad():
                    for parameter, value in zip(self._model.parameters(), weights, strict=True):
                        parameter.copy_(value)
                chosen = self._images[torch.randint(len(self._images), (batch,), generator=self._random)]
                loss = nn.functional.cross_entropy(self._model(chosen.pixels), chosen.labels)
                gradients = list(torch.autograd.grad(loss, list(self._model.parameters())))
                weights = self._server.rpc_sync().update(name, gradients)
        finally:
            finished.set()  # (2)


def be_a_trainer(name: str, meeting: str) -> None:
    """The main function of a trainer's process: joins the existing group, and serves requests."""
    torch.set_num_threads(1)
    rpc.init_rpc(name, rpc_backend_options=rpc.AgentOptions(init_method=meeting, dynamic=True))
    finished.wait()
    rpc.shutdown()


def be_a_started_trainer(name: str, meeting: str) -> None:
    """The same in a process that the server has started, on its terminal."""
    logging.getLogger("rpc").setLevel(logging.ERROR)  # the server says who is lost, and keeps its bar whole
    be_a_trainer(name, meeting)


finished = threading.Event()
"""Set in a trainer's process when its training is over, or has failed."""


class Crew:
    """Keeps trainers at work: starts them, and others in place of those that are lost."""

    def __init__(self, server: Server, meeting: str, options: argparse.Namespace) -> None:
        self._server = rpc.RRef(server)
        self._meeting = meeting
        self._options = options
        self._processes: dict[str, BaseProcess] = {}
        self._lock = threading.Lock()
        self._over = False
        self.started = 0
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()

    def start(self, name: str) -> None:
        """Start a process, which will join by itself."""
        context = multiprocessing.get_context("spawn")
        self._processes[name] = context.Process(
            target=be_a_started_trainer, args=(name, self._meeting), daemon=True
        )
        resource_tracker.ensure_running()  # else it starts with the first of them, and unblocks signals
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is for the server only
        self._processes[name].start()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.started += 1

    def set_to_work(self, worker: rpc.WorkerInfo) -> None:
        """(1) Called when a worker has joined."""
        trainer = rpc.remote(worker, Trainer, args=(self._server, self.started), timeout=0)
        trainer.rpc_async(timeout=0).train(self._options.batch)

    def replace(self, worker: rpc.WorkerInfo, reason: str) -> None:
        """(1) Called when a worker is lost."""
        with self._lock:
            if not self._over:  # else it has left as it should
                self.lost.put(f"{worker.name}: {reason}")
                self.start(worker.name)

    def kill(self, name: str) -> None:
        """Kills a trainer, as a cloud does with a preemptible machine. Those of other machines live on."""
        if name in self._processes:
            self._processes[name].kill()

    def dismiss(self) -> None:
        """(2) Let all end, those too that have been started and have not joined yet."""
        self._server.local_value().enough = True
        with self._lock:
            self._over = True
        for process in self._processes.values():
            process.join(LOST_SECONDS)


def direct(options: argparse.Namespace, meeting: str) -> None:
    """The server's part, in the process that was started."""
    torch.manual_seed(options.seed)
    rpc.init_rpc("server", rpc_backend_options=rpc.AgentOptions(init_method=meeting, dynamic=True))
    _, held_out = load_images()
    saved = restored(options)
    server = Server(options.learning_rate, saved)
    first = 0 if saved is None else saved["steps"]
    stopped_at = None
    crew = Crew(server, meeting, options)
    with rpc.on_worker_joined(crew.set_to_work), rpc.on_worker_lost(crew.replace):
        names = [f"trainer{number}" for number in range(options.trainers)]
        print_line(f"Starting {', '.join(names)} on this machine.")
        for name in names:
            crew.start(name)
        with live_progress("steps", options.steps - first, plain=options.plain) as progress:
            for step in range(first, options.steps):
                try:
                    trainer = server.steps.get(timeout=LOST_SECONDS)
                except queue.Empty:
                    raise Miss(f"No trainer has done a step for {LOST_SECONDS:g} s.") from None
                progress.advance(f"{trainer}, {crew.lost.qsize()} lost")
                if step % options.kill_every == options.kill_every - 1 and step < options.steps * 3 // 4:
                    crew.kill(trainer)
                if preempted(options):
                    stopped_at = step + 1
                    break
        crew.dismiss()
    rpc.shutdown()
    if stopped_at is not None:
        save(server.state() | {"steps": stopped_at}, options)
    accuracy = server.accuracy(held_out)
    lost = [crew.lost.get() for _ in range(crew.lost.qsize())]
    print_figures(
        {
            "accuracy": f"{accuracy:.3f} on {len(held_out)} images held out",
            "trainers": f"{crew.started} were started, {len(lost)} of which replaced others that were killed",
            "the first": lost[0] if lost else "none was lost",
        }
    )
    if accuracy < TARGET:
        raise Miss(f"The accuracy is {accuracy:.3f}; it should be {TARGET} at least.")


def main() -> None:
    """The command."""
    parser = example_parser(__doc__, needs=["scikit-learn"])
    parser.add_argument("--trainers", type=positive, default=3, help="at work at a time (%(default)s)")
    parser.add_argument("--steps", type=positive, default=3000, help="in all (%(default)s)")
    parser.add_argument("--kill-every", type=positive, default=600, help="steps (%(default)s)")
    parser.add_argument("--batch", type=positive, default=32, help="images per step (%(default)s)")
    parser.add_argument("--learning-rate", type=rate, default=0.02, help="of SGD (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="for the first weights (%(default)s)")
    parser.add_argument("--plain", action="store_true", help="lines of text instead of progress bars")
    add_checkpoint_argument(parser)
    parser.add_argument("--meet", metavar="HOST:PORT", help="where trainers of other machines come")
    parser.add_argument("--join", metavar="NAME", help="be one more trainer, of this name")
    options = parser.parse_args()
    preempted(options)  # from now on the signals of preemption do not end this process
    if options.join and not options.meet:
        parser.error("--join needs --meet, where the server is")
    folder = tempfile.TemporaryDirectory(prefix="farcall-elastic-")
    with ending(clean_up=folder.cleanup):
        meeting = f"tcp://{options.meet}" if options.meet else (Path(folder.name) / "meeting").as_uri()
        if options.join:
            be_a_trainer(options.join, meeting)
        else:
            direct(options, meeting)


if __name__ == "__main__":
    main()
