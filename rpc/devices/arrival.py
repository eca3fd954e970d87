"""Futures whose values are on devices: which streams they are read on, and what waits for these."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rpc.devices.streams import Attempt, Ready, Shared, Streams
from rpc.devices.tensor_search import search

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
                self._made(attempt.streams.arrived or ())
                return value

            complete(decode_there)

    def call_back(self, callback: Callable[[], object]) -> None:
        """Run a callback on streams that wait for the value as soon as it is asked for."""
        if self._ready is None:
            callback()
            return
        with Attempt(self._streams):  # without them, it waits on the current streams
            callback()

    def following(self) -> DeviceArrival:
        """Return the arrival of what is computed from the value."""
        return DeviceArrival(self._devices, self._updates)

    def go_on(self, compute: Callable[[], Any], following: DeviceArrival) -> Any:
        """Return what ``compute`` makes of the value, on such streams; its tensors are those of the next."""
        with contextlib.nullcontext() if self._ready is None else self._streams():
            value = compute()
            found = search(value)
            following._made(found.tensors, found.may_have_more)
        return value

    def _streams(self) -> Streams:
        return Streams(self._devices, self._updates)

    def _made(self, tensors: Sequence[Tensor], may_have_more: bool = False) -> None:
        """Note the work on the current streams, which has made tensors or may have changed parameters."""
        if tensors or may_have_more or self._updates.renewals:
            self._ready = Ready(tensors, self._devices)
