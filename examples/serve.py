#!/usr/bin/env python3
"""A model served to clients that need neither Python objects nor PyTorch. Start it with one command::

    python examples/serve.py

For clients on other machines, use `farcall serve`, which does the same: see `docs/serving.md`.

How it works. A classifier of handwritten digits is trained for a moment and then served over gRPC, marked
(1) below, twice: as it is, and with concurrent calls batched. Many clients ask about one image
each, again and again (2); what they send and get are arrays of NumPy. Where Node is installed, a client in
JavaScript asks about the same images (3), and must get the same answers: `examples/clients/node/call.js`.

It prints latencies: the median and the 99th percentile.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import farcall
from command_line import example_parser, positive
from digits import Images, load_images
from example_run import Miss, ending
from farcall import client as clients
from farcall.serving import Batching, Endpoint, TensorSpec
from live_progress import live_progress, print_figures

ACCURACY = 0.9
NODE = Path(__file__).resolve().parent / "clients" / "node"


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
    """(2) Ask about each image, from many clients at once.

    Returns:
        The digits, of shape (N,); how long each call took; and how long all took, in seconds.
    """
    seconds: list[float] = []
    own = threading.local()

    def ask(image: np.ndarray) -> int:
        if not hasattr(own, "client"):
            own.client = clients.connect(address)
        begun = perf_counter()
        scores = own.client.call(name, image[None], timeout=30)
        seconds.append(perf_counter() - begun)
        return int(scores.argmax())

    with ThreadPoolExecutor(number) as pool:
        begun = perf_counter()
        digits = np.array(list(pool.map(ask, pixels)))
        return digits, seconds, perf_counter() - begun


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
        "in batches": Endpoint(model, inputs=inputs, batching=Batching(max_batch_size=options.clients)),
    }
    pixels = held_out.pixels.numpy()
    repeated = np.concatenate([pixels] * options.rounds)
    figures: dict[str, str] = {}
    with farcall.serve(served) as server:
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
