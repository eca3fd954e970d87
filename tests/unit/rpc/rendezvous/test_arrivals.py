from __future__ import annotations

from dataclasses import replace

import pytest

from rpc.errors import GroupMismatchError, RendezvousError, RendezvousTimeoutError
from rpc.group.workers import Member, WorkerInfo
from rpc.rendezvous.arrivals import Arrival, ArrivalKind, Conflict, Verdict, describe_ranks, examine


def arrival(name: str, rank: int, world_size: int = 3, index: int = 0) -> Arrival:
    index = index or rank + 1
    return Arrival(
        index, Member(WorkerInfo(name, rank), 100 + index, "host", ()), world_size, f"process {index}"
    )


def test_every_rank_once_is_complete_in_order_of_rank() -> None:
    abc = [arrival("a", 0), arrival("b", 1), arrival("c", 2)]
    assert examine(abc[::-1], 3) == tuple(abc)
    assert examine(abc[1:], 3) is None
    assert examine([], 3) is None


def test_of_one_incarnation_the_last_arrival_counts() -> None:
    first = arrival("a", 0, world_size=1)
    again = replace(first, index=7)
    assert examine([again, first], 1) == (again,)


@pytest.mark.parametrize(
    ("arrivals", "words"),
    [
        ([arrival("a", 0), arrival("a", 1)], ["name 'a' is not unique", "rank 0", "rank 1"]),
        ([arrival("a", 0), arrival("b", 0, index=7)], ["rank 0 is not unique", "'a'", "'b'", "process 7"]),
        ([arrival("a", 0), arrival("b", 3)], ["'b'", "outside the group of 3", "0 to 2"]),
        ([arrival("a", 0), arrival("b", 1, 4)], ["'b'", "group of 4", "'a'", "one of 3"]),
        ([arrival("b", 1, 4)], ["'b'", "group of 4", "one of 3"]),
        ([arrival("a", 1), arrival("a", 2)], ["name 'a' is not unique"]),  # though rank 0 is missing too
    ],
)
def test_conflict_names_who_is_involved(arrivals: list[Arrival], words: list[str]) -> None:
    conflict = examine(arrivals, 3)
    assert isinstance(conflict, Conflict)
    assert all(word in conflict.reason for word in words), conflict.reason
    assert set(conflict.involved) <= set(arrivals)


def test_ranks_are_listed_up_to_twenty() -> None:
    assert "Ranks that arrived: 0, 2; missing: 1." in describe_ranks([2, 0, 2], 3)
    assert "arrived: none; missing: 0, 1" in describe_ranks([], 2)
    assert "18, 19 and 80 more" in describe_ranks([], 100)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (ArrivalKind.MISMATCH, GroupMismatchError),
        (ArrivalKind.TIMEOUT, RendezvousTimeoutError),
        (ArrivalKind.INTERRUPTED, RendezvousError),
    ],
)
def test_refusal_is_an_error_to_its_worker(kind: ArrivalKind, error: type[Exception]) -> None:
    with pytest.raises(error, match="because"):
        Verdict(kind, "because").raise_if_refused()
    Verdict(ArrivalKind.COMPLETE, "1-5").raise_if_refused()


def test_record_is_read_as_it_was_written() -> None:
    one, verdict = arrival("a", 1), Verdict(ArrivalKind.MISMATCH, "why")
    assert Arrival.unpack(one.index, one.pack()) == one
    assert Verdict.unpack(verdict.pack()) == verdict


@pytest.mark.parametrize("packed", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x01"])
def test_other_bytes_are_no_arrival(packed: bytes) -> None:
    with pytest.raises(ValueError, match="not an arrival"):
        Arrival.unpack(1, packed)
