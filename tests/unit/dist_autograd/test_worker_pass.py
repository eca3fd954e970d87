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
from rpc.agent.border import Border
from rpc.errors import AutogradError, ProtocolError, WorkerLostError
from rpc.group.peer import Peer
from rpc.group.workers import Member, WorkerInfo
from rpc.wire.frames import Frame, Kind

CODEC = cast("Any", SimpleNamespace(load_tensors=lambda buffers, _: buffers))


def peer(name: str) -> Peer:
    return Peer(Member(WorkerInfo(name, 1), 1, "host", (), "", 1 << 20), CODEC, lambda _: None)


receiver, somebody = peer("receiver"), peer("somebody-else")


class Links:
    """To workers that say nothing more."""

    def post(self, origin: Origin, gradients: Sequence[Tensor | None]) -> None: ...

    def wait(self, ready: Callable[[], bool]) -> None:
        raise LookupError("it waits")


class Run:
    """A pass in a context in which one message was sent."""

    def __init__(self, *tensors: Tensor, to: Peer = receiver) -> None:
        self.context = Context(
            cast("Any", SimpleNamespace(requests=SimpleNamespace(border=Border()))), 77, 1, None
        )
        self.sent: Sent = send(tensors, to)
        self.context.sends[self.sent.number] = self.sent
        self.own = WorkerPass(self.context, False, Models())

    def arrive(self, *gradients: Tensor | None, sender: Peer = receiver, number: int = 0) -> None:
        self.own.arrived(self.sent.number + number, sender, Frame(Kind.CALL, 0, {}, list(gradients)))


def test_gradients_may_come_before_their_message_is_marked() -> None:
    leaf = torch.ones(2, requires_grad=True)
    run = Run(leaf * 3)
    run.arrive(torch.full((2,), 2.0))
    run.own.mark([(run.sent.number, 0)], receiver)
    run.own.run(Links())
    assert run.context.gradients()[leaf].tolist() == [6.0, 6.0]


@pytest.mark.parametrize(("number", "sender"), [(1, receiver), (0, somebody)])
def test_gradients_are_taken_only_from_who_got_the_message(number: int, sender: Peer) -> None:
    with pytest.raises(ProtocolError, match=f"which worker '{sender.name}' was not sent"):
        Run(torch.ones(2, requires_grad=True)).arrive(sender=sender, number=number)


def test_gradients_in_a_context_that_is_over_are_nobodys_fault() -> None:
    run = Run(torch.ones(2, requires_grad=True))
    run.context.over = True
    run.context.let_go()
    run.arrive()


def test_there_are_as_many_gradients_as_tensors() -> None:
    run = Run(torch.ones(2, requires_grad=True))
    run.own.mark([(run.sent.number, 0)], receiver)
    run.arrive(None, None)
    with pytest.raises(AutogradError, match="sent 2 gradients for 1 tensors"):
        run.own.run(Links())


def test_a_mark_of_what_was_never_sent_is_refused() -> None:
    run = Run(torch.ones(2, requires_grad=True))
    with pytest.raises(AutogradError, match="asks for tensor 1 of message"):
        run.own.mark([(run.sent.number, 1)], receiver)


class LosingLinks(Links):
    """To a worker that is lost while its gradients are awaited, at the last moment before the wait."""

    def __init__(self, to: Peer) -> None:
        self._to = to
        self.waits = 0

    def wait(self, ready: Callable[[], bool]) -> None:
        self.waits += 1
        self._to.gone("it has died")
        assert ready(), "this would wait for ever"


@pytest.mark.parametrize("meet", [False, True])
def test_a_pass_fails_if_a_worker_is_gone_before_its_gradients_have_come(meet: bool) -> None:
    """Also in a run with tickets, which is needed where the graphs behind two messages meet."""
    to = peer("gone")
    shared = torch.ones(2, requires_grad=True) * 3
    run = Run(shared * 2, to=to)
    numbers = [run.sent.number]
    if meet:
        other = send([shared * 5], receiver)
        run.context.sends[other.number] = other
        numbers.append(other.number)
        run.arrive(torch.ones(2), number=other.number - run.sent.number)
    run.own.mark([(number, 0) for number in numbers], receiver)
    links = LosingLinks(to)
    with pytest.raises(WorkerLostError, match=r"'gone'.*it has died.*has not sent its gradients"):
        run.own.run(links)
    assert links.waits == 1


def test_gradients_that_came_before_their_worker_was_gone_count() -> None:
    to = peer("gone")
    leaf = torch.ones(2, requires_grad=True)
    run = Run(leaf * 3, to=to)
    run.arrive(torch.full((2,), 2.0), sender=to)
    to.gone("it has died")
    run.own.mark([(run.sent.number, 0)], to)
    run.own.run(Links())
    assert run.context.gradients()[leaf].tolist() == [6.0, 6.0]
