"""What is seen of a program's run, and how two runs are compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

EXACT_LIMIT = 2.0**50
"""Integers up to here are sums of integers that float64 holds exactly, unless larger ones cancelled out."""

_RELATIVE = 1e-9
"""Of real numbers, whose sums depend on their order: so far may they be apart, beside the largest element."""

Seen = list[Tensor | None]
"""What one hook or custom function was given, in any order."""


@dataclass
class Observed:
    """What one context saw, or what they all share.

    Attributes:
        gradients: of every leaf, by ``"worker1 leaf0"``; ``None`` where there is none.
        seen: what hooks and custom functions were given, by step.
        executions: how often each node of the graph ran, by step and the node's name.
        arrivals: by message, in how many passes gradients of its tensors came back; and if a node that they
            hang on ran more often, how often that was.
        retained: the gradients of intermediate values, by step.
        roots: the roots' values.
    """

    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    seen: dict[str, Seen] = field(default_factory=dict)
    executions: Counter[str] = field(default_factory=Counter)
    arrivals: Counter[str] = field(default_factory=Counter)
    retained: dict[str, Tensor | None] = field(default_factory=dict)
    roots: list[Tensor] = field(default_factory=list)

    def update(self, other: Observed) -> None:
        """Adds what another worker saw."""
        self.gradients.update(other.gradients)
        for key, seen in other.seen.items():
            self.seen.setdefault(key, []).extend(seen)
        self.executions.update(other.executions)
        self.arrivals.update(other.arrivals)
        self.retained.update(other.retained)
        self.roots.extend(other.roots)

    def tensors(self) -> Iterator[Tensor]:
        """All numbers in it."""
        for tensor in (*self.gradients.values(), *self.retained.values(), *self.roots):
            if tensor is not None:
                yield tensor
        for seen in self.seen.values():
            yield from (tensor for tensor in seen if tensor is not None)


def is_exact(observed: Observed) -> bool:
    """Whether all numbers are integers small enough that no order of summing them matters."""
    return all(
        bool((dense == dense.round()).all()) and float(dense.abs().max()) < EXACT_LIMIT
        for dense in map(_dense, observed.tensors())
    )


def mismatches(expected: Observed, actual: Observed, *, exact: bool) -> list[str]:
    """What is not as it should be, in sentences; empty if all is well.

    Args:
        expected: the run in one process.
        actual: the run over workers.
        exact: compare bit by bit.
    """
    found = []
    for what, one, other in (
        ("gradient of", expected.gradients, actual.gradients),
        ("retained gradient of step", expected.retained, actual.retained),
        ("root", dict(enumerate(expected.roots)), dict(enumerate(actual.roots))),
    ):
        found += [
            f"{what} {key} {reason}"
            for key in sorted({*one, *other}, key=str)
            if (reason := _difference(one.get(key), other.get(key), exact))
        ]
    for key in sorted({*expected.seen, *actual.seen}):
        want, have = expected.seen.get(key, []), actual.seen.get(key, [])
        if len(want) != len(have):
            found.append(f"{key}: called {len(have)} times, should be {len(want)}")
        elif not _same_in_any_order(want, have, exact):
            found.append(f"{key}: was given {_numbers(have)}, should be {_numbers(want)}")
    found += _wrong_counts("node", expected.executions, actual.executions)
    found += _wrong_counts("arrival", expected.arrivals, actual.arrivals)
    return found


def _wrong_counts(what: str, expected: Counter[str], actual: Counter[str]) -> list[str]:
    return [
        f"{what} {key} ran {actual[key]} times, should be {expected[key]}"
        for key in sorted({*expected, *actual})
        if expected[key] != actual[key]
    ]


def _difference(want: Tensor | None, have: Tensor | None, exact: bool) -> str | None:
    if want is None or have is None:
        return None if want is have else f"is {_numbers([have])}, should be {_numbers([want])}"
    if _same(want, have, exact):
        return None
    apart = float((_dense(want) - _dense(have)).abs().max()) if want.shape == have.shape else "?"
    return f"is {_numbers([have])}, should be {_numbers([want])}: {apart} apart"


def _same(want: Tensor | None, have: Tensor | None, exact: bool) -> bool:
    if want is None or have is None:
        return want is have
    want, have = _dense(want), _dense(have)
    if exact or want.shape != have.shape or want.dtype != have.dtype:
        return torch.equal(want, have)
    scale = max(1.0, float(want.abs().max())) if want.numel() else 1.0
    return torch.allclose(want, have, rtol=_RELATIVE, atol=_RELATIVE * scale)


def _same_in_any_order(want: Sequence[Tensor | None], have: Sequence[Tensor | None], exact: bool) -> bool:
    left = list(have)
    for one in want:
        for index, other in enumerate(left):
            if _same(one, other, exact):
                del left[index]
                break
        else:
            return False
    return True


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def _numbers(tensors: Sequence[Tensor | None]) -> str:
    return "; ".join("None" if one is None else str(_dense(one).tolist()) for one in tensors)
