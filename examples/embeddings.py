#!/usr/bin/env python3
"""A recommender whose embeddings are on a parameter server. Any of its processes may be killed at any time.

A server and two trainers on this machine, started by one command::

    python examples/embeddings.py

It runs the command with which to start them on several machines, where all see the same FOLDER::

    farcall launch -n 3 --dynamic --restart 9 examples/embeddings.py --folder FOLDER

How it works. Rank 0 is the server: it owns a table of users and one of items, the optimizer, and the schedule
of the learning rate. The others are trainers. A trainer fetches the few rows that a batch needs, and sends
back gradients for these rows; the server takes a step of `SparseAdam`, which touches no other row. It ends
when the server has taken all steps.

What makes it safe to kill, marked (1) to (4) below: the server saves its state every few steps, and a server
that is started again goes on from there; a trainer has nothing to lose, and one that is started again asks
the server, as before; trainers find the server by its name, not by a reference to an object that dies with
its process; nobody waits for a message that might have been sent before it was there to get it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from farcall import rpc
from farcall.examples import Miss, ending, example_parser, positive, rate
from farcall.rpc.errors import UnknownWorkerError, WorkerLostError

ROWS, SIZE, BATCH = 300, 8, 128


def ratings(users: Tensor, items: Tensor) -> Tensor:
    """Users' ratings of items, of shape (N,), from which the model learns."""
    random = torch.Generator().manual_seed(1)
    of_users, of_items = torch.randn(2, ROWS, 4, generator=random)
    learned: Tensor = (of_users[users] * of_items[items]).sum(1)
    return learned


class Server:
    """Owns the tables; made before its process joins the group, since trainers may call at once.

    Args:
        checkpoint: a file.
        options: of the command line.
    """

    def __init__(self, checkpoint: Path, options: argparse.Namespace) -> None:
        self.step = 0
        self.over = threading.Event()
        self._checkpoint = checkpoint
        self._options = options
        self._lock = threading.Lock()
        torch.manual_seed(0)
        self._tables = nn.ModuleList(nn.Embedding(ROWS, SIZE, sparse=True) for _ in range(2))
        for table in self._tables.parameters():
            nn.init.normal_(table, std=0.3)
        parameters = self._tables.parameters()
        self._optimizer: torch.optim.Optimizer = torch.optim.SparseAdam(parameters, lr=options.learning_rate)
        self._schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self._optimizer, options.steps)
        if checkpoint.exists():  # (1)
            saved = torch.load(checkpoint)
            self.step = saved["step"]
            self._tables.load_state_dict(saved["tables"])
            self._optimizer.load_state_dict(saved["optimizer"])
            self._schedule.load_state_dict(saved["schedule"])
        print(f"server is process {os.getpid()}; from step {self.step}", flush=True)
        if self.step >= options.steps:
            self.over.set()

    def rows(self, places: list[Tensor]) -> list[Tensor] | None:
        """Rows of both tables, each of shape (N, SIZE); None when training is over."""
        if self.over.is_set():
            return None
        with self._lock, torch.no_grad():
            return [table(each) for table, each in zip(self._tables, places, strict=True)]

    def update(self, places: list[Tensor], gradients: list[Tensor]) -> None:
        """Take a step with gradients for some rows."""
        with self._lock:
            if self.over.is_set():
                return
            for table, rows, gradient in zip(self._tables.parameters(), places, gradients, strict=True):
                table.grad = torch.sparse_coo_tensor(rows[None], gradient, table.shape, check_invariants=True)
            self._optimizer.step()
            self._schedule.step()
            self.step += 1
            if self.step % self._options.every == 0 or self.step == self._options.steps:
                self._save()
                (learning_rate,) = self._schedule.get_last_lr()
                print(f"step {self.step}, learning rate {learning_rate:.4f}", flush=True)
            if self.step == self._options.steps:
                self.over.set()

    def error(self) -> float:
        """Root of the mean squared error, over all users and items; ratings have a deviation of 2.1."""
        users, items = torch.cartesian_prod(torch.arange(ROWS), torch.arange(ROWS)).T
        with torch.no_grad():
            of_users, of_items = self._tables[0](users), self._tables[1](items)
            predicted = (of_users * of_items).sum(1)
        error: float = (predicted - ratings(users, items)).square().mean().sqrt().item()
        return error

    def _save(self) -> None:
        """(1) Whole or not at all: the process may die while it writes."""
        state = {
            "step": self.step,
            "tables": self._tables.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
        }
        written = self._checkpoint.with_suffix(".new")
        torch.save(state, written)
        written.replace(self._checkpoint)


server: Server | None = None
"""The server, in its process."""


def ask(method: str, *args: Any) -> Any:
    """Called by trainers, at the server's process."""
    return getattr(server, method)(*args)


def serve(checkpoint: Path, options: argparse.Namespace, changes: queue.SimpleQueue[str]) -> None:
    """The main function of rank 0."""
    global server
    server = Server(checkpoint, options)
    rpc.init_rpc("server")
    server.over.wait()
    while len(rpc.get_worker_infos()) > 1:  # (4) each asks once more, is told that it is over, and leaves
        changes.get()
    rpc.shutdown()
    print(f"error {server.error():.2f} after {server.step} steps", flush=True)


def train(name: str, checkpoint: Path, options: argparse.Namespace, changes: queue.SimpleQueue[str]) -> None:
    """The main function of the others, from their first start or from a later one."""
    if checkpoint.exists() and torch.load(checkpoint)["step"] >= options.steps:  # (4) the server may be gone
        print("the training is over", flush=True)
        return
    rpc.init_rpc(name)
    print(f"{name} is process {os.getpid()}", flush=True)
    random = torch.Generator().manual_seed(os.getpid())
    while True:
        places = list(torch.randint(ROWS, (2, BATCH), generator=random))
        try:
            rows = rpc.rpc_sync("server", ask, args=("rows", places))  # (3)
            if rows is None:
                break
            rows = [each.requires_grad_() for each in rows]
            loss = ((rows[0] * rows[1]).sum(1) - ratings(*places)).square().mean()
            rpc.rpc_sync("server", ask, args=("update", places, list(torch.autograd.grad(loss, rows))))
        except (WorkerLostError, UnknownWorkerError):
            await_server(
                changes, options.patience
            )  # (2) then with another batch; the server may have used this one, or not
    rpc.shutdown()


def await_server(changes: queue.SimpleQueue[str], seconds: float) -> None:
    """Wait until there is a server.

    Raises:
        Miss: it has not come.
    """
    until = time.monotonic() + seconds
    while all(worker.name != "server" for worker in rpc.get_worker_infos()):
        try:
            changes.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            rpc.shutdown(graceful=False)
            raise Miss(
                f"There is no server, and none has come for {seconds:g} s. Start all again; training goes on "
                "from the last checkpoint."
            ) from None


def launch() -> NoReturn:
    """Start the server and two trainers, and end as they do."""
    command = ["launch", "-n", "3", "--dynamic", "--restart", "9", *sys.argv]
    with contextlib.ExitStack() as ending:
        if not any(each.startswith("--folder") for each in sys.argv):
            command += ["--folder", ending.enter_context(tempfile.TemporaryDirectory())]
        print("farcall", *command, flush=True)
        launcher = subprocess.Popen([sys.executable, "-m", "farcall", *command])
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the launcher, too, which ends all
        sys.exit(launcher.wait())


def main() -> None:
    """Be the server, or a trainer."""
    parser = example_parser(__doc__)
    parser.add_argument("--folder", type=Path, help="for the checkpoint; all see it (a temporary one)")
    parser.add_argument("--steps", type=positive, default=1500, help="in all (%(default)s)")
    parser.add_argument("--every", type=positive, default=100, help="steps between checkpoints (%(default)s)")
    parser.add_argument(
        "--patience", type=rate, default=60.0, help="seconds that trainers wait for a server (%(default)s)"
    )
    parser.add_argument("--learning-rate", type=rate, default=0.03, help="at first (%(default)s)")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        launch()
    if options.folder is None:
        parser.error("--folder is needed where each process is started by itself")
    rank = int(os.environ["RANK"])
    options.folder.mkdir(parents=True, exist_ok=True)
    checkpoint = options.folder / "checkpoint.pt"
    torch.set_num_threads(1)
    changes: queue.SimpleQueue[str] = queue.SimpleQueue()
    rpc.on_worker_joined(lambda worker: changes.put(worker.name))
    rpc.on_worker_lost(lambda worker, _: changes.put(worker.name))
    name = f"trainer{rank}" if rank else "server"
    with ending(name):
        if rank == 0:
            serve(checkpoint, options, changes)
        else:
            train(name, checkpoint, options, changes)


if __name__ == "__main__":
    main()
