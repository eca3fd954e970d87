"""The current streams and device of a thread, so that those which one function sets do not stay for the next.

PyTorch keeps them for each thread, as it keeps modes (``modes``), once the program has used an accelerator.
A new thread has the default streams, which are the same on all threads: what they wait for is waited for
wherever no other stream is current.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine
from functools import cache, partial
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar

import torch

from rpc.runtime.stepwise import StepwiseCoroutine

__all__ = ["OwnStreams"]

P = ParamSpec("P")
T = TypeVar("T")


class _Current(NamedTuple):
    device: int
    streams: list[torch.Stream]


class OwnStreams:
    """The current streams and device of something that runs in steps; they are current during its steps only.

    After each step, the streams that were current before it are so again, and wait for what the step has left
    on its own. So its results can be used on any thread.

    Args:
        own: those that its first step begins with; default: those of the thread.
    """

    __slots__ = ("_own",)

    def __init__(self, own: _Current | None = None) -> None:
        self._own = own

    @classmethod
    def of_this_thread(cls) -> Self:
        """Begin with those that are current on this thread now."""
        return cls(_current())

    def around(self, function: Callable[P, T]) -> Callable[P, T]:
        """Return a function whose every call is a step; without an accelerator, the function itself."""
        return function if torch.accelerator.current_accelerator() is None else partial(self._step, function)

    def follow(self, coroutine: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """Return a coroutine whose every step is a step; without an accelerator, the coroutine itself."""
        if torch.accelerator.current_accelerator() is None:
            return coroutine
        return StepwiseCoroutine(coroutine, self._step)

    def _step(self, advance: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        outer = _current()
        if outer is not None and self._own is not None:
            _make_current(self._own, outer)
        try:
            return advance(*args, **kwargs)
        finally:
            del args  # a task's cancellation, which refers to this frame: a cycle
            self._own = own = _current()
            if own is not None:
                outer = outer or _defaults()  # the step was the first to use the accelerator
                for stream, left in zip(outer.streams, own.streams, strict=True):
                    if stream != left:
                        stream.wait_event(left.record_event())
                _make_current(outer, own)


def _current() -> _Current | None:
    """What is current on this thread; None in a process that does not use an accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    is_initialized = getattr(torch.get_device_module(accelerator), "is_initialized", None)
    if is_initialized is not None and not is_initialized():  # nor can it be, after some forks
        return None
    count = torch.accelerator.device_count()
    streams = [torch.accelerator.current_stream(index) for index in range(count)]
    return _Current(torch.accelerator.current_device_index(), streams)


@cache
def _defaults() -> _Current:
    """What is current on a new thread."""
    found: list[_Current | None] = []
    thread = threading.Thread(target=lambda: found.append(_current()), name="farcall-default-streams")
    thread.start()
    thread.join()
    assert found[0] is not None
    return found[0]


def _make_current(wanted: _Current, now: _Current) -> None:
    """Set what differs: a device on which nothing is set need not be initialized."""
    for stream, other in zip(wanted.streams, now.streams, strict=True):
        if stream != other:
            torch.accelerator.set_stream(stream)
    if torch.accelerator.current_device_index() != wanted.device:
        torch.accelerator.set_device_index(wanted.device)
