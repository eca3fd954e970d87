"""SPMD mode in this process: one worker's engine, called at once. Nothing is sent anywhere."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from spmd.engine.driver.current import set_engine
from spmd.engine.driver.device import set_up
from spmd.engine.driver.logical_tensor import LogicalTensor
from spmd.engine.driver.session import PROGRAMS, Session
from spmd.engine.program.step_messages import EngineStep
from spmd.engine.worker.worker_engine import WorkerEngine

__all__ = ["InlinePort", "inline_session"]


class InlinePort:
    """A worker that does a step when it is told to.

    Attributes:
        steps: all that it was told.
        engine: with its values.
    """

    def __init__(self, name: str = "inline") -> None:
        self.name = name
        self.engine = WorkerEngine(0, self._no_mesh)
        self.steps: list[EngineStep] = []

    def _no_mesh(self, key: Any) -> Any:
        return self

    def get_group(self, axis: int) -> Any:
        """One worker needs none."""
        return None

    def send(self, step: EngineStep) -> Any:
        self.steps.append(step)
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.engine.run(pickle.loads(pickle.dumps(step))))
        return future

    def abort(self, reason: str) -> None:
        raise AssertionError(reason)

    def skip(self, number: int) -> None:
        pass

    def regroup(self, generation: int) -> Any:
        raise AssertionError("nothing ends early")


@contextmanager
def inline_session(programs: int = PROGRAMS) -> Iterator[tuple[Session, InlinePort]]:
    """A session with one such worker, behind the device ``spmd:0``. Random numbers are left as they were.

    Args:
        programs: that it keeps.
    """
    set_up()
    port = InlinePort()
    session = Session([port], LogicalTensor, programs)
    state = torch.get_rng_state()
    set_engine(session)
    try:
        yield session, port
    finally:
        set_engine(None)
        torch.set_rng_state(state)
