"""Device tensors for workers on this host, which read the sender's memory in place of a copy in a message.

What the device can do is asked of PyTorch: a registry has, by the type of the device, how memory is handed to
another process (``Handles``). Each worker offers its devices to each worker on its host that it has a device
map with, with a small tensor to try. What the other one cannot open is refused, once and with a line in the
log, and goes through pinned memory as between hosts.

A message has the handle of a tensor beside its pickle. The receiver copies the elements to memory of its own,
on its current stream, waits for the copy, and says that it is done: so a tensor may be changed after the
call, and two workers never share memory for longer than a copy takes. The memory is kept by the device's own
count until then. When the receiver dies, the sender gives up what was not read.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from rpc.errors import ProtocolError, SerializationError, WorkerLostError
from rpc.group.peer import Peer
from rpc.runtime.legible import legible
from rpc.runtime.process_signs import has_ended
from rpc.runtime.tasks import Task

__all__ = [
    "SMALLEST_BYTES",
    "TOPIC",
    "Exchange",
    "Export",
    "Handles",
    "Import",
    "handles_of",
    "refusing",
    "register",
]

logger = logging.getLogger(__name__)

SMALLEST_BYTES: Final = 2 << 20
"""Size of the smallest tensor that is read in place, in bytes. Opening and closing CUDA memory of another
process takes about 0.8 ms, in which 1 to 2 MB are copied through pinned memory. Opened memory is not kept for
later messages: the owner could not return it to the device until every reader had closed it."""

TOPIC: Final = "devices"
_PROBE: Final = 64
"""Elements of the tensor that is opened to try."""

_MAX_DEVICES: Final = 256
"""Maximum number of devices that a worker may offer."""

Handle = Sequence[Any]
"""What names memory of another process: anything that msgpack can encode."""


class Handles(Protocol):
    """How memory of one type of device is handed to another process of the host."""

    def identity(self, index: int) -> str:
        """What a device is called in all processes of the host; equal for the same physical device."""

    def export(self, elements: Tensor) -> Handle:
        """Name a contiguous tensor of bytes for one other process, after the work on the current stream. Its
        memory is kept until the other process has opened and freed it, or ``release`` was called.
        """

    def open(self, handle: Handle, index: int) -> Tensor:
        """The tensor of bytes that a handle names, on the local device ``index``. The current stream waits
        for the work that makes it.
        """

    def release(self, handle: Handle) -> None:
        """Give up a handle that is not opened."""


_registry: Final[dict[str, Callable[[], Handles]]] = {}


def register(kind: str, make: Callable[[], Handles]) -> None:
    """Say how memory of a type of device is handed to another process."""
    _registry[kind] = make


def handles_of(kind: str) -> Handles | None:
    """What is registered for a type of device."""
    make = _registry.get(kind)
    return None if make is None else make()


def _cuda() -> Handles:
    from rpc.devices.cuda_handles import CudaHandles

    return CudaHandles()


register("cuda", _cuda)


class Export:
    """A tensor of bytes in a message, by its handle."""

    __slots__ = ("elements",)

    def __init__(self, elements: Tensor) -> None:
        self.elements = elements


class Import:
    """A handle that has arrived beside a message. It is opened once, or released when nobody reads it."""

    def __init__(
        self,
        handles: Handles,
        handle: Handle,
        index: int,
        source: Peer,
        done: Callable[[], object],
        give_up: Callable[[Handle], object],
    ) -> None:
        self._handles = handles
        self._source = source
        self._handle = handle
        self._index = index
        self._done = done
        self._unread = weakref.finalize(self, give_up, handle)
        self._unread.atexit = False

    def copy_to(self, target: Tensor) -> None:
        """Copy the elements to a tensor of as many bytes, on the current streams, and wait for it: when the
        message is answered, the sender may change its tensor.

        Raises:
            WorkerLostError: the sender's process has ended, and the work on its streams with it, done or not:
                the elements may be any.
        """
        if not self._unread.alive:
            raise SerializationError("a tensor of a device can be read once only")
        opened = self._handles.open(self._handle, self._index)  # if it fails, the handle is released unread
        self._unread.detach()
        try:
            if opened.shape != target.shape or opened.dtype != target.dtype:
                raise SerializationError(
                    f"a tensor of a device has {target.numel()} bytes, and the memory that came with it "
                    f"{opened.nbytes}"
                )
            target.copy_(opened, non_blocking=True)
            torch.accelerator.current_stream(target.device).synchronize()
            process = self._source.link.process
            if process and has_ended(process):
                reason = "its process has ended"
                raise WorkerLostError(
                    f"worker '{self._source.name}' is lost while a tensor on its device was read: {reason}",
                    self._source.name,
                    reason,
                )
        finally:
            del opened
            self._done()


def refusing(post: Callable[[Peer, str, Any], object], reason: str) -> Callable[[Peer, object], None]:
    """Return a handler of control messages for a worker without an ``Exchange``: it refuses what is offered.

    Args:
        post: as for ``Exchange``.
        reason: why it reads no memory of other workers.
    """

    def received(peer: Peer, body: object) -> None:
        match body:
            case ["offer", str(), int(index), str(), [*_]]:
                post(peer, TOPIC, ["refuse", index, False, reason])
            case _:
                raise ProtocolError(f"a message about devices that cannot be: {str(body)[:80]}")

    return received


class Exchange:
    """See the module. The carrier of ``Export`` (``rpc.serialization.carriers``).

    Args:
        kind: type of this worker's devices.
        handles: how their memory is handed over.
        post: sends a control message to a worker.
        submit: runs a task on a thread that may wait.
    """

    kind = "ipc"

    def __init__(
        self,
        kind: str,
        handles: Handles,
        post: Callable[[Peer, str, Any], object],
        submit: Callable[[Task], object],
    ) -> None:
        self._type = kind
        self._handles = handles
        self._post = post
        self._submit = submit
        self._numbers = itertools.count(1)
        self._probes: dict[Peer, dict[int, Handle]] = {}
        """By worker, for each device that was offered to it, the tensor to try, until it has answered."""
        self._tried: dict[Peer, set[int]] = {}
        """By worker, the devices that it has offered."""
        self._taken: dict[Peer, set[int]] = {}
        """By worker, the devices of this worker that it reads."""
        self._found: dict[Peer, dict[int, int]] = {}
        """By worker, for each of its devices that this worker reads, its index here."""
        self._under_way: dict[Peer, dict[int, Handle]] = {}
        """By worker, what it has not said to be done with."""
        self._given_up: list[Handle] = []
        """What a thread that may wait is about to release, unless this worker leaves first."""

    # ---- agreeing

    def offer(self, peer: Peer, devices: Sequence[torch.device]) -> None:
        """Offer devices to a worker on this host."""
        self._submit((self._offer, (peer, list(devices))))

    def _offer(self, offered: tuple[Peer, list[torch.device]]) -> None:
        peer, devices = offered
        for device in devices:
            try:
                identity = self._handles.identity(device.index)
                handle = self._handles.export(torch.arange(_PROBE, dtype=torch.uint8, device=device))
            except Exception as error:
                logger.info("the memory of %s is not handed to other processes: %s", device, error)
                continue
            self._probes.setdefault(peer, {})[device.index] = handle
            self._post(peer, TOPIC, ["offer", self._type, device.index, identity, handle])
        if peer.lost is not None:  # possibly before the offers were recorded
            self.gone(peer, peer.lost)

    def received(self, peer: Peer, body: object) -> None:
        """A control message; on the loop's thread."""
        match body:
            case ["offer", str(kind), int(index), str(identity), [*handle]] if self._is_new(peer, index):
                self._tried.setdefault(peer, set()).add(index)
                self._submit((self._try, (peer, kind, index, identity, handle)))
            case ["take", int(index)] if index in self._probes.get(peer, {}):
                self._taken.setdefault(peer, set()).add(index)
                del self._probes[peer][index]
            case ["refuse", int(index), bool(opened), str(reason)] if index in self._probes.get(peer, {}):
                unread = self._probes[peer].pop(index)
                if not opened:
                    self._give_up([unread])
                logger.info(
                    "worker '%s' does not read the memory of %s:%d, so tensors there are copied through "
                    "pinned memory: %s",
                    peer.name,
                    self._type,
                    index,
                    legible(reason),
                )
            case ["done", int(number)]:
                self._under_way.get(peer, {}).pop(number, None)
            case _:
                raise ProtocolError(f"a message about devices that cannot be: {str(body)[:80]}")

    def _is_new(self, peer: Peer, index: int) -> bool:
        """Whether a worker may offer a device, which it does once."""
        return 0 <= index < _MAX_DEVICES and index not in self._tried.get(peer, ())

    def _try(self, offered: tuple[Peer, str, int, str, Handle]) -> None:
        peer, kind, index, identity, handle = offered
        has_opened = False
        try:
            if kind != self._type:
                raise SerializationError(f"its devices are of type '{self._type}'")
            count = torch.accelerator.device_count()
            mine = next((each for each in range(count) if self._handles.identity(each) == identity), None)
            if mine is None:
                raise SerializationError("it does not have this device")
            with torch.accelerator.device_index(mine):
                opened = self._handles.open(handle, mine)
                has_opened = True
                if opened.shape != (_PROBE,) or opened.dtype != torch.uint8:
                    raise SerializationError("it found memory of another size there")
                found = opened.cpu().tolist()
                del opened
            if found != list(range(_PROBE)):
                raise SerializationError("it found other elements there")
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:200]
            self._post(peer, TOPIC, ["refuse", index, has_opened, reason])
            return
        self._found.setdefault(peer, {})[index] = mine
        if peer.lost is not None:  # possibly before that was recorded
            self._found.pop(peer, None)
        self._post(peer, TOPIC, ["take", index])

    def reads(self, peer: Peer, elements: Tensor) -> bool:
        """Whether a worker reads a contiguous tensor in place."""
        taken = self._taken.get(peer)
        return taken is not None and elements.device.index in taken and elements.nbytes >= SMALLEST_BYTES

    def gone(self, peer: Peer, _: str) -> None:
        """A worker is gone: give up what it has not read."""
        self._tried.pop(peer, None)
        self._taken.pop(peer, None)
        self._found.pop(peer, None)
        self._give_up([*self._probes.pop(peer, {}).values(), *self._under_way.pop(peer, {}).values()])

    def close(self) -> None:
        """This worker has left: give up what others have not read."""
        for peer in {*self._probes, *self._under_way}:
            self.gone(peer, "")
        self._release_given_up(None)

    def _give_up(self, handles: list[Handle]) -> None:
        self._given_up += handles
        if handles:
            self._submit((self._release_given_up, None))

    def _release_given_up(self, _: None) -> None:
        with contextlib.suppress(IndexError):  # another thread may release the last ones
            while self._given_up:
                self._handles.release(self._given_up.pop())

    # ---- the carrier

    def depart(self, export: Export, to: Peer) -> Any:
        """Name a tensor for a worker."""
        elements = export.elements
        number = next(self._numbers)
        handle = list(self._handles.export(elements))
        self._under_way.setdefault(to, {})[number] = handle
        return [number, elements.device.index, handle]

    def take_back(self, descriptors: list[Any], to: Peer) -> None:
        """The message was not sent."""
        for number, _, handle in descriptors:
            if self._under_way.get(to, {}).pop(number, None) is not None:
                self._handles.release(handle)
        if to.lost is not None and not self._under_way.get(to):
            self._under_way.pop(to, None)

    def arrive(self, descriptors: list[Any], source: Peer) -> list[Import]:
        """Handles have arrived."""
        return [self._arrived(source, *descriptor) for descriptor in descriptors]

    def _arrived(self, source: Peer, number: int, index: int, handle: Handle) -> Import:
        if type(number) is not int or type(index) is not int or not isinstance(handle, list | tuple):
            raise SerializationError("a malformed handle")
        mine = self._found.get(source, {}).get(index)
        if mine is None:
            raise SerializationError(f"a tensor of device {index}, which this worker did not agree to read")

        def done() -> None:
            self._post(source, TOPIC, ["done", number])

        def give_up(handle: Handle) -> None:  # in a finalizer
            self._submit((self._release, (handle, done)))

        return Import(self._handles, handle, mine, source, done, give_up)

    def _release(self, unread: tuple[Handle, Callable[[], object]]) -> None:
        handle, done = unread
        self._handles.release(handle)
        done()

    def ready(self, objects: Any, when_ready: Callable[[], object]) -> bool:
        """At once: streams wait for the rest."""
        return True
