"""Random programs, each repeated so that passes work on it, give on workers what they give on the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

import spmd
from tests.group.spmd.driven import WORKERS, driven

pytestmark = [pytest.mark.processes, pytest.mark.nightly]

MAKERS: Final[list[Callable[[Tensor, Tensor, float], Tensor]]] = [
    lambda x, y, c: x + y,
    lambda x, y, c: torch.where(x > 0, x, y) * c,
    lambda x, y, c: torch.tanh(x),
    lambda x, y, c: x.sum(0, keepdim=True) + y,
    lambda x, y, c: x @ y.t() @ x,
    lambda x, y, c: torch.cat([x, y * c])[2:-3],
    lambda x, y, c: x[1:4].repeat(2, 1)[:5],
    lambda x, y, c: x.t().reshape(5, 6),
    lambda x, y, c: x.softmax(0) - y.cumsum(1),
    lambda x, y, c: torch._foreach_add([x * c, y + c], [y * 1.0, x * 1.0])[1],
    lambda x, y, c: torch._foreach_add([x, y], [y, x])[1],
    lambda x, y, c: x.flip(0) / (y.norm() + 1),
]
CHANGERS: Final[list[Callable[[Tensor, Tensor, float], Any]]] = [
    lambda x, y, c: x.add_(c),
    lambda x, y, c: x.mul_(y.mean()),
    lambda x, y, c: x[0].fill_(c),
    lambda x, y, c: x[:, :-1].mul_(c),
    lambda x, y, c: x.t().relu_(),
    lambda x, y, c: torch._foreach_mul_([x, y], c),
]


def run(seed: int, device: torch.device, mark: Callable[[Tensor, random.Random], None]) -> list[Tensor]:
    """What some repetitions of a program leave; values go from one to the next."""
    found: list[Tensor] = []
    kept: list[Tensor] = []
    for repetition in range(4):
        choice = random.Random(seed)
        data = torch.Generator().manual_seed(10 * seed + repetition)
        values = [torch.randn(5, 6, generator=data).to(device) for _ in range(2)] + kept
        for _ in range(choice.randint(4, 14)):
            x, y = choice.choice(values), choice.choice(values)
            number = choice.choice([0.5, -1.5]) + repetition
            kind, asks, marks = choice.random(), choice.random(), random.Random(choice.random())
            if kind < 0.6:
                values.append(torch.tanh(choice.choice(MAKERS)(x, y, number)))
            elif kind < 0.85:
                choice.choice(CHANGERS)(x, y, number)
            else:
                mark(x, marks)
            if asks < 0.1:
                found.append(values[-1].cpu().clone())
        kept = choice.sample(values, 2)
        found += [each.cpu().clone() for each in choice.sample(values, 2)]
        del x, y, values
    return found


@pytest.mark.parametrize("seed", range(40))
@driven
def test_random_programs(seed: int) -> None:
    numbers = list(range(WORKERS))
    meshes = [
        spmd.Mesh(order, shape) for order in (numbers, numbers[::-1]) for shape in ((1, WORKERS), (2, 2))
    ]

    def mark(tensor: Tensor, choice: random.Random) -> None:
        spec: Any = choice.choice([(0, 1), (1, None), ((1, 0), None), (None, (0, 1)), (None, None)])
        spmd.annotate_custom_sharding(tensor, choice.choice(meshes), spec)

    expected = run(seed, torch.device("cpu"), lambda *_: None)
    for given, each in zip(run(seed, spmd.device(), mark), expected, strict=True):
        torch.testing.assert_close(given, each, rtol=1e-3, atol=1e-3, equal_nan=True)
