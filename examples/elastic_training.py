#!/usr/bin/env python3
"""Data-parallel training that goes on when any of its processes is killed. Alone, it starts itself by the
launcher::

    farcall launch -n 3 --dynamic --restart 100 examples/elastic_training.py

and kill processes by `kill -9` while it runs (`ps` shows them); the launcher starts others in their place.

How it works. There is no server: all processes are equal, and train one classifier of handwritten digits
together. A step that a death interrupts is repeated by the others, with the same samples, so no step is lost
and no sample is used twice. A process that is started anew gets weights and optimizer from the others in its
first step.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
from torch import nn

from farcall import elastic, rpc
from farcall.examples import load_images

TARGET = 0.93


def main() -> None:
    """The program of each process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000, help="in all (%(default)s)")
    parser.add_argument("--batch", type=int, default=48, help="images per step (%(default)s)")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        launch = ["-m", "farcall", "launch", "-n", "3", "--dynamic", "--restart", "100"]
        os.execv(sys.executable, [sys.executable, *launch, __file__, *sys.argv[1:]])
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"trainer{rank}")
    print(f"trainer{rank} is process {os.getpid()}", flush=True)
    images, held_out = load_images()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.8)
    sampler = elastic.Sampler(len(images), options.batch, seed=0)
    try:
        job = elastic.join(model=model, optimizer=optimizer, sampler=sampler)
    except elastic.Finished as finished:  # it was started again when the others were about to end
        print(f"trainer{rank}: {finished}")
        rpc.shutdown()
        return
    job.on_view(
        lambda job: print(f"trainer{rank}: from step {job.step} on with {', '.join(job.members)}", flush=True)
    )
    for attempt in job.attempts(until=options.steps):
        with attempt:
            chosen = images[attempt.indices]
            loss = nn.functional.cross_entropy(model(chosen.pixels), chosen.labels, reduction="sum")
            (loss / attempt.batch_size).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    with torch.no_grad():
        accuracy = (model(held_out.pixels).argmax(1) == held_out.labels).float().mean().item()
    job.leave()
    rpc.shutdown()
    print(f"trainer{rank}: {job.step} steps, accuracy {accuracy:.3f} on {len(held_out)} images held out")
    if accuracy < TARGET:
        raise SystemExit(f"The accuracy is {accuracy:.3f}; it should be {TARGET} at least.")


if __name__ == "__main__":
    main()
