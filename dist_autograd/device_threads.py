"""How nodes that run on the engine's device threads find the pass that they belong to.

The engine runs nodes whose tensors are on a device on a thread of that device, for all passes of the process.
There, a pass is identified by the id of its graph task, which is the same on all threads. ``run_backward``
does not return the id. So a pass with such nodes has one more root, a *herald*, which runs on the calling
thread before any other node of that thread, and registers the pass under the id that it finds. Nodes on
device threads wait for that.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge

from dist_autograd import engine
from dist_autograd.torch_internals import current_node, inputs_of
from rpc.errors import AutogradError

__all__ = [
    "finish",
    "heralded",
    "pass_of_other_thread",
    "pass_of_this_thread",
    "refuse_here",
]

_WITHOUT_THREAD: Final = ("cpu", "meta", "lazy")
"""Types of devices whose nodes run on the thread that called the engine."""

_FIRST: Final = 1 << 62
"""A sequence number above that of any node made by autograd."""

_POLL_SECONDS: Final = 0.0005
"""Interval at which a pass checks whether other threads have made nodes ready on its own."""

_MAX_POLLS: Final = 4000
"""Maximum number of polls, beyond the number of nodes. Each lets another thread run a node, unless a node has
failed: then the engine runs no others, and raises that node's error.
"""


class _Passes:
    """The passes under way that have nodes on device threads. From any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._by_task: dict[int, Any] = {}
        self._unknown = 0
        """Number of passes whose herald has not run."""

    @contextlib.contextmanager
    def expected(self) -> Iterator[list[int]]:
        """A pass is about to run; its herald puts the id of its graph task into the list."""
        task: list[int] = []
        with self._changed:
            self._unknown += 1
        try:
            yield task
        finally:
            with self._changed:
                if task:
                    del self._by_task[task[0]]
                else:
                    self._unknown -= 1
                    self._changed.notify_all()

    def enter(self, task: list[int], known_as: Any) -> None:
        """Register the pass whose herald runs."""
        with self._changed:
            task.append(engine.current_task())
            self._by_task[task[0]] = known_as
            self._unknown -= 1
            self._changed.notify_all()

    def find(self) -> Any:
        """Return the pass that runs the current node; None if there is none, or not a distributed one."""
        task = engine.current_task()
        if task == -1:
            return None
        with self._changed:
            self._changed.wait_for(lambda: task in self._by_task or not self._unknown)
            return self._by_task.get(task)


_passes: Final = _Passes()


class _Herald(Function):
    """Registers its pass."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, task: list[int]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.task = task
        return engine.empty()

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[None, None]:
        _passes.enter(ctx.task, engine.running.known_as)
        return None, None


class _Detour(Function):
    """A node that does nothing, on the thread of a device."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, device: torch.device) -> Tensor:
        ctx.set_materialize_grads(False)
        return torch.empty(0, device=device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[None, None]:
        return None, None


@contextlib.contextmanager
def heralded(
    roots: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor], anchor: Tensor
) -> Iterator[tuple[Sequence[Tensor | GradientEdge], Sequence[Tensor]]]:
    """Add a herald to the roots and gradients of a pass with nodes on device threads; it runs in the block.

    Args:
        anchor: one of the inputs of the pass.
    """
    with _passes.expected() as task:
        with torch.enable_grad():
            herald: Any = _Herald.apply(anchor, task)  # type: ignore[no-untyped-call]  # untyped in torch
        engine.set_sequence_number(herald.grad_fn, _FIRST)
        # First: a device's thread may hand the roots out, one by one, and this thread takes what is there.
        yield [herald, *roots], [engine.empty(), *gradients]


def pass_of_this_thread() -> Any:
    """Return the pass that runs the current node, on any thread; None if there is none, or not a distributed
    one.
    """
    here = engine.running.known_as
    return _passes.find() if here is None else here


def pass_of_other_thread(gradients: Sequence[Tensor | None]) -> Any:
    """As ``pass_of_this_thread``, for a node that may run on a device's thread. Waits for its gradients on
    other devices: the engine has the streams of a node's own device wait, and no others.
    """
    for device in {each.device for each in gradients if each is not None}:
        if device.type not in _WITHOUT_THREAD and device.index != torch.accelerator.current_device_index():
            torch.accelerator.synchronize(device.index)
    return pass_of_this_thread()


def refuse_here() -> None:
    """Raise ``AutogradError`` if a backward cannot begin here, inside another: on a device's thread."""
    node = current_node()
    for device in () if node is None else _devices_of([node]):
        raise AutogradError(
            f"backward was called by a node or hook on PyTorch's only thread for backwards of {device}, "
            "which this pass may need as well: call it when the other backward has returned"
        )


def _devices_of(nodes: Iterable[Any]) -> set[torch.device]:
    """Return the devices on whose threads some of these nodes run."""
    found = {each.device for node in nodes for each in inputs_of(node)}
    return {each for each in found if each.type not in _WITHOUT_THREAD}


def finish(nodes: Collection[Any], have_run: Callable[[], bool], check: Callable[[], object]) -> None:
    """Inside a node on the calling thread of a pass: wait until some of its nodes have run, as far as those
    on device threads can make them ready. These threads continue while a node of this one waits.

    Args:
        nodes: all nodes of the pass.
        have_run: whether those that are waited for have run.
        check: raises the error that has ended the pass.
    """
    devices = _devices_of(nodes)
    for _ in range(len(nodes) + _MAX_POLLS if devices else 0):
        check()
        for device in devices:
            _let_others_run(device)
        if have_run():
            return
        time.sleep(_POLL_SECONDS)


def _let_others_run(device: torch.device) -> None:
    """Wait for the node that a device's thread runs, if it runs one, and run the nodes that become ready on
    this thread meanwhile.

    A backward inside another, on one thread, takes its nodes from the same queue, but before those of the
    other. So the only node of this one runs on the device's thread.
    """
    begin = engine.empty(requires_grad=True)
    with torch.enable_grad():
        end: Tensor = _Detour.apply(begin, device)  # type: ignore[no-untyped-call]  # untyped in torch
    engine.run(
        [end],
        [torch.empty(0, device=device)],
        [begin],
        retain_graph=False,
        accumulate=False,
        known_as=engine.running.known_as,
    )
