#!/usr/bin/env python3
"""A server that answers many callers' requests in batches, compared with one that answers one at a time.

Three processes on this machine, started by the command itself::

    python examples/batching.py

How it works. One worker, the server, has a large classifier of handwritten digits. Two others, the callers,
each send it images one by one, many at a time without waiting. A model is much faster on 32 images at
once than on one image 32 times; but each caller asks about only one image. So the server collects requests
from all of them, and answers all waiting requests with one run of the model.

The one idea is `rpc.functions.async_execution`, marked (1) below: a function that answers later. It returns
a future at once and so holds no thread; the caller's own future completes when that one does. The callers
cannot tell the difference, except by the clock.

Both ways are measured with the same requests. They must name the same digits, and batches must be faster.
"""

from __future__ import annotations

import argparse
import queue
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from farcall import rpc
from farcall.examples import (
    LiveProgress,
    Miss,
    example_parser,
    live_progress,
    load_images,
    positive,
    print_figures,
    run_example,
)

SPEED_UP = 1.5
"""How many times as many requests a second count as success; about five on an idle machine."""
ACCURACY = 0.9


class Request(NamedTuple):
    """An image of shape (64,), and the future of the digit that it shows."""

    image: Tensor
    digit: torch.futures.Future[int]


class Classifier:
    """Names the digits on images. Lives on the server; many call it at once."""

    def __init__(self, width: int, max_batch: int) -> None:
        self._model = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )
        self._max_batch = max_batch
        self._waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._batches = 0
        threading.Thread(target=self._answer_in_batches, daemon=True).start()

    def learn(self, steps: int) -> float:
        """Trains the model for a number of steps, and returns its accuracy on held-out images."""
        images, held_out = load_images()
        optimizer = torch.optim.Adam(self._model.parameters(), 0.001)
        for _ in range(steps):
            batch = images[torch.randint(len(images), (64,))]
            optimizer.zero_grad()
            nn.functional.cross_entropy(self._model(batch.pixels), batch.labels).backward()  # type: ignore[no-untyped-call]  # untyped in torch
            optimizer.step()
        right = self._digits(held_out.pixels) == held_out.labels
        return float(right.float().mean())

    def classify(self, image: Tensor) -> int:
        """The digit on one image, by a run of the model for it alone."""
        return int(self._digits(image.unsqueeze(0)))

    @rpc.functions.async_execution
    def classify_in_batch(self, image: Tensor) -> torch.futures.Future[int]:
        """Return the digit on one image, computed together with all other waiting images.

        (1) A function that answers later. What it returns is a future; the caller gets its reply once
        somebody, here the thread below, gives the future a result.
        """
        digit: torch.futures.Future[int] = torch.futures.Future()
        self._waiting.put(Request(image, digit))
        return digit

    def batches(self) -> int:
        """How many batches there were."""
        return self._batches

    def _answer_in_batches(self) -> None:
        """A thread: as soon as the model is free, it gets all that waits. So nobody waits for company."""
        while True:
            batch = [self._waiting.get()]
            while len(batch) < self._max_batch and not self._waiting.empty():
                batch.append(self._waiting.get())
            try:
                digits = self._digits(torch.stack([request.image for request in batch]))
            except Exception as error:  # an image of the wrong shape, for one: no caller waits for ever
                for request in batch:
                    request.digit.set_exception(error)  # type: ignore[arg-type]  # torch declares another type
                continue
            self._batches += 1
            for request, digit in zip(batch, digits.tolist(), strict=True):
                request.digit.set_result(digit)

    def _digits(self, images: Tensor) -> Tensor:
        with torch.inference_mode():
            digits: Tensor = self._model(images).argmax(1)
        return digits


def ask(server: rpc.RRef[Classifier], method: str, first: int, requests: int, in_flight: int) -> list[int]:
    """A caller's part: has images classified one by one, up to ``in_flight`` at a time, and returns the
    digits.
    """
    images = load_images()[1].pixels
    room = threading.Semaphore(in_flight)
    futures = []
    for number in range(first, first + requests):
        room.acquire()
        future = getattr(server.rpc_async(), method)(images[number % len(images)])
        future.add_done_callback(lambda _: room.release())
        futures.append(future)
    return torch.futures.wait_all(futures)


def ask_from_all(
    server: rpc.RRef[Classifier],
    method: str,
    callers: Sequence[str],
    options: argparse.Namespace,
    progress: LiveProgress,
) -> tuple[list[int], float]:
    """Has all callers ask at once, in a few rounds; the digits by caller and round, and requests a second."""
    digits, each = [], options.requests // (options.rounds * len(callers))
    began = time.perf_counter()
    for turn in range(options.rounds):
        calls = [
            rpc.rpc_async(
                caller,
                ask,
                args=(server, method, (turn * len(callers) + index) * each, each, options.in_flight),
            )
            for index, caller in enumerate(callers)
        ]
        for call in calls:
            digits += call.wait()
        rate = len(digits) / (time.perf_counter() - began)
        progress.advance(f"{rate:,.0f} requests/s")
    return digits, rate


def direct(options: argparse.Namespace) -> None:
    """The part of rank 0, which is the server: makes the classifier, has the others call it, compares."""
    classifier = Classifier(options.width, options.max_batch)
    with live_progress("learning", 1, plain=options.plain) as progress:
        accuracy = classifier.learn(options.steps)
        progress.advance(f"accuracy {accuracy:.3f}")
    server = rpc.RRef(classifier)
    callers = [name for name in NAMES if name != "server"]
    for caller in callers:
        rpc.rpc_sync(caller, ask, args=(server, "classify", 0, 1, 1))  # loads what it needs
    with live_progress("one at a time", options.rounds, plain=options.plain) as progress:
        digits, rate = ask_from_all(server, "classify", callers, options, progress)
    with live_progress("in batches", options.rounds, plain=options.plain) as progress:
        batched_digits, batched_rate = ask_from_all(server, "classify_in_batch", callers, options, progress)
    print_figures(
        {
            "accuracy": f"{accuracy:.3f}",
            "one at a time": f"{rate:,.0f} requests/s",
            "in batches": f"{batched_rate:,.0f} requests/s",
            "images per batch": f"{len(batched_digits) / classifier.batches():.1f}",
            "speed-up": f"{batched_rate / rate:.2f}",
        }
    )
    differences = sum(one != other for one, other in zip(digits, batched_digits, strict=True))
    if differences > len(digits) // 200:  # sums in another order may turn the closest of decisions
        raise Miss(f"{differences} of {len(digits)} images are said to show another digit in a batch.")
    if accuracy < ACCURACY:
        raise Miss(f"The accuracy is {accuracy:.3f}; it should be {ACCURACY} at least.")
    if batched_rate < options.target * rate:
        raise Miss(f"The speed-up is {batched_rate / rate:.2f}; it should be {options.target} at least.")


NAMES = ("server", "caller0", "caller1")


def main() -> None:
    """Run one worker if its name is given, otherwise all of them."""
    parser = example_parser(__doc__, needs=["scikit-learn"])
    parser.add_argument("--requests", type=positive, default=6000, help="each way (%(default)s)")
    parser.add_argument("--rounds", type=positive, default=10, help="in which they are sent (%(default)s)")
    parser.add_argument("--in-flight", type=positive, default=64, help="of each caller (%(default)s)")
    parser.add_argument("--max-batch", type=positive, default=64, help="images (%(default)s)")
    parser.add_argument("--width", type=positive, default=2048, help="of the model's layers (%(default)s)")
    parser.add_argument("--steps", type=positive, default=40, help="of training it (%(default)s)")
    parser.add_argument(
        "--target", type=float, default=SPEED_UP, help="speed-up that counts as success (%(default)s)"
    )
    run_example(parser, NAMES, direct)


if __name__ == "__main__":
    main()
