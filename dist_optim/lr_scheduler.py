"""Learning-rate schedulers for distributed optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dist_optim.fan_out import on_all_objects
from dist_optim.local_optimizer import LocalOptimizer
from rref import RRef

__all__ = ["DistributedLRScheduler", "LocalScheduler", "SchedulerFactory"]

SchedulerFactory = Callable[..., torch.optim.lr_scheduler.LRScheduler]


class LocalScheduler:
    """An owner's part of a scheduler. Called remotely.

    Args:
        optimizer: the local optimizer of this worker.
        scheduler_class: makes the scheduler from the optimizer and the arguments.
        args: positional arguments after the optimizer.
        kwargs: keyword arguments.
    """

    def __init__(
        self,
        optimizer: RRef[LocalOptimizer],
        scheduler_class: SchedulerFactory,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._local = optimizer.local_value()
        with self._local.held() as own:
            self._scheduler = scheduler_class(own, *args, **kwargs)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Perform one step of the scheduler."""
        with self._local.held():
            self._scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[Any]:
        """Return the learning rate of each parameter group."""
        with self._local.held():
            return copy.deepcopy(self._scheduler.get_last_lr())

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the scheduler's state."""
        with self._local.held():
            return copy.deepcopy(self._scheduler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that ``state_dict`` returned."""
        with self._local.held():
            self._scheduler.load_state_dict(state)


class DistributedLRScheduler:
    """A learning-rate scheduler of a distributed optimizer. Made by ``DistributedOptimizer.lr_scheduler``.

    All owners have the same scheduler and perform the same steps, so their states are equal.

    Args:
        parts: a reference to the local scheduler on each owner.
    """

    def __init__(self, parts: Mapping[str, RRef[LocalScheduler]]) -> None:
        self._parts = dict(parts)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Perform one step of the scheduler on all owners, and wait for them.

        Args:
            *args: the arguments of the scheduler's own ``step``: none, or the metric for
            ``ReduceLROnPlateau``. **kwargs: its keyword arguments.
        """
        on_all_objects(self._parts, "step", lambda local: local.step(*args, **kwargs))

    def get_last_lr(self) -> list[Any]:
        """Return the learning rate of each parameter group after the latest step."""
        rates: list[Any] = self._first().rpc_sync().get_last_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's own ``state_dict``, for ``load_state_dict``."""
        state: dict[str, Any] = self._first().rpc_sync().state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state on all owners. Load the optimizer's state as well: it has the learning rates."""
        on_all_objects(self._parts, "load_state_dict", lambda local: local.load_state_dict(state))

    def _first(self) -> RRef[LocalScheduler]:
        return next(iter(self._parts.values()))
