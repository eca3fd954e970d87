"""What an agent does with devices; made when the first worker with a device map is met."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from rpc.agent.border import Border
from rpc.agent.received_requests import Request
from rpc.device_maps import DeviceMap
from rpc.devices.arrival import DeviceArrival
from rpc.devices.codecs import CpuToDeviceCodec, SharingCodec
from rpc.devices.ipc import TOPIC, Exchange, Export, handles_of, refusing
from rpc.devices.placements import Placed
from rpc.devices.staging import HostStaging
from rpc.devices.streams import MOST_PARTS, Attempt, Shared, Streams, use_on_current_stream
from rpc.group.control import Control
from rpc.group.peer import Peer
from rpc.options import AgentOptions
from rpc.runtime.executor import Executor
from rpc.serialization.codecs import PICKLE
from rpc.serialization.payload import PeerDevices
from rpc.serialization.serializer import Serializer

__all__ = ["Devices"]


class Devices(Border):
    """The devices of one agent: its border. ``met`` is called on the loop's thread, everything else on any.

    Args:
        options, executor, serializer, control: of an agent that makes no calls yet.
        own_name: this worker's name.

    Attributes:
        local: the devices of this worker that messages use; one list, which gets more as workers are met.
        updates: the work that changes parameters in place, for which each message waits.
    """

    encloses = True

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

        def lacking(kind: str, who: str, callee: str, source: torch.device, target: torch.device) -> str:
            return (
                f"{kind} device mapping is not available for destination '{name}': {who}call "
                f"`set_device_map` on `TensorPipeRpcBackendOptions`: options.set_device_map('{callee}', "
                f"{{'{source}': '{target}'}}), or pass it as device_maps"
            )

        def for_calls(device: torch.device) -> str:
            return lacking("Request", "", name, device, free(device, calls.values()))

        def for_answers(device: torch.device) -> str:
            who = f"answers go by the reverse of its device map, so have '{name}' "
            return lacking("Response", who, me, free(device, theirs), device)

        exchange = self._exchange

        def reads(elements: Tensor) -> bool:
            return exchange is not None and exchange.reads(peer, elements)

        if exchange is not None and peer.near and not peer.is_self and (calls or theirs):
            exchange.offer(peer, self.local)
        staging = functools.partial(HostStaging, self._executor)
        placed = Placed(name, calls, for_calls, staging, reads)
        placed_answers = Placed(name, answers, for_answers, staging, reads)
        codec = peer.codec
        self._takes_cpu = self._takes_cpu or placed.takes_cpu or placed_answers.takes_cpu
        if codec.id == PICKLE:
            codec = self._serializer.pickles_as(CpuToDeviceCodec if self._takes_cpu else SharingCodec)
        peer.agree_on_devices(PeerDevices(placed, placed_answers), codec)

    def reads(self, worker: str, tensor: Tensor) -> bool:
        """Whether a worker reads a contiguous tensor in this worker's memory."""
        peer = self._met.get(worker)
        return self._exchange is not None and peer is not None and self._exchange.reads(peer, tensor)

    # ---- the border

    def enclosed(self, run: Callable[[Request], None]) -> Callable[[Request], None]:
        """Run requests on streams of their own."""

        def run_on_streams(request: Request) -> None:
            with Attempt(lambda: Streams(self.local, self.updates, reads=True)) as attempt:
                request.enclosure = attempt.streams
                if attempt.error is not None:
                    request.fail(attempt.error)
                run(request)

        return run_on_streams

    def answering(self, run: Callable[..., None], failed: Callable[..., None]) -> Callable[..., None]:
        """Answer on streams of their own; if a device does not work, with its error."""
        return Attempt(lambda: Streams(self.local, self.updates)).answering(run, failed)

    def arrival(self) -> DeviceArrival:
        """Return the arrival of a call's answer."""
        return DeviceArrival(self.local, self.updates)

    def catch_up(self) -> None:
        """Make the current streams wait for the updates so far."""
        self.updates.wait()

    @contextlib.contextmanager
    def updating(self, updater: object) -> Iterator[None]:
        """Let an optimizer change its parameters after earlier changes and before later uses."""
        self.updates.join(updater)
        try:
            yield
        finally:
            self.updates.renew()

    def updated(self) -> None:
        """Add the work that is on the current streams now to the updates."""
        self.updates.renew()

    def work(self) -> Shared:
        """Return what streams must join before they use a value that was made on the current ones."""
        return Shared(self.local, self.updates)

    def work_on(self, tensors: Sequence[Tensor | None]) -> Shared | None:
        """As ``work``, if some of the tensors are on a device."""
        return None if all(each is None or each.is_cpu for each in tensors) else self.work()

    def work_on_object(self) -> Shared:
        """As ``work``, for an object that requests use, which may be large."""
        return Shared(self.local, self.updates, MOST_PARTS)

    def keep(self, tensors: Iterable[Tensor | None]) -> None:
        """Keep the memory of tensors, where they are on devices, until the current streams have used it."""
        for tensor in tensors:
            if tensor is not None and not tensor.is_cpu:
                use_on_current_stream(tensor)

    def elsewhere(self, run: Callable[..., None]) -> Callable[..., None]:
        """Run something that is run on another thread on the current streams of this one."""
        return Streams.current(self.local, self.updates).around(run)


def _exchange(control: Control, executor: Executor) -> Exchange | None:
    """What hands memory of devices to other processes of the host; None if this accelerator cannot."""
    accelerator = torch.accelerator.current_accelerator()
    handles = None if accelerator is None else handles_of(accelerator.type)
    if accelerator is None or handles is None:
        return None
    return Exchange(accelerator.type, handles, control.post, executor.submit)
