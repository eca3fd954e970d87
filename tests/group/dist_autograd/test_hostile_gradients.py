"""Gradients that a member should not send: they are refused, and nothing of them is kept."""

from __future__ import annotations

import torch

import rpc
from dist_autograd.backward_messages import GRADIENTS, MARK, WHOLE_PART
from rpc.runtime.current import current_agent
from rpc.wire.frames import Kind
from tests.support import backend
from tests.support.default_device import not_on_devices
from tests.support.hostile import Hostile, Target, frame, target
from tests.support.orders import add_follower, ask, dismiss, start_followers
from tests.support.workers import RunWorkers

CONTEXT = 77
BACKWARD = 1


def send_unasked(at: Target, kind: int) -> None:
    """Has the worker send a tensor in a context, and sends gradients for another one, that was never sent."""
    call = current_agent().group.peers.own.codec.dump_call(
        torch.ones, (3,), {"requires_grad": True}, current_agent().group.peers.own
    )
    with Hostile(at) as peer:
        member = peer.newcomer(kind)
        peer.join(member)
        context = [CONTEXT + kind, member.incarnation]  # that of one who is gone is over
        peer.say(frame(Kind.CALL, {"context": context}, call.buffers))
        answer = peer.hear()
        assert answer is not None
        unknown = answer.header["context"][2] + 1
        if kind == WHOLE_PART:
            peer.say(frame(WHOLE_PART, {"backward": [BACKWARD, context[0], False, [], unknown]}))
        else:
            peer.say(frame(MARK, {"backward": [BACKWARD, context[0], False, [], None]}))
            marked = peer.hear()
            assert marked is not None
            peer.say(frame(GRADIENTS, {"gradients": [member.incarnation, BACKWARD, unknown]}))
        assert peer.is_hung_up()


@backend.over_sockets
@not_on_devices("a stranger's messages are spelled out, and have no device map")
def test_a_member_that_sends_gradients_nobody_asked_for_is_cut_off(run_workers: RunWorkers) -> None:
    workers = start_followers(run_workers, 1, dynamic=True)
    add_follower(workers, dynamic=True)
    at = ask(workers[1], target)
    for kind in (GRADIENTS, WHOLE_PART):
        ask(workers[0], send_unasked, at, kind)
    assert ask(workers[0], lambda: rpc.rpc_sync("worker1", int)) == 0
    dismiss(workers)
    log = workers[1].log.read_text()
    for kind in (GRADIENTS, WHOLE_PART):
        assert f"'evil{kind}'" in log
    assert log.count("which worker 'evil") == 2
