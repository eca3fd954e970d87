"""Shardings that ``use_spmd(auto=True)`` chooses, beside data parallel and FSDPv2, of a small decoder.

::

    python -m benchmarks.spmd_auto                        # 2 workers
    python -m benchmarks.spmd_auto --workers 4 --layers 4 --width 256

For each way: milliseconds of a step, megabytes that a worker sends in it, and megabytes of parameters and of
the optimizer's state that it holds; and each of these by data parallel's. Ways take turns, each time with new
workers, and of a way's turns the one with the fastest median of steps counts. Losses must be the same.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from dataclasses import dataclass
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import rpc
import spmd
from benchmarks import spmd_counting as counting
from benchmarks.spmd_cases import Decoder, Layer, Sizes
from spmd.engine.auto.cost import local_bytes
from spmd.engine.driver.logical_tensor import alias_of
from spmd.engine.driver.start import worker_names
from spmd.fsdp import FSDPv2
from spmd.fsdp.wrap import transformer_auto_wrap_policy

__all__ = ["main"]

WAYS: Final = ("data parallel", "FSDPv2", "chosen")
_WARM: Final = 4


@dataclass(frozen=True, slots=True)
class _Found:
    seconds: float
    sent: float
    held: float
    losses: tuple[float, ...]


def _turn(way: str, workers: int, steps: int, sizes: Sizes) -> _Found:
    spmd.use_spmd(workers=workers, auto=way == "chosen")
    try:
        torch.manual_seed(0)
        model: Any = Decoder(sizes)
        mesh = spmd.get_1d_mesh("fsdp")
        if way == "FSDPv2":
            policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Layer})
            model = FSDPv2(model, mesh=mesh, auto_wrap_policy=policy)
        model = model.to(spmd.device())
        optimizer = torch.optim.AdamW(model.parameters())
        words = torch.randint(sizes.vocabulary, (_WARM + steps + 1, sizes.batch, sizes.length + 1))

        def step(number: int) -> Tensor:
            given = words[number].to(spmd.device())
            if way != "chosen":
                spmd.mark_sharding(given, mesh, ("fsdp", None))
            said = model(given[:, :-1])
            loss = nn.functional.cross_entropy(said.flatten(0, 1), given[:, 1:].flatten())
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            spmd.sync()
            return loss.detach()

        losses, seconds = [step(number) for number in range(_WARM)], []
        for number in range(_WARM, _WARM + steps):
            begin = time.perf_counter()
            losses.append(step(number))
            seconds.append(time.perf_counter() - begin)
        _on_workers(counting.count_sent)
        _on_workers(counting.sent)
        step(_WARM + steps)
        sent = max(_on_workers(counting.sent))
        state = [each for kept in optimizer.state.values() for each in kept.values() if each.dim()]
        held = sum(local_bytes(alias_of(each).spec.meta) for each in (*model.parameters(), *state))
        return _Found(statistics.median(seconds), sent, held, tuple(each.item() for each in losses))
    finally:
        spmd.shutdown()


def _on_workers(function: Any) -> list[float]:
    return [rpc.rpc_sync(name, function) for name in worker_names()]


def main(argv: list[str] | None = None) -> int:
    """Measure and print; returns the exit status, 1 if losses differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spmd_auto", description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each way; default 3")
    parser.add_argument("--steps", type=int, default=10, help="that are measured in a turn; default 10")
    sizes = {"layers": 2, "width": 128, "batch": 16, "length": 32, "vocabulary": 512}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size, help=f"default {size}")
    arguments = parser.parse_args(argv)
    chosen = Sizes(**{name: getattr(arguments, name) for name in sizes})
    found: dict[str, list[_Found]] = {way: [] for way in WAYS}
    for _ in range(arguments.rounds):
        for way in WAYS:
            found[way].append(_turn(way, arguments.workers, arguments.steps, chosen))
    base = _figures(found[WAYS[0]])
    console = Console(highlight=False)
    table = Table("(by data parallel's)", "ms a step", "sent, MB", "held, MB")
    for way in WAYS:
        cells = [
            f"{each:.3f} ({each / other:.2f})" if other else f"{each:.3f}"
            for each, other in zip(_figures(found[way]), base, strict=True)
        ]
        table.add_row(way, *cells)
    console.print(table)
    apart = max(
        abs(one - other)
        for turns in found.values()
        for turn in turns
        for one, other in zip(turn.losses, found[WAYS[0]][0].losses, strict=True)
    )
    console.print(f"losses differ by {apart:.1e} at most")
    return int(apart > 1e-4)


def _figures(turns: list[_Found]) -> tuple[float, float, float]:
    return min(turn.seconds for turn in turns) * 1e3, turns[0].sent / 1e6, turns[0].held / 1e6


if __name__ == "__main__":
    raise SystemExit(main())
