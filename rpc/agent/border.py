"""The border of a worker: where messages come in, run, are answered and leave again, others can step in.

Each agent has a ``Border``. That of most does nothing: a message is in memory, and what is done with it is
done when the function that does it returns. Where work goes on after that, and others must wait for it,
another border is put in its place (``Calls.put_border``), as ``rpc.devices`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor

__all__ = ["Arrival", "Border", "Enclosure", "Work"]


class Work(Protocol):
    """Work on a value, to which several threads add, one after another. From any thread."""

    def join(self, value: Any = None, /) -> None:
        """Have this thread's later work wait for it, and keep the memory of the tensors in ``value`` until
        that is done. What this thread's request adds is waited for, too.
        """

    def renew(self) -> None:
        """Add the work of this thread so far."""


class Arrival(Protocol):
    """The value of a future, on which work may go on after it has arrived. From any thread."""

    def join(self) -> None:
        """Have this thread's later work wait for the value."""

    def complete(self, complete: Callable[[Callable[[], Any]], None], decode: Callable[[], Any], /) -> None:
        """Call ``complete`` with a function that decodes the value and notes the work on it."""

    def call_back(self, callback: Callable[[], object], /) -> None:
        """Run a callback, which gets the value."""

    def following(self) -> Arrival:
        """Return the arrival of what is computed from the value."""

    def go_on(self, compute: Callable[[], Any], following: Any, /) -> Any:
        """Return what ``compute`` makes of the value, and note the work on that in ``following``."""


class Enclosure(Protocol):
    """What one request runs inside of."""

    def enclosing(self, function: Callable[..., Any], /) -> Callable[..., Any]:
        """Return what to call in place of the request's function, once it is loaded."""

    def later(self, coroutine: Any, answer: Callable[..., None], /) -> tuple[Any, Callable[..., None]]:
        """Return what to run in place of the request's coroutine, and what to answer it with."""


class Border:
    """The border of a worker whose messages are in memory: nothing is to be done. From any thread.

    Attributes:
        encloses: whether anything is to be done: requests run by ``enclosed``, answers waited for.
    """

    encloses = False

    def enclosed(self, run: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return a function that runs a request inside its enclosure."""
        return run

    def answering(self, run: Callable[..., None], failed: Callable[..., None]) -> Callable[..., None]:
        """Return a function that runs ``run``, which answers another worker, or ``failed``, if that is
        impossible, with the same arguments and the error.
        """
        return run

    def arrival(self) -> Arrival | None:
        """Return the arrival of a call's answer; None if there is none to wait for."""
        return None

    def catch_up(self) -> None:
        """Have this thread's later work wait for all changes of parameters so far."""

    def updating(self, updater: object) -> AbstractContextManager[Any]:
        """Let an optimizer change its parameters and its state in the block, after earlier changes and before
        later uses.
        """
        return nullcontext()

    def updated(self) -> None:
        """Have what is done from now on wait for this thread's work so far, which may change parameters."""

    def work(self) -> Work | None:
        """Return the work of this thread so far, for others to wait for; None if it is done."""
        return None

    def work_on(self, tensors: Sequence[Tensor | None]) -> Work | None:
        """As ``work``, if it may be work on some of these tensors."""
        return None

    def work_on_object(self) -> Work | None:
        """As ``work``, for an object that requests use, which may be large."""
        return None

    def keep(self, tensors: Iterable[Tensor | None]) -> None:
        """Keep the memory of tensors until this thread's later work has used it."""

    def elsewhere(self, run: Callable[..., None]) -> Callable[..., None]:
        """Return a function that is run on another thread, as if on this one."""
        return run
