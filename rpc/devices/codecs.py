"""The codecs for workers with which messages use devices: calls wait for what their request did before."""

from __future__ import annotations

from rpc.devices.streams import share
from rpc.serialization.codecs import Args, Function, Kwargs
from rpc.serialization.payload import Destination, Payload, Tracked
from rpc.serialization.pickle_codec import DevicePickleCodec, PickleCodec

__all__ = ["CpuToDeviceCodec", "SharingCodec"]


class SharingCodec(PickleCodec):
    """The codec for a worker whose device map leaves CPU tensors where they are."""

    def dump_call(
        self, func: Function, args: Args, kwargs: Kwargs, to: Destination, *, tracked: Tracked = None
    ) -> Payload:
        """Serialize a call, which may use the same objects as the request that makes it."""
        share()
        return super().dump_call(func, args, kwargs, to, tracked=tracked)


class CpuToDeviceCodec(SharingCodec, DevicePickleCodec):
    """The codec for a worker whose device map covers the CPU."""
