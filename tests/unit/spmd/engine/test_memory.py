"""Programs with ever new shapes: what the driver and its workers keep of them."""

from __future__ import annotations

import torch
from torch import Tensor

from spmd.engine.driver.current import DEVICE
from spmd.engine.program.step_messages import EngineStep
from tests.support.spmd_session import inline_session

PROGRAMS = 4


def train(weight: Tensor, length: int) -> Tensor:
    """One step on a batch of this length; the loss."""
    rows = torch.arange(4.0 * length).reshape(length, 4).to(DEVICE)
    loss = (rows / (4 * length) @ weight).t().square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        assert weight.grad is not None
        weight -= 0.1 * weight.grad
    weight.grad = None
    return loss.detach()


def check_programs(steps: list[EngineStep]) -> None:
    """Workers are told to forget what they have, and never run what they do not have."""
    kept: set[int] = set()
    for step in steps:
        assert set(step.forget) <= kept
        kept.difference_update(step.forget)
        if step.definition is not None:
            assert step.program is not None
            assert step.program not in kept
            kept.add(step.program)
        assert step.program is None or step.program in kept
        assert len(kept) <= PROGRAMS


def test_a_program_that_was_forgotten_is_sent_again_and_gives_the_same() -> None:
    lengths = [*range(1, 13), *range(1, 13), 3, 3, 12, 12]
    found: list[list[float]] = []
    for programs in (PROGRAMS, 1000):
        with inline_session(programs) as (_, port):
            weight = torch.ones(4, 1).to(DEVICE).requires_grad_()
            losses = [train(weight, length) for length in lengths]
            found.append([each.item() for each in losses])
            if programs == PROGRAMS:
                check_programs(port.steps)
    assert found[0] == found[1]


def test_a_program_in_use_is_never_sent_twice() -> None:
    with inline_session(PROGRAMS) as (session, port):
        weight = torch.ones(4, 1).to(DEVICE).requires_grad_()
        for length in range(1, 30):
            for each in (length, 1000):
                train(weight, each)
                session.recorder.flush()
        session.sync()
        check_programs(port.steps)
        sizes = [
            {meta.shape for meta in each.definition.inputs if len(meta.shape) == 2}
            for each in port.steps
            if each.definition is not None
        ]
        assert sum((1000, 4) in each for each in sizes) == 1
