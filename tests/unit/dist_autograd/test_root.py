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
from dist_autograd.root import Root
from dist_autograd.worker_pass import WorkerPass
from rpc.agent.border import Border
from rpc.errors import AutogradError, BackwardError, ProtocolError, WorkerLostError
from rpc.group.peer import Peer
from rpc.wire.frames import Frame, Kind

ME, OTHER, CONTEXT = 1, 2, 7


class Named:
    """What a root knows of a worker."""

    member = SimpleNamespace(info=SimpleNamespace(id=0, name="somebody"))

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

    def load(self, peer: Peer, frame: Frame) -> Sequence[Tensor | None]:
        return [torch.full((2,), 5.0)]

    def failure(self, peer: Peer, frame: Frame) -> BaseException:
        return BackwardError("it failed", peer.name)

    def abort(self, key: object, peer: Peer, error: BaseException) -> None:
        self.aborted.append(peer)


def reply(header: dict[str, Any], kind: int = Kind.REPLY) -> Frame:
    return Frame(kind, 1, header, [])


def run(messages: Messages) -> dict[Tensor, Tensor]:
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
    Root((ME, 1), own, me, cast("Any", messages), find).run([received.sum()])
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
