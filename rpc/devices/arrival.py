"""Futures whose values are on devices: which streams they are read on, and what waits for these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rpc.devices.streams import Attempt, Ready, Shared, Streams

__all__ = ["DeviceArrival"]


class DeviceArrival:
    """See ``Arrival``. A call's value is read on streams of its own; arguments are as for ``Streams``."""

    __slots__ = ("_devices", "_ready", "_updates")

    def __init__(self, devices: Sequence[torch.device], updates: Shared) -> None:
        self._devices = devices
        self._updates = updates
        self._ready: Ready | None = None

    def join(self) -> None:
        """Make the current streams wait for the value's tensors."""
        if self._ready is not None:
            self._ready.join()

    def complete(self, complete: Callable[[Callable[[], Any]], None], decode: Callable[[], Any]) -> None:
        """Read the value, and run the future's callbacks, on separate streams."""
        with Attempt(lambda: Streams(self._devices, self._updates, reads=True)) as attempt:

            def decode_there() -> Any:
                if attempt.error is not None:
                    raise attempt.error
                value = decode()
                self._ready = attempt.streams.ready()
                return value

            complete(decode_there)

    def call_back(self, callback: Callable[[], object]) -> None:
        """Run a callback on streams that wait for the value as soon as it is asked for."""
        if self._ready is None:
            callback()
            return
        with Attempt(self._ready.streams):  # without them, it waits on the current streams
            callback()

    def following(self) -> DeviceArrival:
        """Return the arrival of what is computed from the value."""
        return DeviceArrival(self._devices, self._updates)

    def go_on(self, compute: Callable[[], Any], following: DeviceArrival) -> Any:
        """Return what ``compute`` makes of the value, on such streams; its tensors are those of the next."""
        if self._ready is None:
            value = compute()
            following._ready = Ready.with_tensors_in(value, self._devices, self._updates)
            return value
        with self._ready.streams() as streams:
            value = compute()
            following._ready = streams.ready_with(value)
        return value
