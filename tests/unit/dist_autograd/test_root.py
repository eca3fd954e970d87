"""The root of a backward, while another thread tells it what has come."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest

from dist_autograd.parts import Part
from dist_autograd.passes import Pass
from dist_autograd.root import Root, Workers
from rpc.group.peer import Peer

STEPS = 40
"""More than there are in ``_wait_by_reading``, with what it calls, for one worker that is left."""


class AnsweredElsewhere:
    """A part whose answer the loop's thread takes in."""

    whole = True

    def read(self, is_over: object, ask: object = None) -> bool:
        return False


def root_with_one_left(peer: Peer) -> Root:
    own = SimpleNamespace(
        root=SimpleNamespace(member=SimpleNamespace(info=None)), has_failed=lambda: False, news=lambda: None
    )
    root = Root(cast("Pass", own), cast("Workers", None))
    root._left = {peer}
    root._parts = {peer: cast("Part", AnsweredElsewhere())}
    return root


@pytest.mark.parametrize("bytecodes", range(STEPS))
def test_a_worker_may_be_done_at_any_moment_of_the_wait_for_it(bytecodes: int) -> None:
    peer = cast("Peer", object())
    root = root_with_one_left(peer)
    left = bytecodes

    def step(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_code is Root._wait_by_reading.__code__:
            if left == 0:
                sys.settrace(None)
                root.done(peer)
            left -= 1
        return step

    before = sys.gettrace()
    sys.settrace(step)
    try:
        assert root._wait_by_reading() is False
    finally:
        sys.settrace(before)


def test_a_part_that_runs_on_a_thread_of_its_own_ends_when_its_root_is_interrupted() -> None:
    def interrupted(_: object) -> list[Any]:
        raise KeyboardInterrupt

    ended_with: list[Callable[[], BaseException]] = []
    own = SimpleNamespace(
        root=SimpleNamespace(member=SimpleNamespace(info=None)),
        start=interrupted,
        fail_later=ended_with.append,
    )
    with pytest.raises(KeyboardInterrupt):
        Root(cast("Pass", own), cast("Workers", None)).run([])
    assert "given up" in str(ended_with[0]())
