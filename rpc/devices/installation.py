"""What an agent does with devices; made when the first worker with a device map is met."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from rpc.agent.device_ports import Attempt
from rpc.agent.received_requests import Request
from rpc.device_maps import DeviceMap
from rpc.devices.codecs import CpuToDeviceCodec, SharingCodec
from rpc.devices.ipc import TOPIC, Exchange, Export, handles_of, refusing
from rpc.devices.placements import Between, Placed
from rpc.devices.staging import HostStaging
from rpc.devices.streams import Ready, Shared, Streams, use_on_current_stream
from rpc.group.control import Control
from rpc.group.peer import Peer
from rpc.options import AgentOptions
from rpc.runtime.executor import Executor
from rpc.serialization.codecs import PICKLE
from rpc.serialization.serializer import Serializer

__all__ = ["Devices"]


class Devices:
    """The devices of one agent. ``met`` is called on the loop's thread, everything else on any.

    Args:
        options, executor, serializer, control: of an agent that makes no calls yet.
        own_name: this worker's name.

    Attributes:
        local: the devices of this worker that messages use; one list, which gets more as workers are met.
        updates: the work that changes parameters in place, for which each message waits.
    """

    def __init__(
        self,
        options: AgentOptions,
        executor: Executor,
        serializer: Serializer,
        control: Control,
        own_name: str,
    ) -> None:
        self._executor = executor
        self._serializer = serializer
        self._own_name = own_name
        self.local: list[torch.device] = []
        self._maps: dict[str, DeviceMap] = options.device_maps
        self._use(options.devices)
        for device_map in self._maps.values():
            self._use(device_map)
        self.updates = Shared(self.local)
        self._met: dict[str, Peer] = {}
        self._takes_cpu = False
        # Drivers check little of a handle, so a worker in safe mode opens none that a member names.
        why = "it is in safe mode" if serializer.allow is not None else ""
        why = why or ("" if options.shared_memory_bytes else "shared_memory_bytes=0")
        exchange = None if why else _exchange(control, executor)
        self._exchange = exchange
        if exchange is None:
            why = why or "it cannot"
            control.on(TOPIC, refusing(control.post, why))
        else:
            control.on(TOPIC, exchange.received)
            serializer.register_carrier(Export, exchange)

    def gone(self, peer: Peer, reason: str) -> None:
        """A worker is gone for good."""
        if self._met.get(peer.name) is peer:  # not one that has taken its name
            del self._met[peer.name]
        if self._exchange is not None:
            self._exchange.gone(peer, reason)

    def closed(self) -> None:
        """This worker has left."""
        if self._exchange is not None:
            self._exchange.close()

    def _use(self, devices: Iterable[torch.device]) -> None:
        accelerator = torch.accelerator.current_accelerator()
        count = torch.accelerator.device_count()
        known = {*self.local}
        for device in devices:
            if accelerator is not None and device.type == accelerator.type and device.index < count:
                known.add(device)
        self.local[:] = sorted(known, key=lambda device: device.index)

    def met(self, peer: Peer) -> None:
        """Agree on devices with a worker, and with this one itself."""
        name, me = peer.name, self._own_name
        self._met[name] = peer
        calls = self._maps.get(name, {})
        theirs = peer.member.maps_for(me)
        self._use(theirs.values())
        if peer.is_self:
            calls = theirs = calls or {device: device for device in self.local}
        answers = {target: source for source, target in theirs.items()}

        def free(device: torch.device, used: Collection[torch.device]) -> torch.device:
            """A device of the other worker's to map ``device`` to, or from."""
            kind, count, _ = peer.member.devices or (device.type, 0, ())
            others = (torch.device(kind, index) for index in range(count))
            return next((each for each in (device, *others) if each not in used), device)

        def for_calls(device: torch.device) -> str:
            return (
                f"Request device mapping is not available for destination '{name}': call `set_device_map` "
                f"on `TensorPipeRpcBackendOptions`: options.set_device_map('{name}', "
                f"{{'{device}': '{free(device, calls.values())}'}}), or pass it as device_maps"
            )

        def for_answers(device: torch.device) -> str:
            return (
                f"Response device mapping is not available for destination '{name}': answers go by the "
                f"reverse of its device map, so have '{name}' call `set_device_map` "
                f"on `TensorPipeRpcBackendOptions`: options.set_device_map('{me}', "
                f"{{'{free(device, theirs)}': '{device}'}}), or pass it as device_maps"
            )

        exchange = self._exchange

        def reads(elements: Tensor) -> bool:
            return exchange is not None and exchange.reads(peer, elements)

        if exchange is not None and peer.near and not peer.is_self and (calls or theirs):
            exchange.offer(peer, self.local)
        between = Between(
            Placed(name, calls, for_calls, self._staging, reads),
            Placed(name, answers, for_answers, self._staging, reads),
            self._streams_of_message,
            self._ready_with,
            self.updates,
        )
        codec = peer.codec
        self._takes_cpu = self._takes_cpu or between.calls.takes_cpu or between.answers.takes_cpu
        if codec.id == PICKLE:
            codec = self._serializer.pickles_as(CpuToDeviceCodec if self._takes_cpu else SharingCodec)
        peer.agree_on_devices(between, codec)

    def _staging(self, *, alone: bool = False) -> HostStaging:
        return HostStaging(self._executor, alone=alone)

    def reads(self, worker: str, tensor: Tensor) -> bool:
        """Whether a worker reads a contiguous tensor in this worker's memory."""
        peer = self._met.get(worker)
        return self._exchange is not None and peer is not None and self._exchange.reads(peer, tensor)

    def streams(self) -> Streams:
        """Streams of their own on all devices that messages use."""
        return Streams(self.local, self.updates)

    def current_streams(self) -> Streams:
        """The current streams of this thread on these devices, for another thread to run on."""
        return Streams.current(self.local, self.updates)

    def _streams_of_message(self) -> Streams:
        """As ``streams``, for a message that is read on them."""
        return Streams(self.local, self.updates, reads=True)

    def _ready_with(self, value: Any) -> Ready | None:
        """See ``PeerDevices``."""
        return Ready.with_tensors_in(value, self.local, self.updates)

    def use(self, tensors: Iterable[Tensor | None]) -> None:
        """Keep the memory of tensors, where they are on devices, until the current streams have used it."""
        for tensor in tensors:
            if tensor is not None and not tensor.is_cpu:
                use_on_current_stream(tensor)

    def ready(self) -> Shared:
        """What streams must join before they use a value that was made on the current ones."""
        return Shared(self.local, self.updates)

    def object_ready(self) -> Shared:
        """As ``ready``, for an object that requests use, which may be large."""
        return Shared.of_object(self.local, self.updates)

    def around(self, run: Callable[[Request], None]) -> Callable[[Request], None]:
        """Run requests on streams of their own."""

        def run_on_streams(request: Request) -> None:
            with Attempt(self._streams_of_message) as attempt:
                request.streams = attempt.streams
                if attempt.error is not None:
                    request.fail(attempt.error)
                run(request)

        return run_on_streams


def _exchange(control: Control, executor: Executor) -> Exchange | None:
    """What hands memory of devices to other processes of the host; None if this accelerator cannot."""
    accelerator = torch.accelerator.current_accelerator()
    handles = None if accelerator is None else handles_of(accelerator.type)
    if accelerator is None or handles is None:
        return None
    return Exchange(accelerator.type, handles, control.post, executor.submit)
