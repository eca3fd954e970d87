"""SPMD mode with copies, whose workers are killed at random moments; its losses are those of a run without.

::

    python -m tests.soak.spmd_copies --kills 50
    python -m tests.soak.spmd_copies --overhead          # time of a step with copies, by times without

A worker is killed some random time after the last one was replaced. Then the run without kills begins, and
the losses are compared, to the bit.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import multiprocessing
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

import spmd
from spmd.engine.driver import start
from spmd.sharding.mode import use_spmd

_WIDTH = 256


class _Training:
    """A model with sharded weights, and dropout."""

    def __init__(self, width: int = _WIDTH) -> None:
        torch.manual_seed(0)
        self._device, count = spmd.device(), spmd.global_device_count()
        mesh = spmd.Mesh(np.arange(count), (count,), ("x",))
        layers = (nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width))
        self._model = nn.Sequential(*layers).to(self._device)
        for parameter in self._model.parameters():
            if parameter.dim() == 2:
                spmd.mark_sharding(parameter, mesh, ("x", None))
        self._optimizer = torch.optim.Adam(self._model.parameters(), 1e-3)
        self._width, self._step = width, 0

    def step(self) -> float:
        generator = torch.Generator().manual_seed(self._step)
        x = torch.randn(64, self._width, generator=generator).to(self._device)
        self._optimizer.zero_grad()
        loss = (self._model(x) - x).square().mean()
        loss.backward()
        self._optimizer.step()
        self._step += 1
        return float(loss.item())


def _kill(kills: int, chance: random.Random, over: threading.Event) -> None:
    session = start._current().session
    copies = session.copies
    assert copies is not None
    for number in range(kills):
        time.sleep(chance.expovariate(10.0))
        place = chance.randrange(len(copies.ports))
        name = copies.ports[place].name
        next(each for each in multiprocessing.active_children() if each.name == name).kill()
        while session.counts["losses"] <= number and not over.is_set():
            time.sleep(0.01)
    over.set()


def _run(workers: int, kills: int, every: int, seed: int, steps: int) -> list[float]:
    use_spmd(workers, copies=1 if kills else 0, every=every)
    training, over = _Training(), threading.Event()
    killer = threading.Thread(target=_kill, args=(kills, random.Random(seed), over), daemon=True)
    if kills:
        killer.start()
    losses: list[float] = []
    while len(losses) < steps or (kills and not over.is_set()):
        losses.append(training.step())
    counts = start._current().session.counts
    if kills:
        repeated = counts["repeated"] / counts["losses"]
        print(f"{len(losses)} steps, {counts['losses']} losses, {repeated:.1f} programs repeated a loss")
    spmd.shutdown()
    return losses


def _overhead(workers: int, every: int, width: int, rounds: int) -> None:
    times: dict[int, list[float]] = {0: [], 1: []}
    for number in range(rounds):
        for copies in (0, 1) if number % 2 else (1, 0):
            use_spmd(workers, copies=copies, every=every)
            training = _Training(width)
            for _ in range(4 * every):  # the first saves get their memory from the system
                training.step()
            began = time.perf_counter()
            for _ in range(4 * every):
                training.step()
            times[copies].append((time.perf_counter() - began) / (4 * every))
            spmd.shutdown()
    without, with_copies = (1e3 * statistics.median(times[copies]) for copies in (0, 1))
    print(f"a step of {width} x {width}: {without:.2f} ms, with copies every {every} {with_copies:.2f} ms")
    print(f"{with_copies / without:.3f} x")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser("python -m tests.soak.spmd_copies", description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overhead", action="store_true", help="measure steps, and kill nothing")
    parser.add_argument("--width", type=int, default=1024, help="of the model that is measured")
    parser.add_argument("--rounds", type=int, default=3, help="of the measurement")
    given = parser.parse_args(arguments)
    if given.overhead:
        _overhead(given.workers, given.every, given.width, given.rounds)
        return 0
    found = _run(given.workers, given.kills, given.every, given.seed, 3 * given.every)
    wrong = found != _run(given.workers, 0, given.every, given.seed, len(found))
    print("WRONG" if wrong else "the losses are those of the run without kills")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
