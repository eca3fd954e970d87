"""Messages of steps: what all workers get is serialized once."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rpc.serialization.serializer import Serializer
from spmd.engine.program import step_messages
from spmd.engine.program.step_messages import EngineStep, from_message
from tests.support.members import peer


def test_a_step_is_serialized_once_for_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = SimpleNamespace(serializer=Serializer())
    monkeypatch.setattr(step_messages, "current_agent", lambda: agent)
    packed: list[bytes] = []
    steps = [
        EngineStep(3, 7, (torch.full((2,), worker),), freed=(1, 2), wanted=(worker,), packed=packed)
        for worker in range(3)
    ]
    messages = [step.message() for step in steps]
    assert packed == [messages[0][0]]
    for step, (common, wanted, *uploads) in zip(steps, messages, strict=True):
        assert common is packed[0]
        arrived = from_message(common, wanted, uploads, peer("driver"))
        assert (arrived.sequence, arrived.base, arrived.freed) == (3, 7, (1, 2))
        assert arrived.wanted == step.wanted
        assert torch.equal(arrived.uploads[0], step.uploads[0])


def test_workers_that_get_the_same_step_get_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = SimpleNamespace(serializer=Serializer())
    monkeypatch.setattr(step_messages, "current_agent", lambda: agent)
    step = EngineStep(3, 7, freed=(1, 2))
    other = replace(step, uploads=(torch.zeros(2),))
    own, *_ = other.message()
    assert step.call() is step.call()
    assert step.message() == (own, ())
