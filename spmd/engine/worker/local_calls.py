"""The local calls that make up a linked program, and the one function that they become."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor

from spmd.engine.program.program import Program, Ref, Scalar

__all__ = ["Assembled", "InstructionError", "LocalCall", "last_uses"]

_FILE: Final = os.path.join(os.path.dirname(__file__), "<linked program>")
"""Name of the file of generated code, in this folder, so that its frames belong to this distribution."""


class InstructionError(RuntimeError):
    """An instruction has failed on this worker.

    Attributes:
        index: index of the instruction in its program.
        cause: the error that it raised.
    """

    def __init__(self, index: int, cause: Exception) -> None:
        super().__init__(index, cause)
        self.index, self.cause = index, cause

    def __str__(self) -> str:
        return f"instruction {self.index} has failed: {self.cause}"


@dataclass(slots=True)
class LocalCall:
    """One call of a function on local tensors.

    Attributes:
        index: index of its instruction.
        function: returns a tensor, or a flat sequence of tensors and None.
        args, kwargs: arguments with ``Ref`` and ``Scalar``, also inside lists and tuples.
        results: numbers of values; None for unused results.
        single: whether it returns a tensor, not a sequence.
        shared: pairs of a result and an argument that may share memory.
        overlaps: whether results may have elements twice.
        over: the function that writes its results to the memory of the arguments at ``written``.
        moves: moves of a redistribution, with their groups.
        alone: whether no other worker takes part, and it draws no random numbers: if it fails, the others
            continue.
    """

    index: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int | None, ...]
    single: bool = False
    shared: tuple[tuple[int, int], ...] = ()
    overlaps: bool = False
    over: Callable[..., Any] | None = None
    written: tuple[int, ...] = ()
    moves: tuple[Any, ...] = ()
    alone: bool = False
    _reads: frozenset[int] | None = field(default=None, init=False)

    def reads(self) -> frozenset[int]:
        """The values that it uses."""
        if self._reads is None:
            self._reads = frozenset(each.index for each in self.variables())
        return self._reads

    def variables(self) -> list[Ref]:
        """The positions from which it takes values, in order."""
        found = _variables((self.args, tuple(self.kwargs.values())))
        return [each for each in found if isinstance(each, Ref)]

    def others(self) -> list[Ref]:
        """Those of them that are not at ``written``."""
        args = [each for place, each in enumerate(self.args) if place not in self.written]
        found = _variables((args, tuple(self.kwargs.values())))
        return [each for each in found if isinstance(each, Ref)]


def last_uses(steps: Sequence[LocalCall], outputs: Sequence[int]) -> dict[int, int]:
    """Return the index of the last step that takes or makes each value; past the end for outputs."""
    last: dict[int, int] = {}
    for place, step in enumerate(steps):
        for value in itertools.chain(step.reads(), step.results):
            if value is not None:
                last[value] = place
    return last | dict.fromkeys(outputs, len(steps))


class Assembled:
    """A function made of steps.

    Args:
        program: the program, for its inputs and outputs.
        steps: steps in order; together they make all outputs.
        check: called with a value's number and the value, after each step; None for no checks.

    Attributes:
        function: takes inputs, a list which it empties, and scalars; returns outputs.
        source: source of the function.
    """

    def __init__(
        self, program: Program, steps: Sequence[LocalCall], check: Callable[[int, Any], object] | None = None
    ) -> None:
        self._names: dict[str, Any] = {"check": check}
        self._steps, self._outputs = steps, program.outputs
        self._places: list[int | None] = []
        lines: list[str] = []

        def add(line: str, place: int | None = None) -> None:
            lines.append(line)
            self._places.append(place)

        last = last_uses(steps, program.outputs)
        given = range(len(program.inputs))
        add("def run(inputs, scalars):")
        if given:
            add(f" {', '.join(f'v{value}' for value in given)}, = inputs")
        add(" inputs.clear()")
        unused = [value for value in given if value not in last]
        if unused:
            add(" " + _forget(unused))
        self._dying = dying = dict[int, list[int]]()
        for value, place in last.items():
            dying.setdefault(place, []).append(value)
        for place, step in enumerate(steps):
            line = f" {self._targets(step)}{self._call(step, place)}"
            made = [value for value in step.results if value is not None]
            if check is not None:
                line += "".join(f"; check({value}, v{value})" for value in made)
            if place in dying:
                line += "; " + _forget(dying[place])
            add(line, place)
        add(f" return [{', '.join(f'v{value}' for value in program.outputs)}]")
        self.source = "\n".join(lines)
        exec(compile(self.source, _FILE, "exec"), self._names)
        # Taken out, so that the function does not refer to itself, and is freed with this object.
        self.function: Callable[[list[Tensor], Sequence[float]], list[Tensor]] = self._names.pop("run")

    def stopped_at(self, error: BaseException) -> tuple[int, dict[int, Any]] | None:
        """Return the step in which an error was raised, and the existing values; None: in no step."""
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code is self.function.__code__:
                place = self._places[trace.tb_lineno - 1]
                local = trace.tb_frame.f_locals
                values = {int(name[1:]): value for name, value in local.items() if name[1:].isdecimal()}
                return None if place is None else (place, values)
            trace = trace.tb_next
        return None

    def step_at(self, place: int) -> LocalCall:
        """Return the step at an index."""
        return self._steps[place]

    def finish(
        self,
        place: int,
        values: dict[int, Any],
        scalars: Sequence[float],
        instead: Callable[[int], Tensor],
        failures: list[InstructionError],
    ) -> list[Tensor]:
        """Run the remaining steps, after a step has failed in which no other worker takes part.

        Args:
            place: index of that step.
            values: the existing values.
            instead: makes the replacement of a value that could not be computed, by its number.
            failures: collects the failures that follow.

        Returns:
            The outputs.

        Raises:
            InstructionError: a step has failed in which others take part.
        """
        for at, step in enumerate(self._steps[place:], start=place):
            results: Any = None
            if at > place:
                try:
                    results = _done(step, values, scalars)
                except Exception as error:
                    failure = InstructionError(step.index, error)
                    if not step.alone:
                        raise failure from error
                    failures.append(failure)
            if results is None:
                results = [None if each is None else instead(each) for each in step.results]
            values.update(
                (value, each) for value, each in zip(step.results, results, strict=True) if value is not None
            )
            values.update(dict.fromkeys(self._dying.get(at, ())))
        return [values[each] for each in self._outputs]

    def _targets(self, step: LocalCall) -> str:
        if not step.results:
            return ""
        names = ["_" if value is None else f"v{value}" for value in step.results]
        return f"{names[0]} = " if step.single else f"{', '.join(names)}, = "

    def _call(self, step: LocalCall, place: int) -> str:
        function = f"f{place}"
        self._names[function] = step.function
        args = [self._render(each) for each in step.args]
        args += [f"{name}={self._render(value)}" for name, value in step.kwargs.items()]
        return f"{function}({', '.join(args)})"

    def _render(self, value: Any) -> str:
        if isinstance(value, Ref):
            return f"v{value.index}"
        if isinstance(value, Scalar):
            return f"scalars[{value.index}]"
        if isinstance(value, (list, tuple)) and any(True for _ in _variables(value)):
            return f"[{', '.join(map(self._render, value))}]"
        if type(value) in (int, bool, type(None)):
            return repr(value)
        name = f"c{len(self._names)}"
        self._names[name] = value
        return name


def _done(step: LocalCall, values: dict[int, Any], scalars: Sequence[float]) -> Sequence[Any] | None:
    """Return the result of a step."""

    def filled(tree: Any) -> Any:
        if isinstance(tree, Ref):
            return values[tree.index]
        if isinstance(tree, Scalar):
            return scalars[tree.index]
        if isinstance(tree, (list, tuple)) and any(True for _ in _variables(tree)):
            return [filled(each) for each in tree]
        return tree

    given = step.function(*filled(step.args), **{name: filled(each) for name, each in step.kwargs.items()})
    if not step.results:
        return ()
    return (given,) if step.single else tuple(given)


def _forget(values: Sequence[int]) -> str:
    return " = ".join(f"v{value}" for value in values) + " = None"


def _variables(value: Any) -> Iterator[Ref | Scalar]:
    if isinstance(value, (Ref, Scalar)):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _variables(each)
