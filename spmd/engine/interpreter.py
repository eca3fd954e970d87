"""Runs a program on one worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spmd.engine.program import (
    GET_RNG_STATE,
    REDISTRIBUTE,
    SEED,
    SET_RNG_STATE,
    MeshKey,
    Program,
    Ref,
    Scalar,
)

__all__ = ["InstructionError", "LinkedProgram"]


class InstructionError(RuntimeError):
    """An instruction has failed.

    Attributes:
        index: its number in the program.
        cause: what it raised.
    """

    def __init__(self, index: int, cause: Exception) -> None:
        super().__init__(index, cause)
        self.index, self.cause = index, cause


class LinkedProgram:
    """A program, ready to run on one worker."""

    def __init__(self, program: Program, rank: int, meshes: Callable[[MeshKey], DeviceMesh]) -> None:
        self._program = program
        self._rank = rank

    def run(self, inputs: list[Tensor], scalars: Sequence[Any]) -> list[Tensor]:
        """The outputs, for these local inputs."""
        values: list[Any] = list(inputs)

        def fill(tree: Any) -> Any:
            if type(tree) is Ref:
                return values[tree.index]
            if type(tree) is Scalar:
                return scalars[tree.index]
            if type(tree) in (list, tuple):
                return [fill(each) for each in tree]
            return tree

        for index, each in enumerate(self._program.instructions):
            try:
                args = [fill(arg) for arg in each.args]
                results = _run(each.operator, args, {name: fill(arg) for name, arg in each.kwargs})
            except Exception as error:
                raise InstructionError(index, error) from error
            values += results
        return [values[output] for output in self._program.outputs]


def _run(operator: str, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
    if operator == REDISTRIBUTE:
        return [args[0]]
    if operator == SEED:
        torch.manual_seed(args[0])
        return []
    if operator == GET_RNG_STATE:
        return [torch.get_rng_state()]
    if operator == SET_RNG_STATE:
        torch.set_rng_state(args[0])
        return []
    packet, _, overload = operator.removeprefix("aten::").partition(".")
    if operator == "aten::view":
        return [args[0].reshape(args[1])]
    with torch.no_grad():
        result = getattr(getattr(torch.ops.aten, packet), overload or "default")(*args, **kwargs)
    return _flat(result)


def _flat(tree: Any) -> list[Any]:
    if isinstance(tree, (list, tuple)):
        return [leaf for each in tree for leaf in _flat(each)]
    return [tree]
