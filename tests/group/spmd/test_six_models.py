"""Six models under four layouts and with five optimizers: the losses of one process."""

from __future__ import annotations

import pytest

from benchmarks.spmd_models import LAYOUTS, MODELS, OPTIMIZERS, train
from tests.group.spmd.driven import driven, driver

__all__ = ["driver"]

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("model", MODELS)
@driven
def test_a_model_cut_by_data_and_model_has_the_losses_of_one_process(model: str) -> None:
    assert train(model, "both", "adamw", steps=3).apart <= 1e-5


@pytest.mark.nightly
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
@driven
def test_ten_steps_have_the_losses_of_one_process(model: str, layout: str, optimizer: str) -> None:
    assert train(model, layout, optimizer).apart <= 1e-5


@pytest.mark.parametrize("model", ["mlp", "resnet18", "recommender", "decoder", "lstm"])
@driven
def test_where_batches_are_cut_nothing_falls_back(model: str) -> None:
    assert not train(model, "data", "sgd", steps=2).fallbacks
