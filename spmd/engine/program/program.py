"""Programs recorded on the driver and run by workers: operations on whole tensors, without aliases.

A *program* is in single-assignment form: each instruction makes new values from earlier ones, and changes
none. In-place operations and writes through views were converted while they were recorded. The layout of a
value is part of the program: the driver decides it, and each redistribution is an instruction of its own,
``spmd::redistribute``. So what a worker does follows from the program and its rank.

Numbers that change from run to run (a learning rate, Adam's bias corrections) are arguments of the program:
two steps of a training loop are one program, which is sent once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.distributed.tensor.placement_types import Placement, Replicate

__all__ = [
    "FROM_LOCAL",
    "GET_RNG_STATE",
    "REDISTRIBUTE",
    "REPLICATED",
    "SEED",
    "SET_RNG_STATE",
    "TO_LOCAL",
    "Instruction",
    "Layout",
    "MeshKey",
    "Meta",
    "Program",
    "Ref",
    "Scalar",
    "read_by",
]

REDISTRIBUTE: Final = "spmd::redistribute"
"""``(value, layout)``: the same tensor, redistributed."""

SEED: Final = "spmd::manual_seed"
"""``(seed,)``: seeds the generator that is the same on all workers. Makes no value."""

GET_RNG_STATE: Final = "spmd::get_rng_state"
"""``()``: the state of that generator, as ``torch.get_rng_state`` gives it, a replicated tensor."""

SET_RNG_STATE: Final = "spmd::set_rng_state"
"""``(state,)``: puts that generator into a state. Makes no value."""

TO_LOCAL: Final = "spmd::to_local"
"""``(value, shape)``: each worker's shard, padded with zeros to this shape, as a replicated value."""

FROM_LOCAL: Final = "spmd::from_local"
"""``(value,)``: the reverse: the value whose shards these are."""


@dataclass(frozen=True, slots=True)
class MeshKey:
    """All workers, arranged as a mesh.

    Attributes:
        devices: numbers of the workers, row by row; each of them once.
        shape: shape of the mesh.
    """

    devices: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Layout:
    """The layout of a tensor.

    Layouts are compared for each operation, so the time of that must not depend on the number of workers.

    Attributes:
        mesh: the mesh; None for a tensor that is replicated on every worker, which holds for any mesh.
        placements: DTensor's placements, one for each dimension of the mesh.
    """

    mesh: MeshKey | None = None
    placements: tuple[Placement, ...] = ()
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.mesh, self.placements)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Layout) or self._hash != other._hash:
            return False
        return self.mesh == other.mesh and self.placements == other.placements

    def __reduce__(self) -> Any:
        return Layout, (self.mesh, self.placements)

    @classmethod
    def of(cls, mesh: MeshKey, placements: tuple[Placement, ...]) -> Layout:
        """Return the layout with these placements; ``REPLICATED`` if all of them are ``Replicate``."""
        if all(type(each) is Replicate for each in placements):
            return REPLICATED
        return cls(mesh, placements)

    def is_partial(self) -> bool:
        """Whether the tensor is a reduction of the workers' terms that is still to be done."""
        return any(each.is_partial() for each in self.placements)


REPLICATED: Final = Layout()


@dataclass(frozen=True, slots=True)
class Meta:
    """A value: shape and strides are those of the whole tensor on one device."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout = REPLICATED


@dataclass(frozen=True, slots=True)
class Ref:
    """A value of a program, in the arguments of an instruction: inputs come first, then results in order."""

    index: int


def read_by(arguments: object) -> Iterator[int]:
    """The values that arguments of an instruction refer to, in order."""
    if isinstance(arguments, Ref):
        yield arguments.index
    elif isinstance(arguments, (list, tuple)):
        for each in arguments:
            yield from read_by(each)


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number that is an argument of the program, in the arguments of an instruction."""

    index: int


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operation.

    Attributes:
        operator: name such as ``aten::add.Tensor``, of the functional overload; or one of this module's.
        args, kwargs: arguments with ``Ref`` and ``Scalar``, also inside lists and tuples. Devices are left
            out.
        results: the values that it makes, in the order of the operator's (flattened) results. None if the
            operator returns None, or for an unused tensor.
    """

    operator: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    results: tuple[Meta | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """The operations recorded between two flushes.

    Attributes:
        inputs: values that earlier programs made, or that are sent with the run.
        instructions: instructions in order. Values are numbered in this order: inputs, then every entry of
            ``results`` of each instruction.
        outputs: numbers of the values that later programs may use; the others are freed.
        default_dtype: PyTorch's default dtype while it runs.
    """

    inputs: tuple[Meta, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[int, ...]
    default_dtype: torch.dtype = torch.float32
