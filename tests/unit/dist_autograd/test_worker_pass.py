"""A worker's part of a backward, without other workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from dist_autograd.contexts import Context
from dist_autograd.ddp import Models
from dist_autograd.recording import Origin, Sent, send
from dist_autograd.worker_pass import WorkerPass
from rpc.errors import AutogradError, ProtocolError
from rpc.group.peer import Peer

receiver, somebody = (cast("Peer", SimpleNamespace(name=name)) for name in ("receiver", "somebody else"))


class Links:
    """To workers that say nothing more; every message brings these gradients."""

    def __init__(self, *gradients: Tensor | None) -> None:
        self._gradients = gradients

    def post(self, origin: Origin, gradients: Sequence[Tensor | None]) -> None: ...

    def load(self, peer: Peer, frame: Any) -> Sequence[Tensor | None]:
        return self._gradients

    def wait(self, ready: Callable[[], bool]) -> None:
        raise LookupError("it waits")


class Run:
    """A pass in a context in which one message was sent."""

    def __init__(self, *tensors: Tensor) -> None:
        self.context = Context(cast("Any", SimpleNamespace(devices=None)), 77, 1, None)
        self.sent: Sent = send(tensors, receiver)
        self.context.sends[self.sent.number] = self.sent
        self.own = WorkerPass(self.context, False, Models())

    def arrive(self, sender: Peer = receiver, number: int = 0) -> None:
        self.own.arrived(self.sent.number + number, sender, cast("Any", None))


def test_gradients_may_come_before_their_message_is_marked() -> None:
    leaf = torch.ones(2, requires_grad=True)
    run = Run(leaf * 3)
    run.arrive()
    run.own.mark([(run.sent.number, 0)], receiver)
    run.own.run(Links(torch.full((2,), 2.0)))
    assert run.context.gradients()[leaf].tolist() == [6.0, 6.0]


@pytest.mark.parametrize(("number", "sender"), [(1, receiver), (0, somebody)])
def test_gradients_are_taken_only_from_who_got_the_message(number: int, sender: Peer) -> None:
    with pytest.raises(ProtocolError, match=f"which worker '{sender.name}' was not sent"):
        Run(torch.ones(2, requires_grad=True)).arrive(sender, number)


def test_gradients_in_a_context_that_is_over_are_nobodys_fault() -> None:
    run = Run(torch.ones(2, requires_grad=True))
    run.context.over = True
    run.context.let_go()
    run.arrive()


def test_there_are_as_many_gradients_as_tensors() -> None:
    run = Run(torch.ones(2, requires_grad=True))
    run.own.mark([(run.sent.number, 0)], receiver)
    run.arrive()
    with pytest.raises(AutogradError, match="sent 2 gradients for 1 tensors"):
        run.own.run(Links(None, None))


def test_a_mark_of_what_was_never_sent_is_refused() -> None:
    run = Run(torch.ones(2, requires_grad=True))
    with pytest.raises(AutogradError, match="asks for tensor 1 of message"):
        run.own.mark([(run.sent.number, 1)], receiver)
