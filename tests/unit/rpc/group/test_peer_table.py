"""Workers that join and leave leave little behind."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest

from rpc.errors import UnknownWorkerError
from rpc.group import membership
from rpc.group import peer as peer_module
from rpc.group.membership import Membership
from rpc.group.peer import Peer, PeerTable
from rpc.group.workers import Member
from rpc.runtime.events import Events
from rpc.wire.frames import Kind, encode_small
from tests.support.members import ask_nobody, codec, member, peer
from tests.support.streams import Recording


def here(function: Callable[[Member], Peer], each: Member) -> Peer:
    return function(each)


def table(*, static: bool = False) -> PeerTable:
    me = member("me", 0)
    made = PeerTable(lambda each: Peer(each, codec(), ask_nobody), ask_nobody, [], Events(), here)
    made.form(Membership(me, static=static), Peer(me, codec(), ask_nobody, is_self=True))
    return made


def come_and_go(peers: PeerTable, number: int) -> weakref.ref[Peer]:
    each = member(f"worker{number}", number)
    peers.view.join(each)
    peer = peers.ensure(each)
    peers.leave(peer, "it left")
    return weakref.ref(peer)


def test_of_those_who_left_the_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "MAX_DEPARTED", 3)
    peers = table()
    gone = [come_and_go(peers, number) for number in range(1, 11)]
    assert [each() is None for each in gone] == [True] * 7 + [False] * 3
    assert [peer.name for peer in peers.all()] == ["me", "worker8", "worker9", "worker10"]
    assert peers.find("worker9").name == "worker9"
    with pytest.raises(UnknownWorkerError):
        peers.find("worker1")
    assert peers.view.gone_reason(member("worker10", 10).incarnation) == "it left"
    assert peers.view.gone_reason(member("worker1", 1).incarnation) == "it left long ago"


def test_of_those_who_left_long_ago_so_many_are_known_to_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "MAX_DEPARTED", 3)
    monkeypatch.setattr(membership, "MAX_GONE", 5)
    peers = table()
    for number in range(1, 11):
        come_and_go(peers, number)
    known = [peers.view.gone_reason(member(f"worker{number}", number).incarnation) for number in range(1, 11)]
    assert [reason is None for reason in known] == [True] * 5 + [False] * 5


def test_a_static_group_remembers_all_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "MAX_DEPARTED", 3)
    peers = table(static=True)
    for number in range(1, 11):
        come_and_go(peers, number)
    assert peers.find("worker1").name == "worker1"


def test_a_member_can_be_named_while_the_loop_is_about_to_make_its_peer() -> None:
    peers = table()
    newcomer = member("newcomer", 1)
    peers.view.join(newcomer)
    found = peers.find("newcomer")
    assert found.member is newcomer
    assert peers.ensure(newcomer) is found


def test_what_a_connection_that_breaks_at_once_does_not_take_goes_over_the_next() -> None:
    other = peer()
    for text in (b"a", b"b" * 1000, b"c"):
        other.send((text,), len(text))
    broken, good = Recording(is_broken=True), Recording()
    other.established(broken)
    assert broken.sent == [b"a", b"c"]
    other.disconnected()
    other.send((b"d",), 1)
    other.established(good)
    assert good.sent == [b"b" * 1000, b"d"]


def test_what_a_broken_connection_had_only_queued_goes_first_over_the_next() -> None:
    other = peer("other", 1)
    queued, next_one = encode_small(Kind.CALL, 1, {}, ()), Recording()
    other.established(Recording(queued))
    other.disconnected()
    other.established(next_one, 2, 0)
    assert next_one.sent[0] == queued
