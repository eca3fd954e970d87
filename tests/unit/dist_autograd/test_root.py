"""The root of a backward, and the parts of others that it waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from dist_autograd.backward_messages import RemotePart
from dist_autograd.contexts import Context
from dist_autograd.ddp import Models
from dist_autograd.graph import Mark
from dist_autograd.recording import receive, send
from dist_autograd.root import Root, Steps
from dist_autograd.worker_pass import WorkerPass
from rpc.agent.border import Border
from rpc.errors import AutogradError, BackwardError, ProtocolError, WorkerLostError
from rpc.group.peer import Peer
from rpc.wire.frames import Frame, Kind

ME, OTHER, CONTEXT = 1, 2, 7


class Named:
    """What a root knows of a worker."""

    member = SimpleNamespace(info=SimpleNamespace(id=0, name="somebody"))
    codec = SimpleNamespace(load_tensors=lambda *_: [torch.full((2,), 5.0)])

    def __init__(self, incarnation: int, name: str) -> None:
        self.incarnation = incarnation
        self.name = name
        self.is_self = incarnation == ME


me, other = cast("Peer", Named(ME, "me")), cast("Peer", Named(OTHER, "other"))


class Messages:
    """To workers whose parts end at once.

    Args:
        answer: of each.
    """

    def __init__(self, answer: Callable[[], Frame | BaseException]) -> None:
        self._answer = answer
        self.aborted: list[Peer] = []

    def new_part(self, peer: Peer) -> RemotePart:
        return RemotePart(cast("Any", None), 1, peer, "a part", 0)

    def begin(self, part: RemotePart, *_: Any) -> None:
        part.whole = True
        part.settle(self._answer())

    def failure(self, peer: Peer, frame: Frame) -> BaseException:
        return BackwardError("it failed", peer.name)

    def cancel(self, part: RemotePart, error: BaseException) -> None:
        part.settle(error)

    def abort(self, key: object, peer: Peer, error: BaseException) -> None:
        self.aborted.append(peer)


def reply(header: dict[str, Any], kind: int = Kind.REPLY) -> Frame:
    return Frame(kind, 1, header, [])


def run(messages: Messages, *steps: Steps) -> dict[Tensor, Tensor]:
    """A backward through a leaf that was sent to another worker, and what came back; the gradients."""
    context = Context(
        cast("Any", SimpleNamespace(requests=SimpleNamespace(border=Border()))), CONTEXT, ME, None
    )
    leaf = torch.ones(2, requires_grad=True)
    sent = send([leaf], other)
    context.sends[sent.number] = sent
    (received,) = receive([torch.ones(2)], CONTEXT, other, 3, [[Mark(ME, sent.number, 0)]])
    brought = messages._answer
    if isinstance(answer := brought(), Frame) and "gradients" in answer.header:
        answer.header["gradients"] += sent.number
        messages._answer = lambda: answer
    own = WorkerPass(context, False, Models())
    find = {ME: me, OTHER: other}.get
    Root((ME, 1), own, me, cast("Any", messages), find, *steps).run([received.sum()])
    return context.gradients()


def test_an_answer_that_brings_gradients_for_no_message_ends_the_backward() -> None:
    with pytest.raises(ProtocolError, match="which worker 'other' was not sent"):
        run(Messages(lambda: reply({"gradients": 1})))


@pytest.mark.parametrize(
    ("answer", "error"),
    [(reply({}, Kind.FAILURE), BackwardError), (WorkerLostError("lost"), WorkerLostError)],
)
def test_a_part_that_fails_ends_the_backward_everywhere(answer: Any, error: type[BaseException]) -> None:
    messages = Messages(lambda: answer)
    with pytest.raises(error):
        run(messages)
    assert messages.aborted == [other]


@pytest.mark.parametrize(
    ("said", "stepped"), [({"stepped": True}, True), ({"stepped": 1}, False), ({}, False)]
)
def test_a_worker_has_stepped_if_its_answer_says_so(said: dict[str, Any], stepped: bool) -> None:
    steps = Steps({other: (OTHER, 1)})
    run(Messages(lambda: reply({"gradients": 0} | said)), steps)
    assert steps.done == steps.begun == ({other} if stepped else set())


def test_a_worker_that_was_not_asked_for_a_step_has_not_stepped() -> None:
    steps = Steps({})
    run(Messages(lambda: reply({"gradients": 0, "stepped": True})), steps)
    assert not steps.done


def test_no_step_is_under_way_if_the_start_of_its_part_cannot_be_sent() -> None:
    class CannotSend(Messages):
        def begin(self, part: RemotePart, *_: Any) -> None:
            raise WorkerLostError("lost")

    steps = Steps({other: (OTHER, 1)})
    with pytest.raises(WorkerLostError):
        run(CannotSend(lambda: reply({})), steps)
    assert not steps.begun


def test_a_part_that_runs_on_a_thread_of_its_own_ends_when_its_root_is_interrupted() -> None:
    class Interrupted(WorkerPass):
        def start(self, roots: Sequence[Tensor]) -> list[Mark]:
            raise KeyboardInterrupt

    own = Interrupted(
        Context(cast("Any", SimpleNamespace(requests=SimpleNamespace(border=Border()))), CONTEXT, ME, None),
        False,
        Models(),
    )
    with pytest.raises(KeyboardInterrupt):
        Root((ME, 1), own, me, cast("Any", Messages(dict)), {}.get).run([])  # type: ignore[arg-type]
    with pytest.raises(AutogradError, match="given up"):
        own.progress.check()
