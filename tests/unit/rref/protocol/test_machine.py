"""The reference protocol, sentence by sentence: owning, passing on, ending. Worker 1 owns the object."""

import re
import textwrap
from typing import Any

import pytest

from rpc.errors import ProtocolError, RRefError
from rref.protocol import owner, user
from rref.protocol.machine import Protocol
from rref.protocol.messages import Confirmed, Free, Send, State
from tests.unit.rref.protocol.group import Group


def test_object_is_freed_when_its_last_local_reference_is_released() -> None:
    owner = Protocol(1)
    ref = owner.own()
    assert owner.state(ref) is State.CONFIRMED
    owner.release(ref)
    assert owner.take_actions() == [Free(ref)]
    assert owner.take_actions() == []


def test_a_reference_released_twice_is_released_once() -> None:
    group = Group(2)
    rref, there = group.own_and_pass_on(2)
    again = group.pass_on(2, 2, there)
    group.release(2, there)
    group.protocol(2).release(there)
    assert group.said == []
    assert group.state(2, again) is State.CONFIRMED
    assert not group.is_freed(rref)


def test_owner_counts_a_fork_before_its_message_leaves_so_the_receiver_need_not_ask() -> None:
    group = Group(2)
    rref = group.own(1)
    group.call(1, 2, [rref])
    group.release(1, rref)
    assert group.protocol(1).leaks() == {rref: (1, 0)}
    group.arrive(0)
    (there,) = group.workers[2].refs
    assert group.state(2, there) is State.CONFIRMED
    assert group.said == []
    group.release(2, there)
    assert group.said == [(2, 1, "delete")]
    group.deliver()
    assert group.is_freed(rref)
    group.assert_nothing_left()


def test_user_holds_its_fork_until_the_owner_has_counted_the_child() -> None:
    group = Group(3)
    rref, parent = group.own_and_pass_on(2)
    group.call(2, 3, [parent])
    group.release(2, parent)
    assert group.said == []
    group.arrive(0)
    (child,) = group.workers[3].refs
    assert group.state(3, child) is State.PENDING
    assert group.said == [(3, 1, "confirm")]
    group.deliver()
    assert group.said == [(1, 3, "confirmed")]
    group.deliver()
    assert group.state(3, child) is State.CONFIRMED
    assert group.said == [(3, 2, "accepted")]
    group.deliver()
    assert group.said == [(2, 1, "delete")]
    group.deliver()
    assert group.protocol(1).leaks() == {rref: (1, 0)}
    group.release(3, child)
    group.deliver()
    assert group.is_freed(rref)
    group.assert_nothing_left()


def test_user_code_can_wait_for_the_confirmation_of_each_adopted_reference() -> None:
    user = Protocol(3)
    ref = user.adopt([1, [1, 1], [2, 1]], sender=2)
    assert user.state(ref) is State.PENDING
    assert user.take_actions() == [Send(1, ["confirm", (1, 1), (2, 1)])]
    user.receive(1, ["confirmed", [2, 1]])
    assert user.take_actions() == [Send(2, ["accepted", (2, 1)]), Confirmed(ref)]
    assert user.state(ref) is State.CONFIRMED


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


def test_a_reference_sent_back_to_where_it_came_from_costs_one_word() -> None:
    group = Group(3)
    _, at_two = group.own_and_pass_on(2)
    at_three = group.pass_on(2, 3, at_two)
    group.deliver_everything()
    back = group.pass_on(3, 2, at_three)
    assert group.state(2, back) is State.CONFIRMED
    assert group.said == [(2, 3, "accepted")]


@pytest.mark.parametrize("peer", [1, 2], ids=["owner", "user"])
def test_a_message_to_oneself_needs_no_words(peer: int) -> None:
    group = Group(2)
    rref = group.own(1)
    ref = rref if peer == 1 else group.pass_on(1, 2, rref)
    group.call(peer, peer, [ref])
    group.release(peer, ref)
    assert not group.is_freed(rref)
    group.arrive(0)
    (again,) = group.workers[peer].refs
    assert again != ref
    assert group.state(peer, again) is State.CONFIRMED
    assert group.said == []
    group.drain()


@pytest.mark.parametrize("peer", [1, 2], ids=["owner", "user"])
@pytest.mark.parametrize("to", [1, 2, 3])
def test_a_fork_whose_message_was_never_sent_is_taken_back_at_once(peer: int, to: int) -> None:
    group = Group(3)
    rref = group.own(1)
    ref = rref if peer == 1 else group.pass_on(1, 2, rref)
    before = group.remembered(peer)
    group.fail_to_send(peer, to, ref)
    assert group.remembered(peer) == before
    assert group.said == []


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
        [],
        "delete",
        ["no such kind"],
        [["delete"], [1, 1], [1, 2]],
        ["delete", [1, 1]],
        ["delete", [1, 1], [1, 2], [1, 3]],
        ["delete", [1, 1], [1, "2"]],
        ["delete", [1, 1], 7],
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


def test_the_example_in_the_text_runs() -> None:
    example = textwrap.dedent((Protocol.__doc__ or "").split("Example::")[1])
    exec(example, {"Protocol": Protocol, "Free": Free})


@pytest.mark.parametrize(
    ("module", "end", "words"),
    [
        (user, "*Granted*", {"HELD": "held once more"}),
        (owner, "An event without a row", {"CREATOR_LOST": "creator lost"}),
    ],
    ids=["a user's fork", "an owner's object"],
)
def test_the_table_of_states_in_the_text_is_the_table_that_runs(
    module: Any, end: str, words: dict[str, str]
) -> None:
    text, transitions = module.__doc__, module.TRANSITIONS
    table = text[text.index("    state ") : text.index(end)]
    names = {
        event: words.get(event.name, event.name.lower()) for row in transitions.values() for event in row
    }
    row = re.compile(
        rf"^    (?P<state>[A-Z]+)?\s.*?(?P<event>{'|'.join(names.values())})\s+(?P<next>[A-Z]+)", re.MULTILINE
    )
    read: dict[str, dict[str, str]] = {}
    state = ""
    for match in row.finditer(table):
        state = match["state"] or state
        read.setdefault(state, {})[match["event"]] = match["next"]
    assert read == {
        state.name: {names[event]: after.name for event, after in changes.items()}
        for state, changes in transitions.items()
    }
