"""``torchft.optim``: an optimizer whose steps are those of a ``Manager``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from farcall.compat.torchft.manager import Manager

__all__ = ["OptimizerWrapper"]


class OptimizerWrapper(Optimizer):
    """An optimizer whose ``zero_grad`` begins a step, and whose ``step`` runs if it is committed on all.

    Args:
        manager: the manager.
        optim: the optimizer.
    """

    def __init__(self, manager: Manager, optim: Optimizer) -> None:
        self.manager, self.optim = (
            manager,
            optim,
        )  # the base class is not initialized: its state is ``optim``'s

    def __getattr__(self, name: str) -> Any:
        if name in ("manager", "optim"):
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __repr__(self) -> str:
        return f"Optimizer({self.optim!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an Optimizer of torchft's names cannot be pickled: pickle its state_dict()")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a step, and reset the gradients."""
        self.manager.start_quorum()
        self.optim.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Run the optimizer, if the step is committed on all members.

        Raises:
            TypeError: a closure is given.
        """
        if closure is not None:
            raise TypeError("step of torchft's Optimizer takes no closure")
        if self.manager.should_commit():
            self.optim.step()
