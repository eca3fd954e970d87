"""``init_rpc`` with bad input: what it says, to whom, how soon; and that one may simply try again."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rpc
from rpc.errors import (
    AlreadyInitializedError,
    GroupMismatchError,
    InvalidNameError,
    NotInitializedError,
    RendezvousError,
    RendezvousTimeoutError,
)
from rpc.options import AgentOptions
from tests.support.serving import in_processes
from tests.support.workers import RunWorkers, Worker

PATIENCE = 0.5
"""Seconds that ``init_rpc`` is given where what it waits for never comes."""
IN_TIME = 30.0
"""Seconds after which it has certainly not given up in time; generous, since the machine may be busy."""


def options(worker: Worker, **given: Any) -> AgentOptions:
    given.setdefault("init_method", worker.init_method)
    given.setdefault("rendezvous_timeout", PATIENCE)
    return AgentOptions(**given)


def init(worker: Worker, name: Any = None, rank: Any = None, world_size: Any = None, **kwargs: Any) -> None:
    rpc.init_rpc(
        worker.name if name is None else name,
        rank=worker.rank if rank is None else rank,
        world_size=worker.world_size if world_size is None else world_size,
        rpc_backend_options=options(worker, **kwargs),
    )


def then_it_works(worker: Worker) -> None:
    """Whatever went wrong before, this process can join the group now."""
    assert not rpc.is_initialized()
    with worker.group():
        assert rpc.rpc_sync(worker.rank, abs, args=(-1,)) == 1


# ---- found before anybody else is involved


@pytest.mark.parametrize(
    "name", ["", "a b", "a/b", "naïve", "a\n", "\0", "x" * 128, "x" * 1_000_000, None, 5, b"w"]
)
def test_a_name_that_cannot_be_is_shown_with_the_rule(name: Any) -> None:
    with pytest.raises(InvalidNameError, match=r"must match .* shorter than 128 characters; got ") as caught:
        rpc.init_rpc(name, rank=0, world_size=1)
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value)) < 200
    assert not rpc.is_initialized()


def test_a_name_with_a_rank_needs_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    dynamic = AgentOptions(init_method=f"file://{tmp_path}/store", dynamic=True)
    with pytest.raises(InvalidNameError, match=r"no name.*and no rank.*Pass a name, or a rank"):
        rpc.init_rpc(rpc_backend_options=dynamic)


def join_with_longest_name(worker: Worker) -> str:
    init(worker, "x:-_9" * 25 + "yz", rendezvous_timeout=30)
    name = rpc.rpc_sync(0, rpc.get_worker_info).name
    rpc.shutdown()
    return str(name)


def test_a_name_of_127_of_the_characters_allowed_is_a_name(run_workers: RunWorkers) -> None:
    assert run_workers(join_with_longest_name, 1) == ["x:-_9" * 25 + "yz"]


@pytest.mark.parametrize(
    ("rank", "world_size", "error", "text"),
    [
        (2, 2, GroupMismatchError, "must be from 0 to 1 in a group of 2, got 2"),
        (-2, 2, GroupMismatchError, "must be from 0 to 1 in a group of 2, got -2"),
        (-2, None, GroupMismatchError, "rank must not be negative, got -2"),
        (0, -3, GroupMismatchError, "world size must be positive, got -3"),
        (-1, 2, GroupMismatchError, "rank parameter missing.* RANK .*Pass rank="),
        ("0", 2, TypeError, "rank must be an integer, got str '0'"),
        (0.0, 2, TypeError, "rank must be an integer, got float 0.0"),
        (True, 2, TypeError, "rank must be an integer, got bool True"),
        (0, "2", TypeError, "world_size must be an integer, got str '2'"),
    ],
)
def test_a_rank_or_world_size_that_cannot_be_is_refused_at_once(
    rank: Any, world_size: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        rpc.init_rpc("worker0", rank=rank, world_size=world_size)
    assert not rpc.is_initialized()


@in_processes(1)
def test_integers_of_other_libraries_are_integers(worker: Worker) -> None:
    init(worker, rank=np.int64(0), world_size=np.int32(1), rendezvous_timeout=30)
    rpc.shutdown()


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({}, "environment variable MASTER_ADDR expected.*tcp://HOST:PORT"),
        ({"MASTER_ADDR": "localhost"}, "environment variable MASTER_PORT expected"),
        ({"MASTER_ADDR": "localhost", "MASTER_PORT": "http"}, "MASTER_PORT must be a port number, is 'http'"),
        ({"MASTER_ADDR": "localhost", "MASTER_PORT": "65536"}, "MASTER_PORT must be a port number"),
        ({"RANK": "first"}, "environment variable RANK must be a number, is 'first'"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "environment variable WORLD_SIZE must be a number, is 'two'"),
    ],
)
def test_what_the_environment_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], text: str
) -> None:
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    given: dict[str, int] = {} if "RANK" in environment else {"rank": 0, "world_size": 2}
    with pytest.raises(RendezvousError, match=text):
        rpc.init_rpc("worker0", **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("init_method", "text"),
    [
        ("tcp://127.0.0.1", "tcp://HOST:PORT"),
        ("tcp://127.0.0.1:99999", "99999"),
        ("tcp://:1", "tcp://HOST:PORT"),
        ("file://", "rendezvous file"),
        ("file:///no/such/folder/rendezvous", "/no/such/folder/rendezvous"),
        ("carrier-pigeon://loft", "carrier-pigeon"),
        ("", "''"),
    ],
)
def test_an_init_method_that_cannot_be_is_shown(init_method: str, text: str) -> None:
    with pytest.raises(RendezvousError) as caught:
        rpc.init_rpc("w", rank=0, world_size=2, rpc_backend_options=AgentOptions(init_method=init_method))
    assert text in str(caught.value)


# ---- twice, or not at all


def start_twice(worker: Worker) -> list[str]:
    with worker.group():
        messages = []
        for name in (worker.name, "another"):
            with pytest.raises(AlreadyInitializedError) as caught:
                init(worker, name)
            messages.append(str(caught.value))
        assert rpc.rpc_sync(1 - worker.rank, rpc.get_worker_info).id == 1 - worker.rank  # it still works
    then_it_works(worker)
    return messages


def test_a_second_init_is_refused_and_the_first_agent_goes_on(run_workers: RunWorkers) -> None:
    for rank, messages in enumerate(run_workers(start_twice, 2)):
        assert messages == [messages[0]] * 2
        assert f"already initialized in this process, as 'worker{rank}': call shutdown() first" in messages[0]


ENTRANCES: dict[str, Callable[[], object]] = {
    "rpc_sync": lambda: rpc.rpc_sync("worker0", abs, args=(1,)),
    "rpc_async": lambda: rpc.rpc_async("worker0", abs, args=(1,)),
    "remote": lambda: rpc.remote("worker0", abs, args=(1,)),
    "RRef": lambda: rpc.RRef(1),
    "shutdown": rpc.shutdown,
    "get_worker_info": rpc.get_worker_info,
    "get_worker_infos": rpc.get_worker_infos,
    "all_gather": lambda: rpc.all_gather(1),
    "barrier": rpc.barrier,
    "get_rpc_timeout": rpc.get_rpc_timeout,
    "set_rpc_timeout": lambda: rpc.set_rpc_timeout(1),
    "get_debug_info": rpc.get_debug_info,
}


@in_processes(1)
def test_without_init_and_after_shutdown_everything_says_to_call_it(worker: Worker) -> None:
    for _ in range(2):
        for use in ENTRANCES.values():
            with pytest.raises(
                NotInitializedError, match=r"RPC has not been initialized.*Call init_rpc first"
            ):
                use()
        with worker.group():
            assert rpc.is_initialized()
        assert not rpc.is_initialized()


# ---- workers that disagree


def disagree(worker: Worker, places: list[tuple[str, int, int]]) -> str:
    name, rank, world_size = places[worker.rank]
    began = time.monotonic()
    with pytest.raises(GroupMismatchError) as caught:
        init(worker, name, rank, world_size, rendezvous_timeout=50)
    assert time.monotonic() - began < IN_TIME
    assert isinstance(caught.value, ValueError)
    then_it_works(worker)
    return str(caught.value)


@pytest.mark.parametrize(
    ("places", "texts"),
    [
        (
            [("a", 0, 3), ("same", 1, 3), ("same", 2, 3)],
            ["the name 'same' is not unique", "Every worker needs"],
        ),
        ([("a", 0, 3), ("b", 1, 3), ("c", 1, 3)], ["the rank 1 is not unique", "'b' (rank 1", "'c' (rank 1"]),
        ([("a", 0, 3), ("b", 0, 3), ("c", 1, 3)], ["the rank 0 is not unique", "'a' (rank 0", "'b' (rank 0"]),
        ([("a", 0, 3), ("b", 1, 3), ("c", 2, 4)], ["'c' (rank 2", "expects a group of 4", "one of 3"]),
    ],
    ids=["name twice", "rank twice", "rank 0 twice", "world size too large"],
)
def test_workers_that_disagree_all_get_the_error_and_may_try_again(
    run_workers: RunWorkers, places: list[tuple[str, int, int]], texts: list[str]
) -> None:
    messages = run_workers(disagree, 3, args=(places,))
    assert len(messages) == 3
    for message in messages:
        for text in texts:
            assert text in message


def take_name_in_dynamic_group(worker: Worker) -> str | None:
    if worker.rank == 0:
        with worker.group(dynamic=True):
            worker.report("ready")
            worker.wait_for("done")
        return None
    worker.wait_for("go")
    messages = []
    for name, rank in (("worker0", 1), ("other", 0)):
        with pytest.raises(GroupMismatchError) as caught:
            rpc.init_rpc(
                name, rank=rank, rpc_backend_options=options(worker, dynamic=True, rendezvous_timeout=30)
            )
        messages.append(str(caught.value))
    with worker.group(dynamic=True):
        assert rpc.rpc_sync("worker0", abs, args=(-1,)) == 1
    worker.report("refused")
    return "\n".join(messages)


def test_a_name_or_rank_in_a_dynamic_group_is_taken_while_its_worker_lives(run_workers: RunWorkers) -> None:
    workers = run_workers.start(take_name_in_dynamic_group, 2)
    workers[0].wait_for("ready")
    workers[1].tell("go")
    workers[1].wait_for("refused")
    workers[0].tell("done")
    messages = workers.results()[1]
    assert re.search(
        r"'worker0' .* cannot join: the name 'worker0' is not unique, the living worker 'worker0'", messages
    )
    assert re.search(
        r"'other' .* cannot join: the rank 0 is not unique, the living worker 'worker0'", messages
    )


# ---- nobody there


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """A port that nobody listens on, and that nobody else gets meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@contextlib.contextmanager
def black_hole() -> Iterator[int]:
    """A port that swallows connections without a word: its backlog is full, so the kernel drops the rest."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect(listener.getsockname())
        yield listener.getsockname()[1]


@contextlib.contextmanager
def mute_server() -> Iterator[int]:
    """A port where connections are accepted, by the kernel, and nothing is ever said."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("place", "rank", "said"),
    [
        (closed_port, 1, "rank 0"),
        (black_hole, 1, "rank 0"),
        (mute_server, 1, "rank 0"),
        (mute_server, 0, "check that it is a c10d store"),
    ],
)
@in_processes(1)
def test_an_unreachable_rendezvous_gives_up_in_time_and_says_where(
    worker: Worker, place: Callable[[], contextlib.AbstractContextManager[int]], rank: int, said: str
) -> None:
    with place() as port:
        init_method = f"tcp://127.0.0.1:{port}"
        began = time.monotonic()
        with pytest.raises(RendezvousTimeoutError) as caught:
            init(worker, rank=rank, world_size=2, init_method=init_method)
        assert time.monotonic() - began < IN_TIME
        assert isinstance(caught.value, TimeoutError)
        assert f"the rendezvous at 127.0.0.1:{port}" in str(caught.value)
        assert f"for {PATIENCE} s" in str(caught.value)
        assert said in str(caught.value).lower()
    worker.world_size = 1
    then_it_works(worker)
