"""Programs on the logical device, run in this process by one worker's engine, give what the CPU gives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from spmd.engine.driver import current
from tests.support.spmd_cases import CASES, MODELS, same, train
from tests.support.spmd_session import inline_session

pytestmark = pytest.mark.logical_device


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    with inline_session():
        yield


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_cpu(name: str) -> None:
    found = CASES[name](current.DEVICE)
    assert same(found, CASES[name](torch.device("cpu"))), found


@pytest.mark.parametrize("name", MODELS)
def test_training_is_that_of_the_cpu(name: str) -> None:
    assert same(train(name, current.DEVICE), train(name, torch.device("cpu")), 1e-6)
