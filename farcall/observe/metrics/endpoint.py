"""``farcall metrics``: the metrics of all workers of a job at one address, for Prometheus."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from farcall.observe.format.job_files import write_private
from farcall.observe.format.jobs import JobFolder
from farcall.observe.format.orders import give_order
from farcall.observe.metrics.families import families
from farcall.observe.reading.gathered import gather
from farcall.observe.reading.reader import read_job
from farcall.observe.reading.state import JobState
from farcall.observe.worker.counters import COUNT, EXTENSION
from farcall.scraping import published
from rpc.options import AgentOptions
from rpc.rendezvous.token import find_credential

__all__ = ["JobMetrics", "bearer_token", "serve_metrics", "token_file"]

_FRESH_SECONDS: Final = 1.0
"""Maximum age in seconds of a state that is served again."""

_AGAIN_SECONDS: Final = 5.0
"""Minimum time in seconds between two orders to count."""


class JobMetrics(Collector):
    """The metrics of one job: reads its state on request, and makes its workers count."""

    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder
        self._read_at = self._ordered_at = -_AGAIN_SECONDS
        self._found: list[Metric] = []

    def collect(self) -> Iterator[Metric]:
        """Return all current metrics."""
        if time.monotonic() - self._read_at >= _FRESH_SECONDS:
            self._found = families(self.read())
            self._read_at = time.monotonic()
        yield from self._found

    def read(self) -> JobState:
        """Return the state of the job, whose workers are ordered to count if some do not yet."""
        found = read_job(self._folder, gathered=False)
        parts = [each.snapshot.get(EXTENSION) for each in found.living]
        all_count = all(isinstance(each, Mapping) and each.get("on") is True for each in parts)
        if not all_count and time.monotonic() - self._ordered_at >= _AGAIN_SECONDS:
            self._ordered_at = time.monotonic()
            give_order(self._folder.path, COUNT)
        return read_job(self._folder) if gather(self._folder.path, found, count=True) else found


def bearer_token(environ: Mapping[str, str]) -> str:
    """Return the token that readers of a job's metrics must have. It is derived from the job's token, but
    does not reveal it, so it may be in a configuration of Prometheus.
    """
    credential = find_credential(AgentOptions(), environ)
    return hmac.new(credential.token or b"", b"farcall metrics", hashlib.sha256).hexdigest()


def token_file(folder: JobFolder, token: str) -> Path:
    """Write the token to the folder of the job, for ``credentials_file`` of Prometheus."""
    path = folder.path / "metrics.token"
    write_private(path, token.encode())
    return path


def serve_metrics(folder: JobFolder, port: int, said: Callable[[str], object]) -> None:
    """Serve the metrics of a job on loopback until SIGINT or SIGTERM.

    Args:
        folder: folder of the job.
        port: port number; 0 for a free one.
        said: called with a line that has the address.

    Raises:
        InvalidOptionError, RendezvousError: the job's token cannot be used; see ``find_credential``.
        OSError: the port is in use, or the file of the token cannot be written.
    """
    asyncio.run(_serve(folder, port, said))


async def _serve(folder: JobFolder, port: int, said: Callable[[str], object]) -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(JobMetrics(folder))
    token = bearer_token(os.environ)
    wanted = f"Bearer {token}".encode()
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)

    def admits(given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), wanted)

    async with published(registry, "127.0.0.1", port, admits=admits, tls=None) as bound:
        said(
            f"metrics of job {folder.id} at http://127.0.0.1:{bound}/metrics, "
            f"with the token in {token_file(folder, token)}"
        )
        await ended.wait()
