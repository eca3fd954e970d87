"""``torchft.local_sgd``: averages once in some steps of an optimizer. After a loss only that is repeated."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from farcall.compat.torchft.manager import Manager
from rpc.errors import InvalidOptionError

__all__ = ["DiLoCo", "LocalSGD"]


class _EverySteps:
    """Calls ``sync`` after each ``sync_every`` steps of an optimizer, within a ``with`` block."""

    def __init__(self, optimizer: Optimizer, sync_every: int) -> None:
        if sync_every < 1:
            raise InvalidOptionError(f"sync_every is {sync_every}; it must be a positive integer")
        self._local, self._every, self._steps = optimizer, sync_every, 0
        self._hook: Any = None

    def __enter__(self) -> Self:
        self._hook = self._local.register_step_post_hook(self._count)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.remove()

    def _count(self, *_: object) -> None:
        self._steps += 1
        if self._steps % self._every == 0:
            self.sync()

    def sync(self) -> None:
        """Average now."""
        raise NotImplementedError


def _averages(manager: Manager, mine: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the averages of tensors over the participants, once they are committed on all. A quorum has
    begun.
    """
    while True:
        averages = [each.clone() for each in mine]
        for each in averages:
            manager.allreduce(each)
        if manager.should_commit():
            return averages
        manager.start_quorum()


class LocalSGD(_EverySteps):
    """Averages the parameters of a model.

    Args:
        manager: the manager.
        model: the model.
        optimizer: its steps are counted.
        sync_every: number of steps between two averages.
    """

    def __init__(self, manager: Manager, model: nn.Module, optimizer: Optimizer, sync_every: int) -> None:
        super().__init__(optimizer, sync_every)
        self._manager, self._parameters = manager, [each for each in model.parameters() if each.requires_grad]

    @torch.no_grad()
    def sync(self) -> None:
        self._manager.start_quorum()
        mine = [each.detach() for each in self._parameters]
        for parameter, average in zip(mine, _averages(self._manager, mine), strict=True):
            parameter.copy_(average)


class _Fragment:
    """A part of the model, its parameters at the last average, and its outer optimizer."""

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        self._parameters = [each for each in module.parameters() if each.requires_grad]
        self._optimizer = optimizer
        self._kept = [each.detach().clone() for each in self._parameters]

    def state(self) -> dict[str, Any]:
        return {"parameters": self._kept, "optimizer": self._optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self._kept = [each.clone() for each in state["parameters"]]
        self._optimizer.load_state_dict(state["optimizer"])

    @torch.no_grad()
    def sync(self, manager: Manager) -> None:
        moves = [kept - now.detach() for kept, now in zip(self._kept, self._parameters, strict=True)]
        averages = _averages(manager, moves)
        others = {each for group in self._optimizer.param_groups for each in group["params"]}
        gradients = [each.grad for each in others]
        for parameter in others:
            parameter.grad = None  # of other fragments that have the same optimizer
        for parameter, kept, average in zip(self._parameters, self._kept, averages, strict=True):
            parameter.copy_(kept)
            parameter.grad = average
        self._optimizer.step()
        for parameter, gradient in zip(others, gradients, strict=True):
            parameter.grad = gradient
        self._kept = [each.detach().clone() for each in self._parameters]


class DiLoCo(_EverySteps):
    """Averages how far the parameters have moved, as the gradient of an outer optimizer. Fragments of the
    model take turns, so that each is averaged once in ``sync_every`` steps.

    Args:
        manager: the manager.
        model_fragments: parts of the model.
        inner_optimizer: its steps are counted.
        outer_optimizer: one for all fragments, or one for each.
        sync_every: a multiple of the number of fragments.
        backup_device, pin_memory, use_bucketization, bucket_cap_mb, should_quantize: have no effect.
        fragment_sync_delay, fragment_update_alpha: only 0 is supported.

    Raises:
        InvalidOptionError: an option is not supported.
    """

    def __init__(
        self,
        manager: Manager,
        model_fragments: Sequence[nn.Module],
        inner_optimizer: Optimizer,
        outer_optimizer: Optimizer | Sequence[Optimizer],
        sync_every: int,
        backup_device: object = None,
        pin_memory: bool = True,
        use_bucketization: bool = False,
        bucket_cap_mb: int | None = None,
        should_quantize: bool = False,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
    ) -> None:
        if fragment_sync_delay or fragment_update_alpha:
            raise InvalidOptionError(
                "DiLoCo: fragment_sync_delay and fragment_update_alpha must be 0: averages are not delayed"
            )
        count = len(model_fragments)
        outer = [outer_optimizer] * count if isinstance(outer_optimizer, Optimizer) else list(outer_optimizer)
        if not count or len(outer) != count or sync_every % count:
            raise InvalidOptionError(
                f"DiLoCo: {count} fragments need one outer optimizer or as many, not {len(outer)}, and "
                f"sync_every must be a multiple of {count}, not {sync_every}"
            )
        super().__init__(inner_optimizer, sync_every // count)
        self._manager, self._turn = manager, 0
        self._fragments = [
            _Fragment(module, optimizer) for module, optimizer in zip(model_fragments, outer, strict=True)
        ]
        for index, each in enumerate(self._fragments):
            manager.register_state_dict_fn(f"DiLoCo fragment {index}", each.load, each.state)
        manager.register_state_dict_fn("DiLoCo turn", self._set_turn, lambda: self._turn)

    def _set_turn(self, turn: int) -> None:
        self._turn = turn

    def sync(self) -> None:
        """Average the fragment whose turn it is."""
        self._manager.start_quorum()  # in which a newcomer loads the turn
        self._fragments[self._turn % len(self._fragments)].sync(self._manager)
        self._turn += 1
