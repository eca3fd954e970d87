"""The reference protocol, sentence by sentence: owning, passing on, ending. Worker 1 owns the object."""

from typing import Any

import pytest

from rpc.errors import ProtocolError, RRefError
from rref.protocol.machine import Protocol
from rref.protocol.messages import State
from tests.unit.rref.protocol.group import Group


def test_a_worker_that_has_a_counted_fork_already_shares_it_and_asks_nobody() -> None:
    group = Group(3)
    rref = group.own(1)
    first = group.pass_on(1, 3, rref)
    elsewhere = group.pass_on(1, 2, rref)
    second = group.pass_on(2, 3, elsewhere)
    assert group.state(3, second) is State.CONFIRMED
    assert group.said == [(3, 2, "accepted")]
    group.deliver()
    group.release(3, first)
    assert group.said == []
    group.release(3, second)
    assert group.said == [(3, 1, "delete")]


def test_what_is_not_held_cannot_be_sent() -> None:
    with pytest.raises(RRefError, match="holds no reference"):
        Protocol(1).fork((1, 99), 2)
    with pytest.raises(RRefError, match="holds no reference"):
        Protocol(1).state((1, 99))


def test_shutdown_releases_every_reference_to_others() -> None:
    group = Group(3)
    rref, at_two = group.own_and_pass_on(2)
    at_three = group.pass_on(2, 3, at_two)
    for peer in (1, 2, 3):
        group.release_all(peer)
    group.deliver_everything()
    assert group.is_freed(rref)
    group.protocol(2).release(at_two)  # its Python object goes later
    group.protocol(3).release(at_three)
    group.assert_nothing_left()


def test_leaks_and_counts_say_what_is_left() -> None:
    group = Group(2)
    rref = group.own(1)
    assert group.remembered(1) == {"owned": 1, "local": 1}
    assert group.protocol(1).leaks() == {rref: (0, 1)}
    group.pass_on(1, 2, rref)
    group.pass_on(1, 2, rref)
    assert group.remembered(1) == {"owned": 1, "local": 1, "shared": 1, "forks": 2}
    assert group.remembered(2) == {"users": 2}
    assert group.protocol(1).leaks() == {rref: (2, 1)}


@pytest.mark.parametrize(
    "message",
    [
        None,
        ["no such kind"],
        [["delete"], [1, 1], [1, 2]],
        ["delete", [1, 1]],
        ["delete", [1, 1], [1, 2], [1, 3]],
        ["delete", [1, 1], [1, "2"]],
        ["refused", [1, 1], 7],
        ["fence", [1], "reason"],
        {"delete": 1},
    ],
)
def test_a_malformed_message_is_refused(message: Any) -> None:
    with pytest.raises(ProtocolError, match="cannot be"):
        Protocol(1).receive(2, message)


@pytest.mark.parametrize(
    "descriptor", [None, [], [1, [1, 1]], [1, [1, 1], [2]], ["1", [1, 1], [2, 1]], [1, 1, 1], "abc"]
)
def test_a_malformed_descriptor_is_refused(descriptor: Any) -> None:
    with pytest.raises(ProtocolError, match="cannot be"):
        Protocol(1).adopt(descriptor, 2)


def test_nobody_speaks_in_anothers_name() -> None:
    protocol = Protocol(1)
    with pytest.raises(ProtocolError, match="another's name"):
        protocol.adopt([4, [4, 1], [3, 1]], sender=2)
    with pytest.raises(ProtocolError, match="another's name"):
        protocol.arrived((3, 1), (3, 2), creator=2)
    with pytest.raises(ProtocolError, match="another created"):
        protocol.receive(2, ["abandon", [3, 1], "why"])
    adopted = protocol.adopt([4, [4, 1], [2, 1]], sender=2)
    protocol.receive(3, ["confirmed", [2, 1]])
    protocol.receive(3, ["refused", [2, 1], "why"])
    assert protocol.state(adopted) is State.PENDING
    _, _, fork = protocol.fork(adopted, 5)
    protocol.receive(3, ["accepted", list(fork)])
    assert protocol.counts()["children"] == 1


def test_a_fork_is_adopted_once() -> None:
    for protocol, descriptor in ((Protocol(3), [1, [1, 1], [2, 1]]), (Protocol(1), [1, [2, 1], [2, 2]])):
        protocol.adopt(descriptor, 2)
        with pytest.raises(ProtocolError, match="came twice"):
            protocol.adopt(descriptor, 2)
