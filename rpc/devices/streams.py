"""The streams on which a request runs and an answer arrives, and how other streams come to wait for them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch.nn import Parameter

from rpc.devices.tensor_search import search
from rpc.runtime.isolation import this_thread as _thread_state
from rpc.runtime.stepwise import StepwiseCoroutine
from rpc.runtime.torch_internals import DisableTorchFunctionSubclass, is_traceable_wrapper_subclass

__all__ = ["MOST_PARTS", "Attempt", "Ready", "Shared", "Streams", "arrived", "share", "use_on_current_stream"]

_current_stream = torch.accelerator.current_stream
MOST_PARTS: Final = 10_000
"""Maximum number of parts of an object that each use of it searches for tensors."""


def arrived(tensor: Tensor) -> None:
    """A tensor was read from a message on this thread's current streams."""
    streams = _thread_state.streams
    if streams is not None and streams.arrived is not None:
        if not streams.arrived:
            torch.accelerator.set_device_index(tensor.device.index)
        streams.arrived.append(tensor)


def share() -> None:
    """Have what uses the objects of this thread's request, if it has one, wait for its work so far."""
    streams = _thread_state.streams
    if streams is not None:
        streams.share()


class Streams:
    """Streams from PyTorch's pool, one for each of some devices. As a context manager, they are current, and
    wait for the updates so far, if there are any.

    May be entered again after it was left, on any thread: the streams and the device are those that were
    current when it was left.

    Args:
        devices: the devices.
        updates: the work that changes parameters in place; None if there is none.
        reads: whether they are made for a message. The first tensor in it makes its device the current one.

    Attributes:
        arrived: the tensors that were read from the message; None if there is none, or it is read.
        used: the uses of objects of this worker on these streams since they were last entered; of a
            coroutine also earlier ones, as long as it may still use the object.
    """

    def __init__(
        self, devices: Sequence[torch.device], updates: Shared | None = None, *, reads: bool = False
    ) -> None:
        self.arrived: list[Tensor] | None = [] if reads else None
        self.used: dict[weakref.ref[Shared], Use] = {}
        self._devices = list(devices)  # those of an agent may become more
        self._updates = updates
        self._streams = [torch.Stream(device) for device in self._devices]
        self._device: int | None = None
        self._keeps_used = False
        self._outer: tuple[int, list[torch.Stream], Streams | None] | None = None

    @classmethod
    def current(cls, devices: Sequence[torch.device], updates: Shared | None) -> Streams:
        """Return the current streams of this thread, with its current device."""
        streams = cls((), updates)
        streams._devices = list(devices)
        streams._streams = [_current_stream(device) for device in streams._devices]
        streams._device = _current_device(streams._devices)
        return streams

    def __enter__(self) -> Self:
        before = _current_device(self._devices)
        self._outer = before, [_current_stream(device) for device in self._devices], _thread_state.streams
        _make_current(self._streams, before if self._device is None else self._device)
        _thread_state.streams = self
        try:
            if self._updates is not None:
                self._updates.wait()
            for reference, use in list(self.used.items()):
                shared = None if use.is_freed else reference()
                if shared is None:
                    self.used.pop(reference, None)
                    continue
                shared.use_again(use)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.share()
            if not self._keeps_used:
                self.used.clear()
        finally:
            self._leave()

    def _leave(self) -> None:
        assert self._outer is not None
        device, streams, _thread_state.streams = self._outer
        self._device = _current_device(self._devices)
        self._streams = [_current_stream(each) for each in self._devices]
        _make_current(streams, device)

    def enclosing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """See ``Enclosure``. The message is read: what arrives from now on is not part of it, and its tensors
        may be freed. What uses the same objects after the function waits for its work.
        """
        self.arrived = None

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            finally:  # before the answer is out, and the next request comes
                self.share()

        return call

    def later(self, coroutine: Any, answer: Callable[..., None]) -> tuple[Any, Callable[..., None]]:
        """See ``Enclosure``. The coroutine's steps are on the same streams, and so is its answer."""
        streams = self.of_coroutine()

        def failed(value: Any, error: BaseException | None, failure: BaseException) -> None:
            answer(None, failure)

        return streams.follow(coroutine), Attempt(lambda: streams).answering(answer, failed)

    def share(self) -> None:
        """Have what uses the same objects of this worker from now on wait for the work so far."""
        uses = [(reference(), use) for reference, use in list(self.used.items())]
        Shared.renew_all([(shared, use) for shared, use in uses if shared is not None])

    def of_coroutine(self) -> Streams:
        """Return the same streams, with the objects that are used, for the coroutine of a request, or for
        what that starts: a task, or a function on a thread. Each may make other streams current for itself;
        they have the used objects in common, as one may change what another has found. Each may begin on
        another thread before this one leaves the context. Inside the context.
        """
        other = Streams.current(self._devices, self._updates)
        other.used = self.used if self._keeps_used else dict(self.used)
        other._keeps_used = True
        return other

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
        try:
            with self:
                return advance(*args)
        finally:
            del args  # a task's cancellation, which refers to this frame: a cycle


class Attempt:
    """Streams on which something is answered, as a context manager. If a device does not work, the block runs
    without them, and answers with the error.

    Args:
        make: makes the streams.

    Attributes:
        streams: the streams; None if they cannot be used.
        error: why they cannot be used.
    """

    __slots__ = ("_make", "error", "streams")

    def __init__(self, make: Callable[[], Streams]) -> None:
        self._make = make
        self.streams: Any = None
        self.error: BaseException | None = None

    def __enter__(self) -> Self:
        try:
            streams = self._make()
            streams.__enter__()
        except BaseException as error:
            self.error = error
        else:
            self.streams = streams
        return self

    def __exit__(self, *raised: object) -> None:
        if self.streams is not None:
            self.streams.__exit__(*raised)

    def answering(self, run: Callable[..., None], failed: Callable[..., None]) -> Callable[..., None]:
        """See ``Border``: a function that is called once."""

        def answer(*args: Any) -> None:
            with self:
                if self.error is None:
                    run(*args)
                else:
                    failed(*args, self.error)

        return answer


def _current_device(devices: Sequence[torch.device]) -> int:
    return torch.accelerator.current_device_index() if devices else 0  # this process may have no accelerator


def _make_current(streams: Sequence[torch.Stream], device: int) -> None:
    for stream in streams:
        torch.accelerator.set_stream(stream)
    if streams:
        torch.accelerator.set_device_index(device)  # the line above has changed it


class Ready:
    """The work on the current streams of some devices when it was made, and the tensors that this work wrote.
    From any thread.

    Attributes:
        tensors: the tensors.
    """

    __slots__ = ("_events", "tensors")

    def __init__(self, tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> None:
        self.tensors = tensors
        self._events: list[tuple[torch.Stream, torch.Event]] = []
        for device in list(devices):
            stream = _current_stream(device)
            self._events.append((stream, stream.record_event()))

    def join(self) -> None:
        """Make the current streams wait for the work, and keep the tensors' memory from being reused before
        these streams have used it.
        """
        for stream, event in self._events:
            current = _current_stream(stream.device)
            if current != stream:
                current.wait_event(event)
        for tensor in self.tensors:
            use_on_current_stream(tensor)


@dataclass
class Use:
    """A use of an object by a request.

    Attributes:
        value: returns the object, or None once it is freed; None if it cannot be referred to weakly.
        shared: kept as long as this is; None if ``value`` is. Then the use ends with the object's references.
        renewals: how often work had been added to the object's when the request last waited for it.
    """

    value: Callable[[], Any] | None
    shared: Shared | None
    renewals: int

    @property
    def is_freed(self) -> bool:
        """Whether the object is known to be freed."""
        return self.value is not None and self.value() is None


class Shared:
    """An object of this worker that requests use on their streams, in turn or at the same time. Each
    waits for the work that others have enqueued on it: its making, and what they did to it, in place for one
    thing. From any thread.

    Args:
        devices: those that requests use; they may become more.
        updates: further work that may change it.
        most_parts: maximum number of parts of the object that each use searches for tensors.

    Attributes:
        renewals: how often work was added.
    """

    __slots__ = (
        "__weakref__",
        "_devices",
        "_lock",
        "_most_parts",
        "_ready",
        "_searches",
        "_updates",
        "renewals",
    )

    def __init__(
        self, devices: Sequence[torch.device], updates: Shared | None = None, most_parts: float = inf
    ) -> None:
        self._devices = devices
        self._updates = updates
        self._lock = threading.RLock()  # a finalizer that runs while it is held may use the object
        self._most_parts = most_parts
        self._searches = True
        self._ready = Ready((), devices)
        self.renewals = 0

    def join(self, value: Any = None) -> None:
        """Make the current streams wait for the work on the object so far, and keep the memory of its tensors
        from being reused before these streams have used it. If they are those of a request, later ones wait
        for what the request does.

        Args:
            value: the object, with the tensors that it has now. If it has too many parts, and those that were
                searched have no tensors on devices, it is not searched again.
        """
        renewals = self.renewals
        self.wait(value)
        streams = _thread_state.streams
        if streams is not None:
            weakly = _weakly(value)
            kept = None if weakly is None else self
            streams.used[weakref.ref(self)] = Use(weakly, kept, renewals)

    def use_again(self, use: Use) -> None:
        """As ``join``, for streams whose request has used the object before, and may have waited since."""
        renewals = self.renewals
        if use.renewals != renewals:
            self.wait(None if use.value is None else use.value())
            use.renewals = renewals  # not before: another thread may be on the same streams

    def wait(self, value: Any = None) -> None:
        """As ``join``, but what the current streams do afterwards is not added to the work."""
        updates = self._updates
        if updates is not None:
            updates.wait()
        with self._lock:
            self._ready.join()
        if self._searches:
            found = search(value, self._most_parts)
            self._searches = bool(found.tensors) or not found.is_too_large
            for tensor in found.tensors:
                use_on_current_stream(tensor)

    def renew(self) -> None:
        """Add the work that is on the current streams now."""
        Shared.renew_all([(self, None)])

    @staticmethod
    def renew_all(uses: Sequence[tuple[Shared, Use | None]]) -> None:
        """Add the work that is on the current streams now to several: that of a request that ends or pauses.

        Args:
            uses: objects of one worker, each with the request's use of it.
        """
        if not uses:
            return
        before = [shared._ready for shared, _ in uses]
        for each in set(before):  # one for all that a step of a coroutine shared
            each.join()
        now = Ready((), uses[0][0]._devices)
        missed: list[tuple[Shared, Use | None]] = []
        for (shared, use), joined in zip(uses, before, strict=True):
            with shared._lock:
                if shared._ready is not joined:  # another request has added work just now
                    missed.append((shared, use))
                    continue
                shared._ready = now
                if use is not None and use.renewals == shared.renewals:  # no other has added work since
                    use.renewals += 1
                shared.renewals += 1
        Shared.renew_all(missed)


def _weakly(value: Any) -> Callable[[], Any] | None:
    try:
        return weakref.ref(value)
    except TypeError:  # a list, for one thing, cannot be referred to weakly
        return None


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
    attributes: list[Any] = []
    if is_traceable_wrapper_subclass(tensor):
        attributes = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    elif type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # such as a masked tensor
        attributes = list(vars(tensor).values())
    if attributes:
        return [each for each in attributes if isinstance(each, Tensor)]
    return [tensor.values()] if tensor.is_nested else []
