"""Six models under four layouts and with five optimizers: the losses of one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.spmd_models import MODELS, train
from tests.group.spmd.driven import driven

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.parametrize("model", MODELS)
@driven
def test_a_model_cut_by_data_and_model_has_the_losses_of_one_process(model: str) -> None:
    assert train(model, "both", "adamw", steps=3).apart <= 1e-5


@pytest.mark.nightly
@pytest.mark.parametrize("model", MODELS)
def test_ten_steps_with_every_optimizer_and_layout_have_the_losses_of_one_process(model: str) -> None:
    command = [sys.executable, "-m", "benchmarks.spmd_models", "--models", model]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("model", ["mlp", "resnet18", "recommender", "decoder", "lstm"])
@driven
def test_where_batches_are_cut_nothing_falls_back(model: str) -> None:
    assert not train(model, "data", "sgd", steps=2).fallbacks
