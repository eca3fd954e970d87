"""Parameters that are gathered while a module computes, and freed afterwards.

If autograd saves such a parameter for backward, itself or views of it, the saved tensor is the shard, which
is gathered again when backward needs it. Values computed from the parameter are saved as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from rpc.runtime.torch_internals import top_saved_tensors_hooks
from spmd.engine.driver.aliases import Alias, Value, read
from spmd.engine.driver.current import engine
from spmd.engine.driver.logical_tensor import LogicalTensor, alias_of, wrap
from spmd.engine.program.program import REPLICATED, Layout

__all__ = ["gathered", "keep_changes", "saving_shards"]


def gathered(parameter: Tensor) -> Tensor:
    """A parameter, whole; its gradient comes back in the layout of the parameter."""
    whole: Tensor = _Gathered.apply(parameter)  # type: ignore[no-untyped-call]
    return whole


def keep_changes(parameter: Tensor, whole: Tensor | None) -> None:
    """Write to the shard what a module has changed in the whole, as ``nn.Embedding(max_norm=1.0)`` does."""
    if isinstance(whole, LogicalTensor) and type(whole._alias) is _Whole and whole._alias.version:
        with torch.no_grad():
            parameter.copy_(whole)


@contextlib.contextmanager
def saving_shards() -> Iterator[None]:
    """Have autograd save shards of what is ``gathered`` in here.

    Where others say already what is saved, as PyTorch's ``checkpoint`` does, it is for them.
    """
    if top_saved_tensors_hooks(True) is not None:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
        yield


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        recorder = engine().recorder
        with recorder.lock:
            value = read(recorder, alias_of(parameter))
            ctx.shard = _Shard(value, parameter)
            ctx.layout = value.spec.layout
            return wrap(_Whole(ctx.shard))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        ctx.shard.refuse_change()
        laid_out: Tensor = _LaidOut.apply(gradient, ctx.layout)  # type: ignore[no-untyped-call]
        return laid_out


class _LaidOut(torch.autograd.Function):
    """A gradient, as its parameter is cut. It has gradients, too."""

    @staticmethod
    def forward(_: Any, gradient: Tensor, layout: Layout) -> Tensor:
        recorder = engine().recorder
        alias = alias_of(gradient)
        with recorder.lock:
            value = recorder.moved(read(recorder, alias), layout)
            return wrap(Alias(value, alias.spec.laid_out(layout)))

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Shard:
    """The parameter as it was in forward, and the saved tensors that wait for it in backward.

    It is gathered once for all that was saved of it, however often the module has used it.
    """

    def __init__(self, value: Value, parameter: Tensor) -> None:
        self._value = value
        self._parameter = parameter
        self._version = parameter._version
        self._saved = self._left = 0
        self._again: _Whole | None = None
        self._changed = False

    def gather(self) -> Value:
        """The whole, gathered now."""
        return engine().recorder.redistributed(self._value, REPLICATED)

    def refuse_change(self) -> None:
        """Raise the error of one device if the parameter had changed when backward asked for it.

        It is not raised there: on the thread of a device, a hook that raises ends the process.
        """
        if self._changed:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: a parameter of shape {tuple(self._parameter.shape)} that is wrapped by FSDPv2; "
                "change parameters after backward"
            )

    def save(self) -> None:
        """Backward will ask for it, once more."""
        self._saved += 1
        self._left += 1

    def take(self) -> _Whole:
        """The whole, as long as somebody else is to come for it. The recorder is locked."""
        self._changed |= self._parameter._version != self._version
        found = self._again or _Whole(self)
        self._left -= 1
        if self._left <= 0:  # another backward over the same graph gathers once more
            self._again, self._left = None, self._saved
        else:
            self._again = found
        return found


class _Whole(Alias):
    """A parameter that is gathered."""

    __slots__ = ("shard",)

    def __init__(self, shard: _Shard) -> None:
        value = shard.gather()
        super().__init__(value, value.spec)
        self.shard = shard


class _Saved:
    """A view of a parameter that is gathered, or itself: the shard, and the views."""

    __slots__ = ("_links", "_shard")

    def __init__(self, shard: _Shard, links: list[Alias]) -> None:
        self._shard = shard
        self._links: Final = [(each.step, each.spec) for each in links]
        shard.save()

    def tensor(self) -> Tensor:
        """It, of a parameter that is gathered again."""
        recorder = engine().recorder
        with recorder.lock:
            alias: Alias = self._shard.take()
        for step, spec in self._links:
            assert step is not None
            alias = Alias(None, spec, alias, step)
        return wrap(alias)


def _pack(tensor: Tensor) -> Any:
    if not isinstance(tensor, LogicalTensor):
        return tensor
    alias = tensor._alias
    links: list[Alias] = []
    while alias.parent is not None:
        links.insert(0, alias)
        alias = alias.parent
    if type(alias) is not _Whole or alias.version:  # it is no such parameter, or was changed since
        return tensor
    return _Saved(alias.shard, links)


def _unpack(saved: Any) -> Any:
    return saved.tensor() if type(saved) is _Saved else saved
