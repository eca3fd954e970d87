"""Runs calls by name: what both of the server's protocols stand on. It knows no gRPC messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

from farcall.serving.admission import Admission, Limits
from farcall.serving.batching import Batcher
from farcall.serving.endpoint import Endpoint
from farcall.serving.errors import BadArguments, Unknown
from farcall.serving.metrics import Metrics
from farcall.serving.slots import Slots

__all__ = ["Host"]


class Host:
    """Endpoints by name, under the limits of a server.

    Args:
        endpoints: what is served, by name.
        limits: of all of them together.
    """

    def __init__(self, endpoints: Mapping[str, Endpoint], limits: Limits) -> None:
        self.endpoints = dict(endpoints)
        self.request_bytes = limits.message_bytes
        self.admission = Admission(limits)
        self.metrics = Metrics(lambda: self.admission.admitted)
        self.slots = Slots(limits.in_flight)
        self._batchers = {
            name: Batcher(
                each.batching,
                partial(self._run, each, seconds=None),
                partial(self.metrics.batch, name),
                self.slots.when_free,
            )
            for name, each in self.endpoints.items()
            if each.batching is not None
        }

    def find(self, name: str, *, streams: bool | None = None) -> Endpoint:
        """What is served under a name.

        Raises:
            Unknown: nothing is.
            BadArguments: it is called in the other way.
        """
        endpoint = self.endpoints.get(name)
        if endpoint is None:
            raise Unknown(f"nothing is served as {name!r}; there are {', '.join(sorted(self.endpoints))}")
        if streams is not None and streams != endpoint.streams:
            way = (
                "is a generator, whose results come one by one: use client.stream()"
                if endpoint.streams
                else "is no generator, and has one result: use client.call()"
            )
            method = "StreamCall" if endpoint.streams else "Call"
            raise BadArguments(f"{name!r} {way}, in other languages the method {method}")
        return endpoint

    async def call(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, caller: str, seconds: float | None
    ) -> Any:
        """The result of one call.

        Args:
            name: of what is called.
            args: by position.
            kwargs: by name.
            caller: whom limits count it for.
            seconds: that the caller waits; None: for ever.

        Raises:
            Unknown: nothing is served under that name.
            BadArguments: it does not take these.
            Refused: there are too many calls.
            TimeoutError: it took longer.
            Exception: what it raised.
        """
        with self.admission.admit(caller):
            endpoint = self.find(name, streams=False)
            endpoint.bind(args, kwargs)
            if name in self._batchers:
                result = self._batchers[name].call(args, kwargs)
            else:
                result = self._run(endpoint, args, kwargs, seconds=seconds)
            if seconds is None:
                return await result
            async with asyncio.timeout(seconds):
                return await result

    async def stream(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, caller: str, seconds: float | None
    ) -> AsyncIterator[Any]:
        """The results of one call of a generator, as they come; arguments and errors as with ``call``."""
        with self.admission.admit(caller):
            endpoint = self.find(name, streams=True)
            endpoint.bind(args, kwargs)
            async with asyncio.timeout(seconds):
                results = endpoint.stream(args, kwargs, self.slots)
                try:
                    async for each in results:
                        yield each
                finally:
                    await results.aclose()  # type: ignore[attr-defined]

    async def _run(
        self, endpoint: Endpoint, args: Sequence[Any], kwargs: Mapping[str, Any], *, seconds: float | None
    ) -> Any:
        return await endpoint.run(args, kwargs, seconds, self.slots)
