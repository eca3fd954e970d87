"""Many clients in one process, without PyTorch: each asks about one image after the other.

::

    python ask.py localhost:8443 classify 32 < pixels.f32

Standard input has the images, 64 float32 each. It prints the digits and the seconds of each call as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from time import perf_counter

import numpy as np

from farcall import client as clients


async def ask_all(address: str, name: str, images: np.ndarray, number: int) -> dict[str, object]:
    """The digits and the seconds of each call, in the order of the images, and the seconds of all."""
    digits, seconds = [0] * len(images), [0.0] * len(images)
    left: Iterator[int] = iter(range(len(images)))

    async def ask() -> None:
        async with clients.connect_async(address) as client:
            for index in left:  # shared: the next client takes the next image
                begun = perf_counter()
                scores = await client.call(name, images[index : index + 1], timeout=60)
                seconds[index] = perf_counter() - begun
                digits[index] = int(scores.argmax())

    begun = perf_counter()
    await asyncio.gather(*(ask() for _ in range(number)))
    return {"digits": digits, "seconds": seconds, "total": perf_counter() - begun}


if __name__ == "__main__":
    address, name, number = sys.argv[1:]
    images = np.frombuffer(sys.stdin.buffer.read(), np.float32).reshape(-1, 64)
    print(json.dumps(asyncio.run(ask_all(address, name, images, int(number)))))
