"""What the generator knows of the values of a program that it is making."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

from tests.fuzz.autograd.operations import OPERATIONS, Kind
from tests.fuzz.autograd.program import Body, Numbers


@dataclass(eq=False)
class Memory:
    """What values that are views of each other share."""

    requires_grad: bool = False
    frozen: bool = False
    """It is never changed in place any more: a leaf, saved for backward, or referred to from elsewhere."""
    changed: bool = False
    """It has been changed in place."""
    kept: bool = False
    """Other bodies may see it."""


@dataclass(eq=False)
class Value:
    name: str
    kind: Kind
    memory: Memory
    tensor: object = field(default_factory=object)
    """The same for names of the same Python object."""
    final: bool = False
    overlaps: bool = False
    table: bool = False
    """A leaf without a hook, or a copy of one: its gradient may be sparse."""
    owner: int = 0
    target: tuple[Value, ...] = ()
    """Of a reference, what it refers to, and where."""


Slots = dict[int, list[Value]]
"""By worker, the values that bodies before this one have kept there."""


@dataclass
class Pending:
    """A call that may still run: what it keeps is not to be seen before it has been waited for."""

    results: list[Value]
    slots: Slots


class Draft:
    """What all bodies of one program share.

    Attributes:
        large: large tensors travel in many messages, and their gradients back. That takes time, so it is not
            so in every program.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.workers = self.random.randint(2, 4)
        self.numbers = self.random.choice(list(Numbers))
        self.large = self.random.random() < 0.3
        self.budget = self.random.choice((12, 25, 50))
        self.pending = 0
        self.bodies: list[Body | None] = []
        self._names = 0
        self._steps = 0
        self.operations = [name for name, rule in OPERATIONS.items() if rule.numbers in (None, self.numbers)]

    def name(self) -> str:
        """A new name."""
        self._names += 1
        return f"v{self._names}"

    def number(self) -> int:
        """A new step's number."""
        self._steps += 1
        self.budget -= 1
        return self._steps

    def same(self, value: Value, name: str) -> Value:
        """The same object under another name."""
        return replace(value, name=name)

    def copies(self, values: Sequence[Value], grad: bool) -> list[Value]:
        """What arrives when values are sent: a tensor that occurs twice arrives as one."""
        memories: dict[object, Value] = {}
        copies = []
        for value in values:
            requires_grad = grad and value.memory.requires_grad
            copy = Value(self.name(), value.kind, Memory(requires_grad), owner=value.owner)
            copy.target = value.target
            copy.final = copy.overlaps = value.overlaps
            copy.table = value.table and not value.memory.changed
            first = memories.setdefault(value.tensor, copy)
            copy.memory, copy.tensor = first.memory, first.tensor
            copies.append(copy)
        return copies
