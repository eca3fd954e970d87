"""Coroutines and pool threads with separate modes and current streams, which begin as those of their creator.

All coroutines of a loop share one thread, whose modes (``modes``) a coroutine may change for a block that
awaits. So each task of an isolating loop is a ``StepwiseCoroutine``: the modes at the end of one of its
steps are saved, and restored for its next step, as are the current streams (``own_streams``). Context
variables need nothing of the kind: asyncio gives each task a context.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context
from typing import Any, Final, ParamSpec, TypeVar

import torch

from rpc.runtime.modes import SavedModes, copy_of_modes, modes_changed, reset_modes
from rpc.runtime.own_streams import OwnStreams
from rpc.runtime.stepwise import StepwiseCoroutine

__all__ = ["IsolatingThreadPool", "isolate_tasks", "this_thread"]

P = ParamSpec("P")
T = TypeVar("T")


class _ThisThread(threading.local):
    streams: Any = None
    """The innermost streams (``rpc.devices.streams``) that the current thread is inside of, or None."""


this_thread: Final = _ThisThread()


def isolate_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Give each task of a loop modes of its own, and functions that it runs on threads the defaults.

    A task that another task creates starts with that task's modes at that moment, as it starts with a copy of
    its context variables: coroutines that ``asyncio.gather`` runs inside ``torch.no_grad()`` are inside, too.
    It runs on the creator's streams, and so do functions that the creator has the loop run on threads.
    Other tasks start with the defaults, whatever callbacks of the loop have left.
    """
    loop.set_task_factory(_task)
    loop.set_default_executor(IsolatingThreadPool(thread_name_prefix="farcall-to-thread"))


def _task(loop: asyncio.AbstractEventLoop, coroutine: Any, **arguments: Any) -> asyncio.Task[Any]:
    if asyncio.iscoroutine(coroutine):  # otherwise asyncio refuses it
        is_created_by_task = asyncio.current_task(loop) is not None
        if is_created_by_task and this_thread.streams is not None:
            coroutine = this_thread.streams.of_coroutine().follow(coroutine)
        elif torch.accelerator.current_accelerator() is not None:
            coroutine = OwnStreams.of_this_thread().follow(coroutine)
        modes = _OwnModes(copy_of_modes() if is_created_by_task else None)
        coroutine = StepwiseCoroutine(coroutine, modes.step)
    return asyncio.Task(coroutine, loop=loop, **arguments)


class IsolatingThreadPool(ThreadPoolExecutor):
    """A pool that runs each function in a context of its own and with the default modes, on the streams of
    the request that submits it.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        streams = this_thread.streams
        run = _isolated if streams is None else streams.of_coroutine().around(_isolated)
        return super().submit(run, fn, args, kwargs)


def _isolated(function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    try:
        return OwnStreams().around(Context().run)(function, *args, **kwargs)
    finally:
        if modes_changed():
            reset_modes()


class _OwnModes:
    """The modes of one coroutine, which are in force during its steps only."""

    __slots__ = ("_modes",)

    def __init__(self, modes: SavedModes | None) -> None:
        self._modes = modes

    def step(self, advance: Callable[..., Any], *args: Any) -> Any:
        """Run one step; the thread's modes before it are restored after it."""
        others = SavedModes() if modes_changed() else None
        own, self._modes = self._modes, None
        if own is not None:
            own.restore()
        try:
            awaited = advance(*args)
        except BaseException:
            if modes_changed():
                reset_modes()
            raise
        else:
            if modes_changed():
                self._modes = SavedModes()
            return awaited
        finally:
            del args  # a task's cancellation, which refers to this frame: a cycle
            if others is not None:
                others.restore()
