"""The streams on which a request runs and an answer arrives, and how other streams come to wait for them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from rpc.runtime.stepwise import StepwiseCoroutine
from rpc.runtime.torch_internals import DisableTorchFunctionSubclass, is_traceable_wrapper_subclass

__all__ = ["Ready", "Shared", "Streams", "arrived", "tensors_in", "use_on_current_stream"]

_current_stream = torch.accelerator.current_stream
_current_device = torch.accelerator.current_device_index
_MAX_DEPTH: Final = 8
"""Maximum nesting of containers that are searched for tensors."""


class _ThreadState(threading.local):
    streams: Streams | None = None
    """The innermost that this thread is inside of."""


_thread_state: Final = _ThreadState()


def arrived(tensor: Tensor) -> None:
    """A tensor was read from a message on this thread's current streams."""
    streams = _thread_state.streams
    if streams is not None:
        if not streams.arrived:
            torch.accelerator.set_device_index(tensor.device.index)
        streams.arrived.append(tensor)


class Streams:
    """Streams from PyTorch's pool, one for each of some devices. As a context manager, they are current, and
    wait for the updates so far, if there are any.

    The first tensor that arrives makes its device the current one. May be entered again after it was left,
    on any thread: the streams and the device are those that were current when it was left.

    Args:
        devices: the devices.
        updates: the work that changes parameters in place; None if there is none.

    Attributes:
        arrived: the tensors that were read from a message on these streams.
        used: the objects of this worker that are used on these streams, since they were last entered.
    """

    def __init__(self, devices: Sequence[torch.device], updates: Shared | None = None) -> None:
        self.arrived: list[Tensor] = []
        self.used: list[Shared] = []
        self._devices = devices
        self._updates = updates
        self._streams = [torch.Stream(device) for device in devices]
        self._device: int | None = None
        self._outer: tuple[int, list[torch.Stream], Streams | None] | None = None

    def __enter__(self) -> Self:
        before = _current_device()
        self._outer = before, [_current_stream(device) for device in self._devices], _thread_state.streams
        _make_current(self._streams, before if self._device is None else self._device)
        _thread_state.streams = self
        if self._updates is not None:
            self._updates.wait()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._outer is not None
        self.share()
        self.used.clear()
        device, streams, _thread_state.streams = self._outer
        self._device = _current_device()
        self._streams = [_current_stream(each) for each in self._devices]
        _make_current(streams, device)

    def share(self) -> None:
        """Have what uses the same objects of this worker from now on wait for the work so far."""
        for shared in self.used:
            shared.renew()

    def ready(self, tensors: Sequence[Tensor] | None = None) -> Ready | None:
        """What other streams must ``join`` before they use tensors, by default those that have arrived, or
        parameters that were changed; None if there are none. Inside the context.
        """
        tensors = self.arrived if tensors is None else tensors
        changed = self._updates is not None and self._updates.renewed
        return Ready(tensors, self._devices, self._updates) if tensors or changed else None

    def ready_with(self, value: Any) -> Ready | None:
        """As ``ready``, for the tensors in a value."""
        return self.ready(tensors_in(value))

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that runs inside the context."""

        def run(*args: Any) -> Any:
            with self:
                return function(*args)

        return run

    def follow(self, coroutine: Coroutine[Any, Any, Any]) -> Coroutine[Any, Any, Any]:
        """A coroutine whose every step is inside the context."""
        return StepwiseCoroutine(coroutine, self._step)

    def _step(self, advance: Callable[..., Any], *args: Any) -> Any:
        with self:
            return advance(*args)


def _make_current(streams: Sequence[torch.Stream], device: int) -> None:
    for stream in streams:
        torch.accelerator.set_stream(stream)
    torch.accelerator.set_device_index(device)  # the line above has changed it


class Ready:
    """The work on the current streams of some devices when it was made, and the tensors that this work wrote.
    From any thread.

    Args:
        tensors: the tensors.
        devices: the devices.
        updates: for ``streams``.
    """

    __slots__ = ("_devices", "_events", "_tensors", "_updates")

    def __init__(
        self, tensors: Sequence[Tensor], devices: Sequence[torch.device], updates: Shared | None = None
    ) -> None:
        self._tensors = tensors
        self._devices = devices
        self._updates = updates
        self._events: list[tuple[torch.Stream, torch.Event]] = []
        for device in devices:
            stream = _current_stream(device)
            self._events.append((stream, stream.record_event()))

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The tensors."""
        return self._tensors

    def streams(self) -> Streams:
        """Streams on the same devices, which wait for this once they ``join`` it."""
        return Streams(self._devices, self._updates)

    def join(self) -> None:
        """Make the current streams wait for the work, and keep the tensors' memory from being reused before
        these streams have used it.
        """
        for stream, event in self._events:
            current = _current_stream(stream.device)
            if current != stream:
                current.wait_event(event)
        for tensor in self._tensors:
            use_on_current_stream(tensor)


class Shared:
    """An object of this worker that requests use on their streams, in turn or at the same time. Each
    waits for the work that others have enqueued on it: its making, and what they did to it, in place for one
    thing. From any thread.

    Args:
        value: the object.
        devices: those that requests use.
        updates: further work that may change it.

    Attributes:
        renewed: whether work was ever added.
    """

    __slots__ = ("_devices", "_lock", "_ready", "_tensors", "_updates", "renewed")

    def __init__(self, value: Any, devices: Sequence[torch.device], updates: Shared | None = None) -> None:
        self._devices = devices
        self._updates = updates
        self._lock = threading.Lock()
        self._tensors = [weakref.ref(tensor) for tensor in tensors_in(value)]
        self._ready = Ready((), devices)
        self.renewed = False

    def join(self, tensors: Iterable[Tensor] = ()) -> None:
        """Make the current streams wait for the work on it so far. If they are those of a request, later ones
        wait for what the request does.

        Args:
            tensors: further ones whose memory the current streams use.
        """
        self.wait()
        for tensor in (*tensors, *(reference() for reference in self._tensors)):
            if tensor is not None and not tensor.is_cpu:
                use_on_current_stream(tensor)
        streams = _thread_state.streams
        if streams is not None and self not in streams.used:
            streams.used.append(self)

    def wait(self) -> None:
        """As ``join``, and what the current streams do then is not part of the work."""
        updates = self._updates
        if updates is not None:
            updates.wait()
        with self._lock:
            self._ready.join()

    def renew(self) -> None:
        """Add the work that is on the current streams now, as of a request that is over, or pauses."""
        with self._lock:
            self._ready.join()
            self._ready = Ready((), self._devices)
            self.renewed = True


def use_on_current_stream(tensor: Tensor) -> None:
    """Keep a tensor's memory from being reused before the current stream of its device has used it."""
    if tensor.layout is torch.strided and not tensor.is_nested and type(tensor) in (Tensor, Parameter):
        tensor.record_stream(_current_stream(tensor.device))
        return
    with DisableTorchFunctionSubclass():
        parts = _parts(tensor)
        if not parts:
            tensor.record_stream(_current_stream(tensor.device))
    for part in parts:
        if not part.is_cpu and not part.is_meta:
            use_on_current_stream(part)


def _parts(tensor: Any) -> list[Tensor]:
    """The tensors that hold the elements of a tensor of another layout or of a subclass; empty if it has
    memory of its own.
    """
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if is_traceable_wrapper_subclass(tensor):
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # such as a masked tensor
        return [each for each in vars(tensor).values() if isinstance(each, Tensor)]
    return [tensor.values()] if tensor.is_nested else []


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors on accelerators in a value: in containers, dataclasses, modules and attributes of objects.

    Nothing of the value's own is called, so what a container of another library hides is not found.
    """
    found: list[Tensor] = []
    _search(value, found, set(), 0)
    return found


def _search(value: Any, found: list[Tensor], seen: set[int], depth: int) -> None:
    if isinstance(value, Tensor):
        if not value.is_cpu and not value.is_meta:
            found.append(value)
        return
    if depth > _MAX_DEPTH or value is None or isinstance(value, (str, bytes, int, float, type)):
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    inside: Any = ()
    if isinstance(value, dict):
        inside = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside = list(value)
    elif isinstance(value, Module):
        inside = [*value.parameters(), *value.buffers()]
    elif is_dataclass(value):
        inside = [getattr(value, each.name, None) for each in fields(value)]
    elif isinstance(getattr(value, "__dict__", None), dict) and not callable(value):
        inside = list(value.__dict__.values())
    for each in inside:
        _search(each, found, seen, depth + 1)
