"""Runs calls by name, for both of the server's protocols. It does not depend on gRPC messages."""

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
        endpoints: the endpoints, by name.
        limits: limits for all of them together.
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
                partial(each.run, seconds=None, slots=self.slots),
                partial(self.metrics.batch, name),
                self.slots.when_free,
            )
            for name, each in self.endpoints.items()
            if each.batching is not None
        }

    def find(self, name: str, *, streams: bool | None = None) -> Endpoint:
        """Return the endpoint with a name.

        Raises:
            Unknown: there is none.
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
        """Return the result of one call.

        Args:
            name: name of the endpoint.
            args: positional arguments.
            kwargs: keyword arguments.
            caller: caller for which limits count it.
            seconds: the caller's timeout in seconds; None for no limit.

        Raises:
            Unknown: there is no endpoint with that name.
            BadArguments: it does not accept these arguments.
            Refused: there are too many calls.
            TimeoutError: it took longer.
            Exception: the error that it raised.
        """
        with self.admission.admit(caller):
            endpoint = self.find(name, streams=False)
            endpoint.bind(args, kwargs)
            if name in self._batchers:
                result = self._batchers[name].call(args, kwargs)
            else:
                result = endpoint.run(args, kwargs, seconds=seconds, slots=self.slots)
            if seconds is None:
                return await result
            async with asyncio.timeout(seconds):
                return await result

    async def stream(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, caller: str, seconds: float | None
    ) -> AsyncIterator[Any]:
        """Yield the results of one call of a generator as they arrive; arguments and errors as for
        ``call``.
        """
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
