"""Gradients that a member should not send: they are refused, and nothing of them is kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import rpc
from dist_autograd.backwards import GRADIENTS, MARK, PART
from dist_autograd.contexts import Context
from dist_autograd.ddp import Models
from dist_autograd.passes import Pass
from dist_autograd.recording import Sent
from dist_autograd.root import Root, Workers
from rpc.errors import ProtocolError
from rpc.group.peer import Peer
from rpc.runtime.current import current_agent
from rpc.wire.frames import Kind
from tests.support.hostile import Hostile, Target, frame, target
from tests.support.orders import add_follower, ask, dismiss, start_followers
from tests.support.workers import RunWorkers

CONTEXT = 77
BACKWARD = 1


class Named:
    """What a pass knows of a peer."""

    member = SimpleNamespace(info=None)

    def __init__(self, name: str) -> None:
        self.name = name


def peer_named(name: str) -> Peer:
    return cast("Peer", Named(name))


def pass_that_sent(number: int, to: Peer) -> Pass:
    """A pass in a context in which one message was sent, of which no tensor is marked yet."""
    context = Context(cast("Any", None), CONTEXT, 1, None)
    context.sends[number] = Sent(number, to, [], [])
    return Pass((1, BACKWARD), context, peer_named("root"), False, cast("Any", None), list, Models())


def test_gradients_may_come_before_their_message_is_marked() -> None:
    receiver = peer_named("receiver")
    running = pass_that_sent(5, receiver)
    running.arrived(5, receiver, "gradients")
    assert running._arrived == {5: "gradients"}


@pytest.mark.parametrize(("number", "sender"), [(6, "receiver"), (5, "somebody else")])
def test_gradients_are_taken_only_from_who_got_the_message(number: int, sender: str) -> None:
    receiver = peer_named("receiver")
    running = pass_that_sent(5, receiver)
    with pytest.raises(ProtocolError, match=f"message {number}, which worker '{sender}' was not sent"):
        running.arrived(number, receiver if sender == "receiver" else peer_named(sender), "gradients")
    assert not running._arrived


def test_gradients_in_a_context_that_is_over_are_nobodys_fault() -> None:
    receiver = peer_named("receiver")
    running = pass_that_sent(5, receiver)
    running.context.over = True
    running.context.let_go()
    running.arrived(5, receiver, "gradients")
    assert not running._arrived


def test_an_answer_that_brings_gradients_for_no_message_ends_the_backward() -> None:
    receiver = peer_named("receiver")
    root = Root(pass_that_sent(5, receiver), cast("Workers", None))
    root._left = {receiver}
    part: Any = SimpleNamespace(peer=receiver, outcome=None, failure=lambda: None, brought=lambda: 6)
    root.part_ended(part)
    with pytest.raises(ProtocolError, match="message 6"):
        root.own.wait_until(lambda: False)


def send_unasked(at: Target, kind: int) -> None:
    """Has the worker send a tensor in a context, and sends gradients for another one, that was never sent."""
    call = current_agent().serializer.dump_call(
        torch.ones, (3,), {"requires_grad": True}, current_agent().own_peer
    )
    with Hostile(at) as peer:
        member = peer.newcomer(kind)
        peer.join(member)
        context = [CONTEXT + kind, member.incarnation]  # that of one who is gone is over
        peer.say(frame(Kind.CALL, {"context": context}, call.buffers))
        answer = peer.hear()
        assert answer is not None
        unknown = answer.header["context"][2] + 1
        if kind == PART:
            peer.say(frame(PART, {"part": [BACKWARD, unknown, context, False, []]}))
        else:
            peer.say(frame(MARK, {"mark": [BACKWARD, context, False, []]}))
            marked = peer.hear()
            assert marked is not None
            peer.say(frame(GRADIENTS, {"gradients": [member.incarnation, BACKWARD, unknown]}))
        assert peer.is_hung_up()


def test_a_member_that_sends_gradients_nobody_asked_for_is_cut_off(run_workers: RunWorkers) -> None:
    workers = start_followers(run_workers, 1, dynamic=True)
    add_follower(workers, dynamic=True)
    at = ask(workers[1], target)
    for kind in (GRADIENTS, PART):
        ask(workers[0], send_unasked, at, kind)
    assert ask(workers[0], lambda: rpc.rpc_sync("worker1", int)) == 0
    dismiss(workers)
    log = workers[1].log.read_text()
    for kind in (GRADIENTS, PART):
        assert f"'evil{kind}'" in log
    assert log.count("which worker 'evil") == 2
