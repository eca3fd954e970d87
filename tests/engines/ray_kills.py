"""1,000 transfers between actors of Ray while actors are killed: each is whole or fails, and nothing stays.

::

    python tests/engines/ray_kills.py --transfers 1000 --kills 20
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import ray
import torch

import farcall.ray

farcall.ray.register_tensor_transport()

SIZES = (10, 200_000, 2_000_000)


class Maker:
    def pid(self) -> int:
        return os.getpid()

    @ray.method(tensor_transport="FARCALL")  # type: ignore[untyped-decorator]
    def make(self, number: int, size: int) -> dict[str, torch.Tensor]:
        return {"a": torch.full((size,), float(number)), "b": torch.tensor([number])}

    def left(self) -> list[int]:
        """Tensors that are still offered, and mapped segments."""
        from farcall.ray import exchange

        offered = sum(len(each._offered) for each in exchange._exchanges.values())
        return [offered, mapped(os.getpid())]


class Taker:
    def pid(self) -> int:
        return os.getpid()

    def take(self, made: dict[str, torch.Tensor]) -> tuple[float, float, int]:
        return float(made["a"].min()), float(made["a"].max()), int(made["b"])


def mapped(pid: int) -> int:
    """Number of segments of farcall's that a process has mapped, the page of each ledger left out."""
    found = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        begin, _, end = line.split()[0].partition("-")
        found += "memfd:farcall" in line and int(end, 16) - int(begin, 16) > 4096
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--transfers", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    chance = random.Random(given.seed)
    kinds: list[Any] = [
        ray.remote(num_cpus=0, enable_tensor_transport=True)(each) for each in (Maker, Maker, Taker, Taker)
    ]
    actors: list[Any] = [kind.remote() for kind in kinds]
    outcomes: Counter[str] = Counter()
    began = time.monotonic()
    every = max(1, given.transfers // max(1, given.kills))
    for number in range(given.transfers):
        if number and number % 100 == 0:
            print(f"{number} transfers after {time.monotonic() - began:.0f} s: {dict(outcomes)}", flush=True)
        maker, taker = chance.choice(actors[:2]), chance.choice(actors[2:])
        struck = number % every == every - 1
        pid = ray.get(chance.choice([maker, taker]).pid.remote()) if struck else 0
        coming = taker.take.remote(maker.make.remote(number, chance.choice(SIZES)))
        if struck:
            os.kill(pid, signal.SIGKILL)
        try:
            assert ray.get(coming, timeout=60) == (number, number, number)
            outcomes["whole"] += 1
        except (ray.exceptions.RayError, ray.exceptions.RayTaskError) as error:
            outcomes[type(error).__name__] += 1
        if struck:
            for place, actor in enumerate(actors):
                try:
                    ray.get(actor.pid.remote(), timeout=60)
                except ray.exceptions.RayActorError:
                    actors[place] = kinds[place].remote()
    del coming
    print("outcomes", dict(outcomes))
    failed = given.transfers - outcomes["whole"]
    assert failed <= given.kills, f"{failed} transfers failed, with {given.kills} kills"
    assert ray.exceptions.GetTimeoutError.__name__ not in outcomes
    for actor in actors[:2]:
        left = [1, 1]
        for _ in range(100):
            left = ray.get(actor.left.remote())
            if not left[0]:
                break
        print("left at a maker: offered", left[0], "mapped segments, kept for further messages", left[1])
        assert left[0] == 0
    print("mapped by the driver", mapped(os.getpid()))


if __name__ == "__main__":
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=200_000_000, logging_level="error")
    main()
