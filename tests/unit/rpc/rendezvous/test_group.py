from __future__ import annotations

from collections.abc import Mapping

import pytest

from rpc.errors import GroupMismatchError, RendezvousError
from rpc.rendezvous import Place, job_key, resolve_group

TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("rank", "world_size", "environ", "place"),
    [
        (0, 2, {}, Place(0, 2)),
        (-1, None, TORCHRUN, Place(2, 4)),
        (None, None, TORCHRUN, Place(2, 4)),
        (0, 2, TORCHRUN, Place(0, 2)),
        (3, None, TORCHRUN, Place(3, 4)),
        (-1, 8, TORCHRUN, Place(2, 8)),
        (0, None, {}, Place(0, None)),
        (5, 0, {}, Place(5, None)),
        (-1, None, {"RANK": "1"}, Place(1, None)),
    ],
)
def test_argument_counts_before_the_environment(
    rank: int | None, world_size: int | None, environ: Mapping[str, str], place: Place
) -> None:
    assert resolve_group(rank, world_size, environ) == place
    assert place.static == (place.world_size is not None)


def test_dynamic_group_is_asked_for_where_the_environment_has_a_world_size() -> None:
    assert resolve_group(-1, None, TORCHRUN, dynamic=True) == Place(2, None)


def test_dynamic_group_asked_for_needs_no_rank() -> None:
    assert resolve_group(-1, None, {}, dynamic=True) == Place(None, None)


def test_init_method_may_carry_rank_and_world_size() -> None:
    url = "tcp://host:1?rank=1&world_size=3"
    assert resolve_group(-1, None, TORCHRUN, init_method=url) == Place(1, 3)
    assert resolve_group(0, 2, TORCHRUN, init_method=url) == Place(0, 2)


def test_all_workers_on_one_host_are_known_from_torchrun() -> None:
    one_host = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    assert resolve_group(-1, None, one_host).single_host
    assert not resolve_group(-1, None, one_host | {"WORLD_SIZE": "8"}).single_host
    assert not resolve_group(0, 2, one_host).single_host
    assert not resolve_group(-1, None, one_host, dynamic=True).single_host


@pytest.mark.parametrize(
    ("rank", "world_size", "environ", "text"),
    [
        (-1, 2, {}, "rank parameter missing.*environment variable RANK expected"),
        (-1, None, {}, "rank parameter missing"),
        (2, 2, {}, "from 0 to 1 in a group of 2, got 2"),
        (-2, 2, {}, "got -2"),
        (-2, None, {}, "must not be negative, got -2"),
        (0, -5, {}, "world size must be positive, got -5"),
        (-1, 2, TORCHRUN, "from 0 to 1.*got 2"),
        (-1, 2, {"RANK": "two"}, "RANK must be a number, is 'two'"),
        (0, None, {"WORLD_SIZE": "x"}, "WORLD_SIZE must be a number"),
    ],
)
def test_what_cannot_be_is_refused(
    rank: int, world_size: int | None, environ: Mapping[str, str], text: str
) -> None:
    with pytest.raises(GroupMismatchError, match=text):
        resolve_group(rank, world_size, environ)


def test_world_size_of_a_dynamic_group_is_refused() -> None:
    with pytest.raises(ValueError, match="dynamic=True"):
        resolve_group(0, 2, {}, dynamic=True)


def test_number_in_init_method_that_is_none_is_refused() -> None:
    with pytest.raises(RendezvousError, match="rank in init_method must be a number"):
        resolve_group(-1, 2, {}, init_method="tcp://host:1?rank=x")


def test_job_is_named_by_the_user_else_by_torchrun() -> None:
    assert job_key({}) == "default"
    assert job_key({"TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_RESTART_COUNT": "3"}) == "run"
    assert job_key({"TORCHELASTIC_RUN_ID": "run", "FARCALL_JOB": "mine"}) == "mine"
