#!/usr/bin/env python3
"""A model served to clients that need neither Python objects nor PyTorch. Start it with one command::

    python examples/serve.py

For clients on other machines, use `farcall serve`, which does the same: see `docs/serving.md`.

How it works. A classifier of handwritten digits is trained for a moment and then served over gRPC, marked
(1) below, twice: as it is, and with concurrent calls batched. Many clients ask about one image
each, again and again (2): `examples/clients/python/ask.py`, a process without PyTorch, which sends and gets
arrays of NumPy. One row and 32 rows take the model about as long, since it has to read all its weights for
either, so batches answer several times as many calls. Where Node is installed, a client in
JavaScript asks about the same images (3), and must get the same answers: `examples/clients/node/call.js`.

It prints latencies: the median and the 99th percentile.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import farcall
from command_line import example_parser, positive
from digits import Images, load_images
from example_run import Miss, ending
from farcall.serving import Batching, Endpoint, Limits, TensorSpec
from live_progress import live_progress, print_figures

ACCURACY = 0.9
PYTHON, NODE = (Path(__file__).resolve().parent / "clients" / each for each in ("python", "node"))


def train(images: Images, width: int, steps: int, plain: bool) -> nn.Module:
    """A classifier: images of shape (N, 64) to scores of shape (N, 10)."""
    model = nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )
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


def ask_all(
    address: str, name: str, pixels: np.ndarray, number: int
) -> tuple[np.ndarray, list[float], float]:
    """(2) Ask about each image, from many clients at once, in a process of their own.

    Returns:
        The digits, of shape (N,); how long each call took; and how long all took, in seconds.
    """
    done = subprocess.run(
        [sys.executable, "ask.py", address, name, str(number)],
        check=False,
        capture_output=True,
        input=pixels.tobytes(),
        cwd=PYTHON,
    )
    if done.returncode:
        raise Miss(f"The clients failed: {done.stderr.decode().strip()}")
    result = json.loads(done.stdout)
    return np.array(result["digits"]), result["seconds"], result["total"]


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
    train_on, held_out = load_images()
    torch.manual_seed(options.seed)
    model = train(train_on, options.width, options.steps, options.plain)
    inputs = {"input": TensorSpec("float32", (-1, 64))}
    served = {  # (1)
        "one by one": Endpoint(model, inputs=inputs),
        "in batches": Endpoint(model, inputs=inputs, batching=Batching(options.clients, max_delay=0.01)),
    }
    limits = Limits(in_flight=1)  # a call uses all cores; calls side by side would take each other's
    pixels = held_out.pixels.numpy()
    repeated = np.concatenate([pixels] * options.rounds)
    figures: dict[str, str] = {}
    with (
        farcall.serve(served, limits=limits) as server,
        live_progress("asking", len(served), plain=options.plain) as progress,
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
    if from_node is None:
        figures["JavaScript"] = "not tried: `npm install` in examples/clients/node"
    elif not (from_node == digits[: len(pixels)]).all():
        raise Miss("The client in JavaScript got other digits.")
    else:
        figures["JavaScript"] = f"the same {len(from_node)} digits"
    print_figures(figures)


def main() -> None:
    """The command."""
    parser = example_parser(__doc__)
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
