"""An owner's part of a distributed optimizer: the optimizer of its own parameters."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice, repeat
from operator import is_not
from typing import Any

import torch
from torch import Tensor

from dist_autograd.api import autograd
from dist_autograd.contexts import Context
from rpc.api import get_worker_info
from rpc.errors import with_article
from rpc.runtime import spans
from rref import RRef

__all__ = ["LocalOptimizer", "OptimizerFactory", "make_local_optimizer", "mark_as_copy", "mark_as_shard"]

OptimizerFactory = Callable[..., torch.optim.Optimizer]


def mark_as_copy(parameter: Tensor) -> None:
    """Mark a parameter of which another worker has a copy with the same gradient, which is counted in norms
    there.
    """
    parameter.is_copy_of_another_workers = True  # type: ignore[attr-defined]


def mark_as_shard(parameter: Tensor) -> None:
    """Mark a parameter of a model that is differentiated by calls of its shards: its gradient may enter a
    context after this worker's own part of the backward has ended.
    """
    parameter.is_shard_of_a_model = True  # type: ignore[attr-defined]


class LocalOptimizer:
    """Optimizes parameters of this worker with the gradients of a context. Called remotely, and concurrently.

    While it works, no other optimizer of this process works on the same parameters.

    Args:
        optimizer_class: makes the optimizer from the parameters and the arguments.
        parameters: the parameters, without duplicates.
        groups: for each parameter group its number of parameters, in this order, and its options; None if
            there are no groups.
        args: positional arguments after the parameters.
        kwargs: keyword arguments.
        stale_gradients: whether a backward pass under way may continue with parameters that a step has
        changed.

    Attributes:
        waits_for_backward: whether this worker's gradients may be incomplete at the end of its part of a
            backward.
    """

    def __init__(
        self,
        optimizer_class: OptimizerFactory,
        parameters: Sequence[Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        groups: Sequence[tuple[int, Mapping[str, Any]]] | None = None,
        stale_gradients: bool = True,
    ) -> None:
        self._parameters = list(parameters)
        self.waits_for_backward = any(hasattr(each, "is_shard_of_a_model") for each in parameters)
        # A tensor's `data` shares its memory but not its version counter: a backward pass that needs the
        # parameter does not detect that it was changed.
        self._optimized = [each.data for each in parameters] if stale_gradients else self._parameters
        optimized = self._optimized if groups is None else _grouped(self._optimized, groups)
        self._optimizer = _steps_alone(optimizer_class(optimized, *args, **kwargs))
        self._locks = autograd().models.locks.of(self._parameters)

    @contextlib.contextmanager
    def held(self) -> Iterator[torch.optim.Optimizer]:
        """Hold the optimizer exclusively inside the block, on devices as well: the work of the block follows
        that of earlier holders, and later ones wait for it.
        """
        with self._locks.held(), _updates(self._optimizer):
            yield self._optimizer

    def step(self, context_id: int) -> None:
        """Perform one step with the gradients of a context. Parameters without a gradient are skipped."""
        with self._locks.held(), _updates(self._optimizer):
            self._step(self.gradients(context_id))

    def step_with(self, gradients: Sequence[Tensor | None]) -> None:
        """Perform one step with these gradients; see ``gradients``."""
        with self._locks.held(), _updates(self._optimizer):
            self._step(gradients)

    def gradients(self, context_id: int) -> list[Tensor | None]:
        """Return the gradient that a context has for each parameter, or None."""
        context = _known(context_id)
        return [None] * len(self._parameters) if context is None else context.gradients_of(self._parameters)

    def _step(self, gradients: Sequence[Tensor | None]) -> None:
        optimized = self._optimized
        before = [parameter.grad for parameter in optimized]
        count = sum(map(is_not, gradients, repeat(None)))
        try:
            if optimized is not self._parameters:
                for alias, parameter in zip(optimized, self._parameters, strict=True):
                    if alias.data_ptr() != parameter.data_ptr():
                        alias.data = parameter.data  # the parameter's memory was replaced
            for parameter, gradient in zip(optimized, gradients, strict=True):
                parameter.grad = gradient
            with spans.span("optimizer step", parameters=count):
                self._optimizer.step()
        finally:
            for parameter, gradient in zip(optimized, before, strict=True):
                parameter.grad = gradient

    def norms(self, context_id: int, norm_type: float) -> Tensor:
        """Return the norm of each gradient that the context has for these parameters; shape (number of
        gradients,).

        Gradients without elements are skipped, as some norms are not defined for them. So are those of
        parameters that another worker counts.
        """
        found = [
            _elements(gradient)
            for parameter, gradient in zip(self._parameters, self.gradients(context_id), strict=True)
            if gradient is not None and not hasattr(parameter, "is_copy_of_another_workers")
        ]
        norms = [torch.linalg.vector_norm(elements, norm_type) for elements in found if elements.numel()]
        if not norms:
            return torch.zeros(0, device="cpu")
        of_device: dict[torch.device, list[Tensor]] = {}
        for norm in norms:
            of_device.setdefault(norm.device, []).append(norm)
        # One wait for each device, not one for each gradient.
        return torch.cat([torch.stack(each).cpu() for each in of_device.values()])

    def scale(self, context_id: int, factor: float) -> None:
        """Multiply the gradients that the context has for these parameters by ``factor``."""
        context = _known(context_id)
        if context is not None:
            # Out of place: two leaves may share one tensor as their gradient.
            context.change(self._parameters, lambda gradient: gradient * factor)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the optimizer's state, as ``torch.optim.Optimizer.state_dict`` returns it."""
        with self.held() as optimizer:
            return copy.deepcopy(optimizer.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that ``state_dict`` returned."""
        with self.held() as optimizer:
            optimizer.load_state_dict(state)


def _grouped(
    parameters: Iterable[Tensor], groups: Sequence[tuple[int, Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """Return the parameters in the form in which ``torch.optim`` takes groups."""
    rest = iter(parameters)
    return [{**options, "params": list(islice(rest, count))} for count, options in groups]


def _steps_alone(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer if its ``step`` needs no argument, otherwise raise ``TypeError``."""
    needed = [
        parameter.name
        for parameter in inspect.signature(optimizer.step).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise TypeError(
            f"each step of {type(optimizer).__name__} needs a {needed[0]}, to compute the loss again while "
            "it steps, which the owner of one part of a model cannot do: choose an optimizer that needs "
            "only gradients"
        )
    return optimizer


def _updates(optimizer: object) -> AbstractContextManager[Any]:
    """Let an optimizer use and change its parameters and its state inside the block, after earlier changes
    and before later uses. Called with the locks held.
    """
    return autograd().contexts.requests.border.updating(optimizer)


def _known(context_id: int) -> Context | None:
    """Return a context; None if nothing of it was computed here.

    Raises:
        WorkerLostError: it is over because of a loss.
    """
    contexts = autograd().contexts
    found = contexts.find(context_id)
    if found is None:
        contexts.check(context_id)
    return found


def _elements(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def make_local_optimizer(
    optimizer_class: OptimizerFactory,
    references: Sequence[RRef[Tensor]],
    placed: Sequence[Sequence[int]],
    options: Sequence[Mapping[str, Any]] | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    stale_gradients: bool,
) -> tuple[RRef[LocalOptimizer], list[list[int]]]:
    """Make the optimizer for parameters of this worker. Called remotely.

    Args:
        optimizer_class: as for ``LocalOptimizer``.
        references: references to the parameters, group by group; a tied parameter may occur several times.
        placed: for each group the positions of its references among those that the user gave.
        options: options of each group; None if the user gave no groups.
        args: as for ``LocalOptimizer``.
        kwargs: as for ``LocalOptimizer``.
        stale_gradients: as for ``LocalOptimizer``.

    Returns:
        A reference to the optimizer, and for each group the positions of its parameters; for a tied parameter
        the first one.

    Raises:
        TypeError: a reference is to something other than a tensor.
        ValueError: a tensor is no leaf, or a parameter is in several groups.
    """
    found: dict[Tensor, tuple[int, int]] = {}
    following = iter(references)
    for group, positions in enumerate(placed):
        for position, reference in zip(positions, following, strict=False):
            where = f"params_rref[{position}]" if options is None else f"reference {position} of all groups"
            parameter = _parameter(reference, where)
            first, before = found.setdefault(parameter, (position, group))
            if before != group:
                raise ValueError(
                    f"references {first} and {position} are to one parameter on worker "
                    f"'{get_worker_info().name}', in the parameter groups {before} and {group}: it can be in "
                    "one only"
                )
    kept = [
        [position for position, group in found.values() if group == number] for number in range(len(placed))
    ]
    groups = None if options is None else list(zip(map(len, kept), options, strict=True))
    optimizer = LocalOptimizer(
        optimizer_class, list(found), args, kwargs, groups=groups, stale_gradients=stale_gradients
    )
    return RRef(optimizer), kept


def _parameter(reference: RRef[Tensor], where: str) -> Tensor:
    parameter = reference.local_value()
    if not isinstance(parameter, Tensor):
        raise TypeError(
            f"{where} refers to {with_article(type(parameter))} on worker "
            f"'{get_worker_info().name}': DistributedOptimizer takes references to tensors, such as those of "
            "RemoteModule.remote_parameters()"
        )
    if not parameter.is_leaf:  # of a copy that shares its memory, torch.optim does not see it
        raise ValueError(
            f"can't optimize a non-leaf Tensor: {where} refers to a tensor of shape {tuple(parameter.shape)} "
            f"on worker '{get_worker_info().name}' that is the result of an operation "
            f"({type(parameter.grad_fn).__name__}), and gradients are kept for leaves only: pass a reference "
            "to the parameter that it is computed from, or make it a leaf, with .detach().requires_grad_()"
        )
    return parameter
