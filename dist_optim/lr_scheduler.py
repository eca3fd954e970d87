"""Learning-rate schedules for distributed optimizers."""

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
    """An owner's part of a schedule. Called remotely.

    Args:
        optimizer: of this worker.
        scheduler_class: what makes the schedule, out of the optimizer and the arguments.
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
        """Takes one step of the schedule."""
        with self._local.held():
            self._scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[Any]:
        """The learning rate of each parameter group."""
        with self._local.held():
            return copy.deepcopy(self._scheduler.get_last_lr())

    def state_dict(self) -> dict[str, Any]:
        """A copy of the schedule's state."""
        with self._local.held():
            return copy.deepcopy(self._scheduler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a state that ``state_dict`` gave."""
        with self._local.held():
            self._scheduler.load_state_dict(state)


class DistributedLRScheduler:
    """A learning-rate schedule of a distributed optimizer. Made by ``DistributedOptimizer.lr_scheduler``.

    All owners have the same schedule and take the same steps, so the state of one stands for all.

    Args:
        parts: one on each owner.
    """

    def __init__(self, parts: Mapping[str, RRef[LocalScheduler]]) -> None:
        self._parts = dict(parts)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Takes one step of the schedule on all owners, and waits for them.

        Args:
            *args: what the schedule's own ``step`` takes: nothing, or the metric for ``ReduceLROnPlateau``.
            **kwargs: the same.
        """
        on_all_objects(self._parts, "step", lambda local: local.step(*args, **kwargs))

    def get_last_lr(self) -> list[Any]:
        """The learning rate of each parameter group, as the latest step has left it."""
        rates: list[Any] = self._first().rpc_sync().get_last_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        """What ``load_state_dict`` takes: the schedule's own ``state_dict``."""
        state: dict[str, Any] = self._first().rpc_sync().state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a saved state, on all owners. Load the optimizer's as well: it has the rates."""
        on_all_objects(self._parts, "load_state_dict", lambda local: local.load_state_dict(state))

    def _first(self) -> RRef[LocalScheduler]:
        return next(iter(self._parts.values()))
