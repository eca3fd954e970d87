"""Where the inputs of an operation must lie, and where its results do then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch._ops import OpOverload

from spmd.engine.program import REPLICATED, Layout, Meta

__all__ = ["Propagated", "decompose", "propagate"]


@dataclass(frozen=True, slots=True)
class Propagated:
    """An operation's layouts.

    Attributes:
        inputs: where each tensor argument must lie, in flattened order.
        results: where each result lies, in flattened order.
        note: why something is moved or replicated, for the report.
    """

    inputs: tuple[Layout, ...]
    results: tuple[Layout, ...]
    note: str | None = None


def decompose(operator: OpOverload) -> Callable[..., Any] | None:
    """A composition of other operations, to be recorded in an operation's place."""
    return None


def propagate(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Propagated:
    """The layouts of an operation, given ``Meta`` s in place of tensors."""
    count = 0

    def visit(tree: Any) -> None:
        nonlocal count
        if isinstance(tree, Meta):
            count += 1
        elif isinstance(tree, (list, tuple)):
            for each in tree:
                visit(each)

    visit((args, tuple(kwargs.values())))
    return Propagated((REPLICATED,) * count, (REPLICATED,) * 4096)
