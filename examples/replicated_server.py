#!/usr/bin/env python3
"""A parameter server that is killed while trainers train: no update is lost or doubled. Alone, it starts
itself by the launcher::

    farcall launch -n 5 --dynamic --restart 100 examples/replicated_server.py

How it works. Two of the first three processes have a copy of the server (`elastic.Replicated`), which takes a
step with each gradient that comes (asynchronous SGD, as in `parameter_server.py`). One trainer kills the
process that answers, by `kill -9`, again and again. The other copy goes on at once, a third process gets a
copy, and the launcher starts a process in place of the lost one. There is no checkpoint. In the end the
server must have used each trainer's gradients once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time

import torch
from torch import Tensor

from farcall import elastic, rpc

SERVERS, TRAINERS = 3, 2


class Server:
    """Owns the weights of a linear model, and counts the steps of each trainer."""

    def __init__(self) -> None:
        self._weights = torch.zeros(16)
        self._optimizer = torch.optim.SGD([self._weights], 0.05, momentum=0.5)
        self._steps: dict[str, int] = {}
        self._finished: set[str] = set()
        self._leaving: set[int] = set()

    def push(self, trainer: str, gradient: Tensor | None) -> Tensor:
        """Take a step, and return the weights."""
        if gradient is not None:
            self._weights.grad = gradient
            self._optimizer.step()
            self._steps[trainer] = self._steps.get(trainer, 0) + 1
        return self._weights

    def finish(self, trainer: str) -> int:
        """Return the number of steps with gradients of this trainer, which ends."""
        self._finished.add(trainer)
        return self._steps[trainer]

    def may_leave(self, rank: int) -> bool:
        """Whether all trainers have finished, and all servers know it: also one that is just starting."""
        if len(self._finished) == TRAINERS:
            self._leaving.add(rank)
        return len(self._leaving) == SERVERS


def serve(rank: int) -> None:
    """The program of a process that keeps a copy of the server if it is needed."""
    server = elastic.Replicated(Server, copies=2, name="server")
    with contextlib.suppress(elastic.StateLostError):  # the others have left first
        while not server.rpc_sync().may_leave(rank):
            time.sleep(0.2)


def train(name: str, steps: int, kills: int) -> None:
    """The program of a trainer, which kills the server now and then."""
    server = elastic.Replicated.find("server", timeout=300)
    x = torch.randn(1000, 16)
    y = x.sum(1)
    killed = 0
    weights = server.rpc_sync().push(name, None)
    for step in range(steps):
        if killed < kills and step > steps * (killed + 1) // (kills + 2):
            killed += kill_one(server)
        chosen = torch.randint(1000, (32,))
        leaf = weights.clone().requires_grad_()
        loss = (x[chosen] @ leaf - y[chosen]).square().mean()
        loss.backward()
        weights = server.rpc_sync().push(name, leaf.grad)
    while killed < kills:
        killed += kill_one(server)
    used = server.rpc_sync().finish(name)
    print(f"{name}: the server has used {used} of {steps} gradients; {killed} kills", flush=True)
    if used != steps or float((weights - 1).abs().max()) > 0.1:
        sys.exit(f"{name}: updates were lost or doubled, or nothing was learned: {weights}")


def kill_one(server: elastic.Replicated) -> bool:
    """Kill the process that answers, if there is another copy."""
    workers = server.workers()
    if len(workers) < 2:
        return False
    process = rpc.rpc_sync(workers[0], os.getpid)
    print(f"kill -9 {process}  # {workers[0]}, which has the server", flush=True)
    os.kill(process, signal.SIGKILL)
    return True


def main() -> None:
    """The program of each process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000, help="of each trainer (%(default)s)")
    parser.add_argument("--kills", type=int, default=5, help="of the server (%(default)s)")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        launch = ["-m", "farcall", "launch", "-n", "5", "--dynamic", "--restart", "100"]
        os.execv(sys.executable, [sys.executable, *launch, __file__, *sys.argv[1:]])
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    name = f"server{rank}" if rank < SERVERS else f"trainer{rank}"
    rpc.init_rpc(name)
    if rank < SERVERS:
        serve(rank)
    else:
        train(name, options.steps, options.kills if rank == SERVERS else 0)
    rpc.shutdown()


if __name__ == "__main__":
    main()
