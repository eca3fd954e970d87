"""What a member may say that no honest one does: it gets nobody else's reference, and nothing of it stays."""

from __future__ import annotations

import pytest

from rpc.errors import ProtocolError
from rref.protocol import peers
from rref.protocol.machine import Protocol
from rref.protocol.messages import Free, Peer, Send, State

ME, FRIEND, HOSTILE = 1, 2, 9


def member(*others: Peer) -> Protocol:
    protocol = Protocol(ME)
    for other in others:
        protocol.peer_joined(other)
    return protocol


def remembered(protocol: Protocol) -> dict[str, int]:
    return {kind: count for kind, count in protocol.counts().items() if count}


@pytest.mark.parametrize("message", [["fence", ME, "dead"], ["bereaved", ME]])
def test_nobody_can_tell_a_worker_that_it_is_dead(message: list[object]) -> None:
    protocol = member(HOSTILE)
    with pytest.raises(ProtocolError, match="says that this worker is dead"):
        protocol.receive(HOSTILE, message)
    assert remembered(protocol) == {}


def test_who_waits_for_a_fence_is_forgotten_when_it_is_lost() -> None:
    protocol = member(FRIEND, HOSTILE)
    protocol.receive(HOSTILE, ["bereaved", FRIEND])
    assert remembered(protocol) == {"fences": 1}
    protocol.peer_lost(HOSTILE, "it was cut off")
    assert remembered(protocol) == {}


def test_a_fork_given_to_two_is_the_firsts_and_refused_to_the_second() -> None:
    owner, friend, fork = member(FRIEND, HOSTILE), Protocol(FRIEND), [ME, [7, 1], [HOSTILE, 1]]
    friends = friend.adopt(fork, HOSTILE)
    (confirm,) = friend.take_actions()
    assert isinstance(confirm, Send)
    owner.receive(FRIEND, confirm.message)
    mine = owner.adopt(fork, HOSTILE)
    assert (owner.state(mine), owner.reason(mine)) == (
        State.FAILED,
        "its sender gave it to another worker, too",
    )
    owner.release(mine)
    owner.take_actions()
    owner.sweep()
    owner.sweep()
    (refused,) = owner.take_actions()  # the object never came: the first hears of it, having been counted
    assert isinstance(refused, Send)
    friend.receive(ME, refused.message)
    assert friend.state(friends) is State.FAILED
    assert remembered(owner) == {}


def test_who_confirms_a_fork_that_was_given_to_the_owner_is_refused_and_not_accused() -> None:
    protocol = member(FRIEND, HOSTILE)
    rref = protocol.own()
    mine = protocol.adopt([ME, rref, [HOSTILE, 1]], HOSTILE)
    protocol.take_actions()
    protocol.receive(FRIEND, ["confirm", list(rref), [HOSTILE, 1]])
    assert protocol.take_actions() == [
        Send(FRIEND, ["refused", (HOSTILE, 1), "its sender gave it to another worker, too"])
    ]
    assert protocol.state(mine) is State.CONFIRMED


@pytest.mark.parametrize(
    "message",
    [
        lambda number: ["confirm", [7, number], [HOSTILE, number]],
        lambda number: ["abandon", [HOSTILE, number], "why"],
        lambda number: ["refused", [HOSTILE, number], "why"],
        lambda number: ["fence", 100 + number, "dead"],
        lambda number: ["bereaved", 100 + number],
    ],
    ids=["confirm", "abandon", "refused", "fence", "bereaved"],
)
def test_of_what_nobody_knows_a_member_can_say_so_much_only(
    monkeypatch: pytest.MonkeyPatch, message: object
) -> None:
    assert callable(message)
    monkeypatch.setattr(peers, "HEARSAY_MOST", 10)
    protocol = member(FRIEND, HOSTILE)

    def say(count: int) -> None:
        for number in range(count):
            protocol.receive(HOSTILE, message(number))

    say(10)
    protocol.sweep()
    with pytest.raises(ProtocolError, match="more than 10 unknown objects, forks and workers"):
        protocol.receive(HOSTILE, message(99))
    protocol.receive(FRIEND, ["confirm", [7, 1], [FRIEND, 1]])  # others may speak


def test_after_two_sweeps_a_member_may_speak_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "HEARSAY_MOST", 10)
    protocol = member(FRIEND, HOSTILE)
    for _ in range(5):
        for number in range(5):
            protocol.receive(FRIEND, ["confirm", [7, number], [FRIEND, number]])
        protocol.sweep()
    protocol.sweep()
    protocol.sweep()
    assert not protocol.waits_for_sweep
    assert remembered(protocol) == {}


def test_reasons_are_not_kept_whatever_their_length() -> None:
    protocol = member(HOSTILE)
    _, ref = protocol.create(HOSTILE)
    protocol.receive(HOSTILE, ["refused", list(ref), "x" * 1_000_000])
    assert len(protocol.reason(ref)) == 500
    assert not any(isinstance(action, Free) for action in protocol.take_actions())
