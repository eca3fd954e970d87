#!/usr/bin/env python3
"""A model served to clients that need neither Python objects nor PyTorch. Start it with one command::

    python examples/serve.py

For clients on other machines, use `farcall serve`, which does the same: see `docs/serving.md`.

How it works. A classifier of handwritten digits is trained for a moment and then served over gRPC, marked
(1) below, twice: as it is, and with concurrent calls batched. Many clients ask about one image
each, again and again (2), in a process without PyTorch, which sends and gets arrays of NumPy. One row and
32 rows take the model about as long, since it has to read all its weights for either, so batches answer
several times as many calls. Where Node is installed, a client in JavaScript asks about the same images (3),
and must get the same answers: `examples/clients/node/call.js`.
At last a better version of the model takes the place of the first while clients ask (4); no call fails.

It prints latencies: the median and the 99th percentile.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import statistics
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import farcall
from farcall.examples import (
    Images,
    Miss,
    ending,
    example_parser,
    live_progress,
    load_images,
    positive,
    print_figures,
    print_line,
)
from farcall.serving import Batching, Endpoint, Limits, TensorSpec

ACCURACY = 0.9
NODE = Path(__file__).resolve().parent / "clients" / "node"
CLIENTS = """
import asyncio, json, sys
from time import perf_counter

import numpy as np
from farcall import client as clients


async def ask_all(address, name, images, number):
    digits, seconds = [0] * len(images), [0.0] * len(images)
    left = iter(range(len(images)))

    async def ask():
        async with clients.connect_async(address) as client:
            for index in left:  # shared: the next client takes the next image
                begun = perf_counter()
                scores = await client.call(name, images[index : index + 1], timeout=60)
                seconds[index] = perf_counter() - begun
                digits[index] = int(scores.argmax())

    begun = perf_counter()
    await asyncio.gather(*(ask() for _ in range(number)))
    return {"digits": digits, "seconds": seconds, "total": perf_counter() - begun}


address, name, number = sys.argv[1:]
images = np.frombuffer(sys.stdin.buffer.read(), np.float32).reshape(-1, 64)
print(json.dumps(asyncio.run(ask_all(address, name, images, int(number)))))
"""
"""(2) A program without PyTorch: many clients, each of which asks about one image after the other."""


def classifier(width: int) -> nn.Module:
    """Not trained yet."""
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def train(images: Images, width: int, steps: int, plain: bool, before: nn.Module | None = None) -> nn.Module:
    """A classifier, images of shape (N, 64) to scores of shape (N, 10): a new one, or one better than that
    before.
    """
    model = copy.deepcopy(before) if before is not None else classifier(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with live_progress("training", steps, plain=plain) as progress:
        for _ in range(steps):
            picked = images[torch.randint(len(images), (64,))]
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(picked.pixels), picked.labels)
            torch.autograd.backward(loss)
            optimizer.step()
            progress.advance(f"loss {loss.item():.2f}")
    return model.eval()


class Versions(nn.Module):
    """(4) Serves the newest version of a model. Each call is answered by one of them.

    Attributes:
        answered: number of rows that each version has answered.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.answered = [0]
        self._changed = threading.Condition()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name that clients use
        """Scores of shape (N, 10) for images of shape (N, 64)."""
        with self._changed:
            model, version = self.model, len(self.answered) - 1
        scores: Tensor = model(input)
        with self._changed:
            self.answered[version] += len(input)
            self._changed.notify_all()
        return scores

    def replace(self, model: nn.Module) -> None:
        """Answer calls that begin from now on by another model; those in progress continue with theirs."""
        with self._changed:
            self.model = model
            self.answered.append(0)

    def await_answers(self, rows: int) -> None:
        """Wait until the newest version has answered this many rows."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.answered[-1] >= rows, timeout=60):
                raise Miss(f"Only {self.answered[-1]} of {rows} images were asked about within a minute.")


def ask_all(
    address: str, name: str, pixels: np.ndarray, number: int
) -> tuple[np.ndarray, list[float], float]:
    """(2) Ask about each image, from many clients at once, in a process of their own.

    Returns:
        The digits, of shape (N,); how long each call took; and how long all took, in seconds.
    """
    done = subprocess.run(
        [sys.executable, "-c", CLIENTS, address, name, str(number)],
        check=False,
        capture_output=True,
        input=pixels.tobytes(),
    )
    if done.returncode:
        raise Miss(f"The clients failed: {done.stderr.decode().strip()}")
    result = json.loads(done.stdout)
    return np.array(result["digits"]), result["seconds"], result["total"]


def swapped(address: str, versions: Versions, better: nn.Module, pixels: np.ndarray, clients: int) -> str:
    """(4) Replace the model while clients ask, and say how many images each version has answered."""
    versions.answered[-1] = 0
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask_all, address, "in batches", pixels, clients)
        versions.await_answers(len(pixels) // 2)
        versions.replace(better)
        asked.result()
    old, new = versions.answered
    if old + new != len(pixels) or not new:
        raise Miss(f"Of {len(pixels)} images the first version answered {old}, and the second {new}.")
    return f"{old:,} images answered by the first version, then {new:,} by the second; no call failed"


def ask_from_node(address: str, name: str, pixels: np.ndarray) -> np.ndarray | None:
    """(3) The digits as a client in JavaScript gets them; None without Node."""
    if shutil.which("node") is None or not (NODE / "node_modules").is_dir():
        return None
    shape = json.dumps(list(pixels.shape))
    done = subprocess.run(
        ["node", "call.js", address, name, shape],
        check=False,
        capture_output=True,
        input=pixels.tobytes(),
        cwd=NODE,
        timeout=60,
    )
    if done.returncode:
        raise Miss(f"The client in JavaScript failed: {done.stderr.decode().strip()}")
    result = json.loads(done.stdout)
    scores: np.ndarray = np.array(result["numbers"]).reshape(result["shape"])
    digits: np.ndarray = scores.argmax(1)
    return digits


def direct(options: argparse.Namespace) -> None:
    """Trains, serves, asks, and says what came."""
    print_line("Training a classifier of handwritten digits.")
    train_on, held_out = load_images()
    torch.manual_seed(options.seed)
    model = train(train_on, options.width, options.steps, options.plain)
    better = train(train_on, options.width, options.steps // 4, options.plain, model)
    versions = Versions(model)
    inputs = {"input": TensorSpec("float32", (-1, 64))}
    served = {  # (1)
        "one by one": Endpoint(model, inputs=inputs),
        "in batches": Endpoint(versions, inputs=inputs, batching=Batching(options.clients, max_delay=0.01)),
    }
    limits = Limits(in_flight=1)  # a call uses all cores; calls side by side would take each other's
    pixels = held_out.pixels.numpy()
    repeated = np.concatenate([pixels] * options.rounds)
    figures: dict[str, str] = {}
    with (
        farcall.serve(served, limits=limits) as server,
        live_progress("asking", len(served) + 1, plain=options.plain) as progress,
    ):
        address = f"localhost:{server.port}"
        for name in served:
            digits, seconds, total = ask_all(address, name, repeated, options.clients)
            accuracy = float((digits == np.tile(held_out.labels.numpy(), options.rounds)).mean())
            if accuracy < ACCURACY:
                raise Miss(f"The accuracy is {accuracy:.3f}; it should be {ACCURACY} at least.")
            percentiles = statistics.quantiles(seconds, n=100)
            figures[name] = (
                f"{len(digits) / total:,.0f} calls a second; half within {percentiles[49] * 1e3:.1f} ms, "
                f"99 of 100 within {percentiles[98] * 1e3:.1f} ms"
            )
            progress.advance(name)
        figures["accuracy"] = f"{accuracy:.3f} of {len(pixels)} images held out"
        from_node = ask_from_node(address, "in batches", pixels)
        figures["new version"] = swapped(address, versions, better, repeated, options.clients)
        progress.advance("new version")
    if from_node is None:
        figures["JavaScript"] = "not tried: `npm install` in examples/clients/node"
    elif not (from_node == digits[: len(pixels)]).all():
        raise Miss("The client in JavaScript got other digits.")
    else:
        figures["JavaScript"] = f"the same {len(from_node)} digits"
    print_figures(figures)


def main() -> None:
    """The command."""
    parser = example_parser(__doc__, needs=["scikit-learn"])
    parser.add_argument("--clients", type=positive, default=32, help="that ask at once (%(default)s)")
    parser.add_argument("--rounds", type=positive, default=8, help="how often each image is asked about")
    parser.add_argument("--width", type=positive, default=2048, help="of the model's layers (%(default)s)")
    parser.add_argument("--steps", type=positive, default=60, help="of training (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="for everything random (%(default)s)")
    parser.add_argument("--plain", action="store_true", help="lines of text instead of progress bars")
    options = parser.parse_args()
    with ending():
        direct(options)


if __name__ == "__main__":
    main()
