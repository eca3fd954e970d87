"""Random numbers of a repeated attempt."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from spmd.elastic.random_states import RandomStates


@pytest.mark.parametrize(
    "draw",
    [
        random.random,
        lambda: random.gauss(0, 1),
        lambda: torch.rand(1).item(),
        np.random.random_sample,
        np.random.standard_normal,  # draws two, and keeps the second one
        lambda: np.random.random_sample(624 * 2).sum(),  # whole turns of the generator
    ],
    ids=["random", "gauss", "torch", "numpy", "numpy's normal", "numpy's many"],
)
def test_random_numbers_are_drawn_again_in_each_attempt(draw: Callable[[], Any]) -> None:
    states = RandomStates()
    for _ in range(5):  # steps, of which each is repeated
        states.keep()
        drawn = draw()
        states.put_back()
        assert draw() == drawn


def test_random_numbers_of_a_generator_that_numpy_was_given_are_drawn_again() -> None:
    numpy_random: Any = np.random
    before = numpy_random.get_bit_generator()
    states = RandomStates()
    numpy_random.set_bit_generator(np.random.PCG64(1))
    try:
        states.keep()
        drawn = np.random.random_sample()
        states.put_back()
        assert np.random.random_sample() == drawn
    finally:
        numpy_random.set_bit_generator(before)
