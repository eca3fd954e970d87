"""The shell round the protocol: steps that wait are done, whatever comes in between."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rref.protocol import Protocol
from rref.references import References


def references() -> References:
    """Those of an agent that does nothing itself: what is left to its loop is not done."""

    def ignore(*_: object) -> None:
        pass

    agent: Any = SimpleNamespace(
        incarnation=1,
        control=SimpleNamespace(on_batch=ignore),
        deferred=SimpleNamespace(soon=ignore, gathered=ignore),
        **dict.fromkeys(("on_joined", "on_gone", "on_closed", "on_forked"), ignore),
    )
    return References(agent)


def test_a_step_that_ctrl_c_has_hit_is_done_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    found = references()
    refs = [found.own(number)[1] for number in range(3)]
    release, interruptions = Protocol.release, [KeyboardInterrupt()]

    def release_or_be_interrupted(protocol: Protocol, ref: Any) -> None:
        if interruptions:
            raise interruptions.pop()
        release(protocol, ref)

    monkeypatch.setattr(Protocol, "release", release_or_be_interrupted)
    for ref in refs:
        found.release(ref)
    with pytest.raises(KeyboardInterrupt):
        found.own("one more")
    assert found._do(found._protocol.counts)["local"] == 0


def test_a_call_of_a_signal_handler_in_the_middle_of_a_step_does_not_do_it_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = references()
    refs = [found.own(number)[1] for number in range(3)]
    release, released = Protocol.release, list[Any]()

    def release_and_call(protocol: Protocol, ref: Any) -> None:
        released.append(ref)
        found.own("by a signal handler")
        release(protocol, ref)

    monkeypatch.setattr(Protocol, "release", release_and_call)
    for ref in refs:
        found.release(ref)
    assert found._do(found._protocol.counts)["local"] == 3
    assert released == refs
