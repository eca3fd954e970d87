"""A version that several parts make up: which blocks have been declared, and what is missing. Pure.

Parts declare their blocks before they write them. Two parts may declare the same block, as replicas do; the
first one writes it. Blocks that overlap otherwise are an error. Once all parts have declared theirs, the
blocks must make up all tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from farcall.weights.blocks import Box
from farcall.weights.errors import WeightsError
from farcall.weights.layout import Layout, Spec

__all__ = ["Assembly", "Declared"]

Declared = Mapping[str, Sequence[Box]]
"""The blocks of one part, by the name of their tensor."""


class _Blocks:
    """The distinct blocks of one tensor, and the part that writes each."""

    def __init__(self) -> None:
        self.writer: dict[Box, int] = {}
        self._bounds: list[np.ndarray[Any, Any]] = []  # one array of those in ``writer`` but the added ones
        self._added: list[Box] = []

    def overlaps(self, box: Box) -> Box | None:
        """Return a block that overlaps with another one; None if none does."""
        if not self.writer or not box.volume:
            return None
        if self._added:
            added = np.array(self._added, np.int64).reshape(len(self._added), 2, -1)
            self._bounds, self._added = [np.concatenate([*self._bounds, added])], []
        (bounds,) = self._bounds
        begins, ends = bounds[:, 0], bounds[:, 0] + bounds[:, 1]
        begin, size = np.array(box.offset, np.int64), np.array(box.sizes, np.int64)
        crossing = ((begins < begin + size) & (begin < ends) & (begins < ends)).all(axis=1)
        return list(self.writer)[int(crossing.argmax())] if crossing.any() else None

    def add(self, box: Box, part: int) -> None:
        if box not in self.writer:
            self.writer[box] = part
            self._added.append(box)

    def remove(self, part: int) -> None:
        left = {box: writer for box, writer in self.writer.items() if writer != part}
        self.writer, self._bounds, self._added = {}, [], []
        for box, writer in left.items():
            self.add(box, writer)


class Assembly:
    """The parts of one version.

    Args:
        parts: their number.
    """

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self.layout = Layout()
        self.declared: dict[int, dict[str, list[Box]]] = {}
        self._blocks: dict[str, _Blocks] = {}

    def declare(self, part: int, specs: Mapping[str, Spec], blocks: Declared) -> int | None:
        """Add a part; returns the size of the segment that it needs, or None.

        A part that is declared again, as it was before, changes nothing. After an error nothing has changed.

        Raises:
            WeightsError: the text names the tensor: its type or shape is another one than in other parts, its
                blocks overlap with those of other parts, or are not inside it; or this is the last part, and
                the blocks of all do not make up the tensor.
        """
        mine = {name: list(blocks[name]) for name in specs}
        self._check_specs(specs)
        before = self.declared.get(part)
        if before is not None:
            _check_same(part, before, mine)
            return None
        self._check_boxes(specs, mine)
        size = self.layout.add(specs)
        self.declared[part] = mine
        for name, boxes in mine.items():
            known = self._blocks.setdefault(name, _Blocks())
            for box in boxes:
                known.add(box, part)
        try:
            if len(self.declared) == self.parts:
                self._check_complete()
        except WeightsError:
            self.withdraw(part, added=size is not None)
            raise
        return size

    def withdraw(self, part: int, *, added: bool) -> None:
        """Undo the last ``declare``; ``added``: whether it returned a size."""
        del self.declared[part]
        for blocks in self._blocks.values():
            blocks.remove(part)
        if added:
            self.layout.remove_last()
        self._blocks = {name: each for name, each in self._blocks.items() if name in self.layout.entries}

    def writes(self, part: int) -> dict[str, list[Box]]:
        """Return the blocks that a part has to write."""
        return {
            name: [box for box in boxes if self._blocks[name].writer[box] == part]
            for name, boxes in self.declared[part].items()
        }

    def check_within(self, specs: Mapping[str, Spec], blocks: Declared) -> None:
        """Check that blocks are some of a complete version, whose parts may have been others.

        Raises:
            WeightsError: the text names the tensor.
        """
        self._check_specs(specs)
        for name, spec in specs.items():
            if name not in self.layout.entries:
                raise WeightsError(f"{name!r} is missing in the version, and {spec} in this part")
            for box in blocks[name]:
                _check_inside(name, box, spec)

    def _check_specs(self, specs: Mapping[str, Spec]) -> None:
        for name, spec in specs.items():
            entry = self.layout.entries.get(name)
            if entry is not None and entry.spec != spec:
                raise WeightsError(f"{name!r} is {entry.spec} in the version, and {spec} in this part")

    def _check_boxes(self, specs: Mapping[str, Spec], blocks: Declared) -> None:
        for name, spec in specs.items():
            known, own = self._blocks.get(name, _Blocks()), _Blocks()
            for box in blocks[name]:
                _check_inside(name, box, spec)
                if box in known.writer or box in own.writer:
                    continue
                other = known.overlaps(box) or own.overlaps(box)
                if other is not None:
                    raise WeightsError(
                        f"blocks of {name!r} overlap: {_shown([other])} was given before, now {_shown([box])}"
                    )
                own.add(box, 0)

    def _check_complete(self) -> None:
        for name, (spec, *_) in self.layout.entries.items():
            whole = math.prod(spec.shape)
            covered = sum(box.volume for box in self._blocks[name].writer)
            if covered != whole:
                raise WeightsError(
                    f"the {self.parts} parts have only {covered} of the {whole} elements of {name!r}"
                )


def _check_same(part: int, before: Declared, now: Declared) -> None:
    odd = sorted(before.keys() ^ now.keys())
    if odd:
        raise WeightsError(f"part {part} was given before, with other tensors: {odd[0]!r} was not in both")
    for name, boxes in now.items():
        if before[name] != boxes:
            raise WeightsError(
                f"part {part} was given before, with other blocks of {name!r}: "
                f"{_shown(before[name])}, now {_shown(boxes)}"
            )


def _check_inside(name: str, box: Box, spec: Spec) -> None:
    if not Box.whole(spec.shape).contains(box):
        raise WeightsError(f"a block of {name!r} is not inside it: {_shown([box])} of {list(spec.shape)}")


def _shown(boxes: Sequence[Box]) -> str:
    return ", ".join(f"{list(box.sizes)} at {list(box.offset)}" for box in boxes[:3]) or "none"
