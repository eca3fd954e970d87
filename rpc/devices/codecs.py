"""The codecs for workers with which messages use devices: calls wait for what their request did before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rpc.devices.streams import share
from rpc.serialization.codecs import Args, Function, Kwargs
from rpc.serialization.functions import name_of
from rpc.serialization.payload import Destination, Payload, Tracked
from rpc.serialization.pickle_codec import PickleCodec
from rpc.serialization.placement import of_answers, of_calls

__all__ = ["CpuToDeviceCodec", "SharingCodec"]


class SharingCodec(PickleCodec):
    """The codec for a worker whose device map leaves CPU tensors where they are."""

    def dump_call(
        self, func: Function, args: Args, kwargs: Kwargs, to: Destination, *, tracked: Tracked = None
    ) -> Payload:
        """Serialize a call, which may use the same objects as the request that makes it."""
        share()
        return super().dump_call(func, args, kwargs, to, tracked=tracked)


class CpuToDeviceCodec(SharingCodec):
    """The codec for a worker whose device map covers the CPU: CPU tensors take the slow path."""

    def dump_call(
        self, func: Function, args: Args, kwargs: Kwargs, to: Destination, *, tracked: Tracked = None
    ) -> Payload:
        """Serialize a call."""
        if not of_calls(to).takes_cpu or self._settings.pickler is not None:
            return super().dump_call(func, args, kwargs, to, tracked=tracked)
        share()
        module, name = name_of(func, to) or (None, func)
        return self._dump_record((module, name, args, kwargs, ()), (func, args, kwargs), to, tracked)

    def dumps(
        self,
        value: Any,
        to: Destination | None,
        *,
        what: object = None,
        tracked: Tracked = None,
        as_call: bool = False,
        alone: bool = False,
        whole: bool = False,
    ) -> Payload:
        """Serialize a value."""
        whole = whole or (of_calls(to) if as_call else of_answers(to)).takes_cpu
        return super().dumps(value, to, what=what, tracked=tracked, as_call=as_call, alone=alone, whole=whole)

    def dump_quickly(self, value: Any) -> Payload | None:
        """As for any other worker, except that tensors are not small values."""
        return None if isinstance(value, Tensor) else super().dump_quickly(value)

    def dump_tensors(
        self, tensors: Sequence[Tensor | None], to: Destination, what: str, *, as_call: bool = False
    ) -> Payload:
        """Serialize some tensors."""
        placement = of_calls(to) if as_call else of_answers(to)
        if not placement.takes_cpu:
            return super().dump_tensors(tensors, to, what, as_call=as_call)
        distinct = [None if tensor is None else tensor.detach() for tensor in tensors]
        return self.dumps(distinct, to, what=what, as_call=as_call, alone=True)
