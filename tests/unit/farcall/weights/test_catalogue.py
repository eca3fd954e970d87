"""The versions of a store: what readers see, what is kept, and which memory may be used again."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from farcall.weights import WeightsError
from farcall.weights.blocks import Box
from farcall.weights.catalogue import Catalogue
from farcall.weights.layout import Spec
from farcall.weights.versions import Freed, Lease, Version, Who
from tests.support.effort import PROFILE

A, B = Who("a", 1), Who("b", 2)
SPECS = {"w": Spec("float32", (2,))}
memory = iter(range(1, 1 << 40))


def begin(catalogue: Catalogue, number: int, part: int, who: Who, parts: int = 2) -> Version:
    blocks = {"w": [Box((0,), (2,))] if parts == 1 else [Box((part,), (1,))]}
    version, sizes = catalogue.begin(number, part, parts, SPECS, blocks, who)
    version.memory += [next(memory) for _ in sizes]
    return version


def put(catalogue: Catalogue, number: int) -> Version:
    version = begin(catalogue, number, 0, A, parts=1)
    assert catalogue.written(number, 0, A)
    return version


@pytest.mark.parametrize("lives", [False, True])
def test_the_memory_of_a_lost_reader_is_used_again_if_its_process_has_ended(*, lives: bool) -> None:
    catalogue = Catalogue("policy", 1)
    first = put(catalogue, 1)
    (held,) = first.memory
    catalogue.lease(first, Lease(B, 1))
    put(catalogue, 2)
    assert catalogue.freed() == [], "a reader has a lease"
    catalogue.lost(B, lives=lives)
    assert catalogue.freed() == [Freed(held, reusable=not lives)]
    with pytest.raises(WeightsError, match="worker 'b' was lost"):
        catalogue.lease(put(catalogue, 3), Lease(B, 2))


def test_memory_is_kept_with_a_version_and_after_that_with_its_leases() -> None:
    catalogue = Catalogue("policy", 2)
    first, lease = put(catalogue, 1), Lease(B, 1)
    (held,) = first.memory
    catalogue.lease(first, lease)
    catalogue.release(lease, used=False)
    assert catalogue.freed() == [], "others can have it"
    catalogue.lease(first, lease)
    catalogue.drop(1)
    second = put(catalogue, 1)
    assert catalogue.freed() == [], "a reader has a lease"
    catalogue.release(lease, used=False)
    assert catalogue.freed() == [Freed(held, reusable=True)]
    catalogue.lease(second, lease)
    catalogue.release(lease, used=True)
    assert begin(catalogue, 1, 0, A, parts=1) is second, "it is whole, whoever uses its memory"


@pytest.mark.parametrize("is_lost", [False, True])
def test_an_open_version_keeps_its_memory_when_its_last_lease_ends(*, is_lost: bool) -> None:
    catalogue, lease = Catalogue("policy", 2), Lease(B, 1)
    version = begin(catalogue, 1, 0, A, parts=1)
    catalogue.lease(version, lease)  # as another host's copy has, to which it is relayed
    if is_lost:
        catalogue.lost(B, lives=False)
    else:
        catalogue.release(lease, used=False)
    assert catalogue.freed() == [], "it is being written"
    assert catalogue.written(1, 0, A)
    assert version.memory
    assert not version.ended


def test_a_writer_in_the_middle_is_told_that_another_one_was_lost() -> None:
    catalogue = Catalogue("policy", 2)
    for part, who in ((0, A), (1, B)):
        begin(catalogue, 1, part, who)
    catalogue.lost(B)
    begin(catalogue, 1, 1, Who("b", 3))
    with pytest.raises(WeightsError, match="worker 'b' was lost"):
        catalogue.written(1, 1, B)
    with pytest.raises(WeightsError, match="another writer was lost: put this part again"):
        catalogue.written(1, 0, A)


def test_a_version_that_a_later_one_overtakes_is_given_up() -> None:
    catalogue = Catalogue("policy", 2)
    stuck = begin(catalogue, 1, 0, B)
    (lent,) = stuck.memory
    put(catalogue, 2)
    assert catalogue.given_up == [stuck]
    assert stuck.missing() == "part 0, 1 of 2 is missing"
    assert catalogue.freed() == [Freed(lent, reusable=False)]
    with pytest.raises(WeightsError, match="version 1 of store 'policy' was given up before part 0"):
        catalogue.written(1, 0, B)


def test_a_writer_that_is_ahead_waits_for_the_others() -> None:
    catalogue = Catalogue("policy", 2)
    for number in (1, 2):
        assert catalogue.make_room(number, A, insist=False)
        begin(catalogue, number, 0, A)
        catalogue.written(number, 0, A)
    assert not catalogue.make_room(3, A, insist=False)
    assert catalogue.make_room(2, B, insist=False), "the others catch up"
    for number in (1, 2):
        begin(catalogue, number, 1, B)
        assert catalogue.written(number, 1, B)
        assert catalogue.make_room(3, A, insist=False)


def test_a_version_that_cannot_become_whole_makes_room() -> None:
    catalogue = Catalogue("policy", 2)
    for number in (1, 2):
        begin(catalogue, number, 0, A)
        catalogue.written(number, 0, A)
    begin(catalogue, 1, 1, B)
    assert not catalogue.make_room(3, A, insist=False)
    assert catalogue.make_room(3, B, insist=False), "it begins another one in the middle"
    assert [each.number for each in catalogue.given_up] == [1]
    begin(catalogue, 3, 1, B)
    catalogue.lost(B)
    assert catalogue.make_room(4, A, insist=False)
    assert [each.number for each in catalogue.given_up] == [1, 3]
    begin(catalogue, 4, 0, A)
    catalogue.written(4, 0, A)
    assert not catalogue.make_room(5, A, insist=False)
    assert catalogue.make_room(5, A, insist=True)
    assert list(catalogue.open) == [4]


def test_what_cannot_be_put_is_refused() -> None:
    catalogue = Catalogue("policy", 2)
    for part, parts in ((0, 10**12), (0, 2.0), (False, 2), ("0", 2)):
        with pytest.raises(WeightsError, match=f"there is no part {part!r} of {parts}: .* up to 65536 parts"):
            catalogue.begin(2, part, parts, SPECS, {"w": []}, A)  # type: ignore[arg-type]
    assert not catalogue.open
    begin(catalogue, 2, 0, A)
    with pytest.raises(WeightsError, match="worker 'b' has not begun part 0 of version 2"):
        catalogue.written(2, 0, B)


def test_a_part_that_two_workers_write_is_written_when_both_have_finished() -> None:
    catalogue = Catalogue("policy", 2)
    begin(catalogue, 1, 0, A, parts=1)
    begin(catalogue, 1, 0, B, parts=1)
    assert not catalogue.written(1, 0, A), "the other one still writes"
    assert catalogue.written(1, 0, B)
    version = begin(catalogue, 2, 0, A, parts=1)
    begin(catalogue, 2, 0, B, parts=1)
    catalogue.written(2, 0, A)
    assert catalogue.lost(B, lives=False) == [version], "it may have written some of it"
    begin(catalogue, 2, 0, A, parts=1)
    assert catalogue.written(2, 0, A)
    assert list(catalogue.whole) == [1, 2]


def test_two_puts_of_one_worker_are_told_apart() -> None:
    catalogue = Catalogue("policy", 2)
    blocks = {"w": [Box((0,), (2,))]}
    for put_number in (1, 2):
        version, sizes = catalogue.begin(7, 0, 1, SPECS, blocks, A, put_number)
        version.memory += [next(memory) for _ in sizes]
    assert not catalogue.written(7, 0, A, put=1), "the other one still writes"
    catalogue.failed(7, 0, A, 2)
    assert version.missing() == "part 0 of 1 is missing", "it may have written some of it"
    with pytest.raises(WeightsError, match="worker 'a' has not begun part 0"):
        catalogue.written(7, 0, A, put=3)
    catalogue.begin(7, 0, 1, SPECS, blocks, A, 3)
    assert catalogue.written(7, 0, A, put=3)
    catalogue.failed(7, 0, A, 3)
    assert list(catalogue.whole) == [7]


class Workers(RuleBasedStateMachine):
    """Writers, readers and deaths in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.catalogue = Catalogue("policy", 2)
        self.workers = [Who(name, 0) for name in "abc"]
        self.lent: dict[Lease, tuple[int, list[int]]] = {}
        self.used: set[int] = set()
        self.free: set[int] = set()
        self.left: set[int] = set()

    def drain(self) -> None:
        for freed, reusable in self.catalogue.freed():
            assert freed in self.used
            self.used.remove(freed)
            assert not any(freed in held for _, held in self.lent.values())
            if reusable:
                self.free.add(freed)

    @rule(number=st.integers(0, 6), part=st.integers(0, 1), worker=st.integers(0, 2), ends=st.booleans())
    def write(self, number: int, part: int, worker: int, *, ends: bool) -> None:
        who = self.workers[worker]
        assert self.catalogue.make_room(number, who, insist=True)
        version, sizes = self.catalogue.begin(number, part, 2, SPECS, {"w": [Box((part,), (1,))]}, who)
        for _ in sizes:
            one = self.free.pop() if self.free else next(memory)
            self.used.add(one)
            version.memory.append(one)
        if not version.whole and ends:
            self.catalogue.written(number, part, who)
        self.drain()

    @rule(worker=st.integers(0, 2), ticket=st.integers(0, 3))
    def read(self, worker: int, ticket: int) -> None:
        version = self.catalogue.find(None, None)
        if version is not None:
            assert version.serial == max(each.serial for each in self.catalogue.whole.values())
            lease = Lease(self.workers[worker], ticket)
            self.lent.pop(lease, None)
            self.catalogue.lease(version, lease)
            self.lent[lease] = version.number, list(version.memory)
            self.drain()

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.lent:
            lease = data.draw(st.sampled_from(sorted(self.lent)))
            del self.lent[lease]
            self.catalogue.release(lease, used=False)
            self.drain()

    @rule(worker=st.integers(0, 2), lives=st.booleans())
    def die(self, worker: int, *, lives: bool) -> None:
        who = self.workers[worker]
        self.lent = {lease: held for lease, held in self.lent.items() if lease.holder != who}
        for version in self.catalogue.open.values():
            if version.begun_by(who) and lives:
                self.left |= set(version.memory)
        self.catalogue.lost(who, lives=lives)
        self.workers[worker] = Who(who.name, int(str(who.incarnation)) + 1)
        self.drain()

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        there = [*self.catalogue.whole, *self.catalogue.open]
        if there:
            self.catalogue.drop(data.draw(st.sampled_from(there)))
            self.drain()

    @invariant()
    def leased_versions_keep_their_memory(self) -> None:
        for lease, (number, held) in self.lent.items():
            version = self.catalogue.leased(lease)
            assert (version.number, version.memory) == (number, held)

    @invariant()
    def lost_writers_reach_nothing_that_readers_have(self) -> None:
        assert not self.left & self.free
        for version in self.catalogue.whole.values():
            assert not self.left & set(version.memory)

    @invariant()
    def memory_belongs_to_one_version(self) -> None:
        alive = {id(each): each for each in self.catalogue.leases.values()}
        alive |= {id(each): each for each in (*self.catalogue.whole.values(), *self.catalogue.open.values())}
        lent = [one for version in alive.values() for one in version.memory]
        assert sorted(lent) == sorted(self.used)
        assert not self.free & self.used

    @invariant()
    def no_more_is_kept_than_was_asked_for(self) -> None:
        assert len(self.catalogue.whole) <= 2
        assert len(self.catalogue.open) <= 2


Workers.TestCase.settings = settings(PROFILE, stateful_step_count=30)
TestWorkers = Workers.TestCase


def test_a_copy_takes_over_with_the_numbers_and_the_order_of_the_store() -> None:
    """Of the copy's versions, named by their serials 5, 3 and 9, the store does not list 3 any more."""
    catalogue = Catalogue("copy", 3)
    for serial in (5, 3, 9):
        put(catalogue, serial)
    begin(catalogue, 10, 0, A)
    catalogue.take_over("policy", 2, [(70, 5, {"loss": 1}), (20, 9, {})], {"best": 70, "gone": 8})
    assert catalogue.find("best", None) is catalogue.whole[70]
    assert (catalogue.whole[70].metadata, list(catalogue.tags)) == ({"loss": 1}, ["best"])
    catalogue.tag("best", None)
    assert (catalogue.name, list(catalogue.whole), catalogue.open) == ("policy", [70, 20], {})
    found = catalogue.find(None, 70)
    assert found is not None
    assert (found.number, found.serial) == (20, 9)
    assert catalogue.find(None, 30, serial=10) is None, "a version after the last that the copy has"
    put(catalogue, 30)
    found = catalogue.find(None, 30, serial=10)
    assert found is not None, "one that was lost is newer again once it has been put again"
    assert list(catalogue.whole) == [20, 30]


def test_a_copy_that_lacks_the_newest_versions_takes_over_with_those_before() -> None:
    """Serial 2 is listed and not there; 5 has the number of 4, dropped before; version 10 has a tag."""
    catalogue = Catalogue("copy", 4)
    for serial in (1, 4, 5):
        put(catalogue, serial)
    catalogue.take_over("policy", 1, [(10, 1, {}), (20, 2, {}), (40, 4, {}), (40, 5, {})], {"best": 10})
    assert [(each.number, each.serial) for each in catalogue.whole.values()] == [(10, 1), (40, 5)]
    assert len(catalogue.freed()) == 1, "the memory of serial 4"


def test_tags_and_the_metadata_of_all_parts_have_limits() -> None:
    catalogue = Catalogue("policy")
    put(catalogue, 1)
    for tag in ("", "x" * 257, 3):
        with pytest.raises(WeightsError, match="a tag is a text of up to 256 characters"):
            catalogue.tag(tag, 1)  # type: ignore[arg-type]
    for part in range(2):
        begin(catalogue, 2, part, A)
    catalogue.written(2, 0, A, {"first": "x" * (1 << 15)})
    for wrong, reason in (({"second": "y" * (1 << 15)}, "65536 bytes at most"), ({"x": []}, "metadata is")):
        with pytest.raises(WeightsError, match=reason):
            catalogue.written(2, 1, A, wrong)
    assert catalogue.written(2, 1, A, {"second": 1})


def test_versions_are_newer_than_those_of_all_keepers_before() -> None:
    """The second successor has got no version of the first one."""
    first, second = Catalogue("copy", 2), Catalogue("copy", 2)
    first.take_over("policy", 2, [], {})
    seen = put(first, 7)
    second.take_over("policy", 2, [], {}, first.after)
    put(second, 7)
    assert second.find(None, 7, serial=seen.serial) is not None


def test_parts_of_a_version_that_was_copied_whole_are_known() -> None:
    catalogue = Catalogue("copy", 2)
    put(catalogue, 1)
    catalogue.take_over("policy", 2, [(7, 1, {})], {})
    for part in range(2):
        assert begin(catalogue, 7, part, B) is catalogue.whole[7]
    with pytest.raises(WeightsError, match="'w' is float32"):
        catalogue.begin(7, 0, 2, {"w": Spec("float32", (3,))}, {"w": []}, B)
    with pytest.raises(WeightsError, match="a block of 'w' is not inside it"):
        catalogue.begin(7, 0, 2, SPECS, {"w": [Box((1,), (2,))]}, B)
