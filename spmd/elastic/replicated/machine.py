"""The object that a copy has, and the optimizers of its parameters: runs methods, and copies the whole."""

from __future__ import annotations

import copy
import inspect
import io
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from dist_autograd.contexts import current
from dist_optim.local_optimizer import LocalOptimizer, OptimizerFactory, make_local_optimizer
from rpc.runtime.interrupts import is_interruption
from rpc.runtime.torch_internals import pytree
from rpc.serialization.exception_state import to_keep
from rref import RRef
from spmd.elastic.replicated.order import Outcome

__all__ = ["OBJECT", "WHOLE", "Method", "ObjectMachine", "check_not_inside", "owned"]

OBJECT: Final = -1
"""Target of a call: the object. Its optimizers are numbered from 0 on."""

WHOLE: Final = -2
"""Target of a call: the object together with its optimizers."""


class Method(NamedTuple):
    """What a call runs.

    Attributes:
        target: number of an optimizer, ``OBJECT``, or ``WHOLE``.
        name: of the method.
        args, kwargs: its arguments.
        tracked: whether gradients of the arguments are wanted.
    """

    target: int
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tracked: bool = False

    def detached(self) -> Method:
        """Return the same without gradients, for other copies."""
        args, kwargs = pytree.tree_map_only(Tensor, Tensor.detach, (self.args, dict(self.kwargs)))
        return self._replace(args=args, kwargs=kwargs)


class _ThisThread(threading.local):
    is_inside: bool = False
    """Whether the current thread runs a method of a replicated object."""


_this_thread: Final = _ThisThread()


def check_not_inside() -> None:
    """Raise ``RuntimeError`` if this thread runs a method of a replicated object."""
    if _this_thread.is_inside:
        raise RuntimeError(
            "a method of a replicated object has called a replicated object: methods run on each copy, so "
            "that call would run several times. Make it from the caller"
        )


def owned(value: Any, *, tracked: bool = False) -> Any:
    """Return a copy that no other code changes; with ``tracked``, gradients flow through it."""
    leaves, tree = pytree.tree_flatten(value)
    return pytree.tree_unflatten([_owned(leaf, tracked) for leaf in leaves], tree)


def _owned(leaf: Any, tracked: bool) -> Any:
    if not isinstance(leaf, Tensor):
        return copy.deepcopy(leaf)
    if tracked and leaf.requires_grad:
        return leaf.clone()
    return leaf.detach().clone().requires_grad_(leaf.requires_grad and leaf.is_leaf)


class ObjectMachine:
    """See ``order.Machine``. For one thread at a time.

    Attributes:
        maker: makes the object.
        live: the value of the last call, with gradients, if it was made in an autograd context.
    """

    def __init__(self, maker: Callable[[], Any]) -> None:
        self.maker = maker
        self._object: Any = None
        self._optimizers: list[tuple[Any, LocalOptimizer] | None] = []
        """By number: the arguments of ``make_optimizer``, and what it has made; None if that is dropped."""
        self.live: Any = None

    def make(self) -> None:
        """Make the object; its first copy."""
        self._object = self.maker()

    # ---- methods

    def run(self, what: Method) -> Outcome:
        """See ``order.Machine``. What the method raises is an outcome."""
        self.live = None
        _this_thread.is_inside = True
        try:
            value = getattr(self._target(what.target), what.name)(*what.args, **what.kwargs)
            if inspect.isawaitable(value) or isinstance(value, torch.futures.Future):
                raise TypeError(
                    f"{what.name} is asynchronous: methods of a replicated object return their values, since "
                    "they run one after the other"
                )
            tensors = [each for each in pytree.tree_leaves(value) if isinstance(each, Tensor)]
            tracked = any(
                each.requires_grad or (what.tracked and each.is_floating_point()) for each in tensors
            )
            if tracked and current.get() is not None:
                self.live = owned(value, tracked=True)
            return Outcome(owned(value), tracked=tracked)
        except BaseException as error:
            if is_interruption(error):
                raise
            if not isinstance(error, Exception):
                name = type(error).__name__
                error = RuntimeError(f"{what.name} has raised {name}, which ends no copy: {error}")
            return Outcome(None, to_keep(error))  # each copy remembers it: no frames
        finally:
            _this_thread.is_inside = False

    def _target(self, target: int) -> Any:
        if target == OBJECT:
            return self._object
        return self if target == WHOLE else self._optimizer(target)

    def _optimizer(self, number: int) -> LocalOptimizer:
        found = self._optimizers[number]
        if found is None:
            raise LookupError("the worker that has made this optimizer is gone, and the optimizer with it")
        return found[1]

    def count_parameters(self) -> int:
        """Return the number of the object's parameters."""
        return len(list(self._object.parameters()))

    def make_optimizer(
        self, session: int, optimizer_class: OptimizerFactory, numbers: Sequence[int], *how: Any
    ) -> tuple[int, list[list[int]]]:
        """Make an optimizer of the parameters with these numbers for a caller; see ``make_local_optimizer``.
        Returns its number, and the positions of its parameters.
        """
        optimizer, positions = self._made(optimizer_class, numbers, *how)
        self._optimizers.append(((session, optimizer_class, numbers, *how), optimizer))
        return len(self._optimizers) - 1, positions

    def _made(self, optimizer_class: OptimizerFactory, numbers: Sequence[int], *how: Any) -> Any:
        parameters = list(self._object.parameters())
        references = [RRef(parameters[number]) for number in numbers]
        made, positions = make_local_optimizer(optimizer_class, references, *how)
        return made.local_value(), positions

    def gradients(self, optimizer: int, context_id: int) -> list[Tensor | None]:
        """Return what an autograd context has for the parameters of an optimizer."""
        return self._optimizer(optimizer).gradients(context_id)

    def forget(self, session: int) -> None:
        """See ``order.Machine``. Optimizers keep their numbers."""
        self._optimizers = [None if each and each[0][0] == session else each for each in self._optimizers]

    # ---- copies

    def snapshot(self) -> Tensor:
        """See ``order.Machine``. An object that cannot be pickled is asked for its ``state_dict``."""
        optimizers = [each and (each[0], each[1].state_dict()) for each in self._optimizers]
        try:
            return _packed((self._object, None, optimizers))
        except Exception:
            if not hasattr(self._object, "state_dict") or not hasattr(self._object, "load_state_dict"):
                raise
        return _packed((None, self._object.state_dict(), optimizers))

    def restore(self, state: Tensor) -> None:
        """See ``order.Machine``."""
        # From a member of the group, which may run any code here.
        found, parts, optimizers = torch.load(io.BytesIO(state.numpy().tobytes()), weights_only=False)
        if parts is not None:
            self.make()
            self._object.load_state_dict(parts)
        else:
            self._object = found
        self._optimizers = []
        for each in optimizers:
            if each is None:
                self._optimizers.append(None)
                continue
            spec, part = each
            number, _ = self.make_optimizer(*spec)
            self._optimizer(number).load_state_dict(part)


def _packed(state: Any) -> Tensor:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
