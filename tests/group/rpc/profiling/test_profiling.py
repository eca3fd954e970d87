"""PyTorch's profilers show calls, what callees do, and nothing of calls that they do not see."""

from __future__ import annotations

import asyncio
import collections
import json
import tempfile
import time
from typing import Any

import pytest
import torch
from torch.autograd import profiler, profiler_legacy
from torch.distributed import HashStore  # type: ignore[attr-defined]

import rpc
from rpc.profiling.installation import call_profiler
from rpc.profiling.server import ServerProfile
from rpc.runtime.current import current_agent
from rpc.runtime.events import CallBegun
from tests.support.serving import in_standing_group

PROFILERS = (torch.profiler.profile, profiler.profile, profiler_legacy.profile)


class Model:
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)


def double_there(x: torch.Tensor, to: str) -> Any:
    return rpc.rpc_async(to, torch.mul, args=(x, 2)).wait()


async def compute_in_turns(x: torch.Tensor, to: str) -> torch.Tensor:
    with profiler.record_function("all of it"):
        x = torch.relu(x)
        x = await rpc.rpc_async(to, torch.mul, args=(x, 2))
    return torch.neg(x)


async def wait_for_other(mine: str, others: str) -> None:
    """Two of these take turns: each computes when the other has."""
    turns[mine].set()
    await turns[others].wait()
    getattr(torch, mine)(torch.ones(1))
    turns[mine + " done"].set()
    await turns[others + " done"].wait()


turns: collections.defaultdict[str, asyncio.Event] = collections.defaultdict(asyncio.Event)


def fail() -> None:
    raise LookupError("as it is told")


def events_of(profile: Any) -> list[Any]:
    return list(profile.function_events if hasattr(profile, "function_events") else profile.events())


def is_listening() -> bool:
    return bool(current_agent().events.call_begun)


@pytest.mark.parametrize("make", PROFILERS)
@in_standing_group(world_size=3)
def test_a_profile_shows_calls_of_any_depth(make: Any) -> None:
    with make(record_shapes=True) as profile:
        rpc.rpc_sync("worker1", double_there, args=(torch.ones(3), "worker2"))
    events = {event.name: event for event in events_of(profile)}
    call = "rpc_sync#double_there(worker0 -> worker1)"
    inner = call + "#remote_op: rpc_async#aten::mul(worker1 -> worker2)"
    operator = inner + "#remote_op: aten::mul"
    assert [events[name].node_id for name in (call, inner, operator)] == [0, 1, 2]
    assert [events[name].is_remote for name in (call, inner, operator)] == [False, True, True]
    assert events[operator].input_shapes[0] == [3]
    outer, nested = events[call].time_range, events[operator].time_range
    assert outer.start <= nested.start <= nested.end <= outer.end
    assert call in profile.key_averages().table(max_name_column_width=200)
    assert not is_listening()


@pytest.mark.parametrize("make", PROFILERS)
@in_standing_group(world_size=3)
def test_an_exported_chrome_trace_has_what_callees_did(make: Any) -> None:
    with make() as profile:
        rpc.rpc_sync("worker1", double_there, args=(torch.ones(3), "worker2"))
        torch.neg(torch.ones(1))
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/trace.json"
        profile.export_chrome_trace(path)
        with open(path) as file:
            made = json.load(file)
    events = [event for event in (made if isinstance(made, list) else made["traceEvents"]) if "dur" in event]
    call = "rpc_sync#double_there(worker0 -> worker1)"
    (outer,) = [event for event in events if event["name"] == call]
    (remote,) = [event for event in events if event["name"].endswith("#remote_op: aten::mul")]
    assert outer["ts"] <= remote["ts"] <= remote["ts"] + remote["dur"] <= outer["ts"] + outer["dur"]
    assert (outer["pid"], outer["tid"]) != (remote["pid"], remote["tid"])
    (after,) = [event for event in events if event["name"] == "aten::neg"]
    assert outer["ts"] + outer["dur"] <= after["ts"]


@pytest.mark.parametrize("make", PROFILERS)
@in_standing_group()
def test_a_call_ends_before_what_follows_it_though_listeners_to_its_beginning_are_slow(make: Any) -> None:
    with current_agent().events.listen(CallBegun, lambda call: time.sleep(0.5)), make() as profile:
        rpc.rpc_sync("worker1", torch.mul, args=(torch.ones(3), 2))
        torch.neg(torch.ones(1))
    ranges = {event.name: event.time_range for event in events_of(profile)}
    clocks_differ = 10_000  # microseconds, at most
    call, following = ranges["rpc_sync#aten::mul(worker0 -> worker1)"], ranges["aten::neg"]
    assert call.end <= following.start + clocks_differ


@pytest.mark.parametrize("make", PROFILERS)
@in_standing_group(world_size=3)
def test_a_coroutine_is_seen_in_all_its_turns(make: Any) -> None:
    with make() as profile:
        rpc.rpc_sync("worker1", compute_in_turns, args=(torch.ones(3), "worker2"))
    events = {event.name: event for event in events_of(profile)}
    there = "rpc_sync#compute_in_turns(worker0 -> worker1)#remote_op: "
    inner = there + "rpc_async#aten::mul(worker1 -> worker2)"
    assert [events[there + name].node_id for name in ("aten::relu", "all of it", "aten::neg")] == [1, 1, 1]
    assert events[inner + "#remote_op: aten::mul"].node_id == 2
    block, call = events[there + "all of it"].time_range, events[inner].time_range
    assert block.start <= call.start <= call.end <= block.end <= events[there + "aten::neg"].time_range.start


@in_standing_group()
def test_coroutines_that_take_turns_are_told_apart() -> None:
    with torch.profiler.profile() as profile:
        calls = [
            rpc.rpc_async("worker1", wait_for_other, args=pair) for pair in (("exp", "log"), ("log", "exp"))
        ]
        for call in calls:
            call.wait()
    call_of = "rpc_async#wait_for_other(worker0 -> worker1)"
    remote = [event for event in events_of(profile) if event.name.startswith(call_of + "#remote_op")]
    operators = sorted(event.name.rpartition(" ")[2] for event in remote)
    assert [name for name in operators if name in ("aten::exp", "aten::log")] == ["aten::exp", "aten::log"]


@in_standing_group()
def test_references_are_shown_by_their_methods() -> None:
    with torch.profiler.profile() as profile:
        model: rpc.RRef[Model] = rpc.remote("worker1", Model)
        model.rpc_sync().forward(torch.ones(2))
        model._get_profiling_future().wait()
    names = [event.name for event in events_of(profile)]
    assert "rpc_remote#Model(worker0 -> worker1)" in names
    assert "rpc_sync#forward(worker0 -> worker1)#remote_op: aten::relu" in names


@in_standing_group()
def test_a_call_that_fails_or_is_not_answered_in_time_is_shown_and_forgotten() -> None:
    with torch.profiler.profile() as profile:
        with pytest.raises(LookupError):
            rpc.rpc_sync("worker1", fail)
        under_way = rpc.rpc_async("worker1", torch.ones, args=(1,))
    under_way.wait()
    assert "rpc_sync#fail(worker0 -> worker1)" in [event.name for event in events_of(profile)]
    rpc.rpc_sync("worker1", fail_quietly)
    assert not is_listening()
    assert not call_profiler()._spans


def fail_quietly() -> bool:
    return is_listening()


@in_standing_group()
def test_nobody_listens_but_while_a_profile_is_open() -> None:
    assert not is_listening()
    with torch.profiler.profile():
        assert is_listening()
    assert not is_listening()
    assert not rpc.rpc_sync("worker1", fail_quietly)


@in_standing_group()
def test_a_server_profile_sees_all_requests_and_ends() -> None:
    profile: rpc.RRef[ServerProfile] = rpc.remote("worker1", ServerProfile)
    profile.rpc_sync().__enter__()
    rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
    rpc.rpc_sync("worker1", compute_in_turns, args=(torch.ones(3), "worker1"))
    profile.rpc_sync().__exit__(None, None, None)
    rpc.rpc_sync("worker1", torch.div, args=(torch.ones(2), 1))
    names = [event.key for event in profile.rpc_sync().key_averages()]
    assert "aten::relu" in names, "of a coroutine"
    assert "aten::add" in names
    assert "aten::div" not in names


def test_pytorchs_profilers_are_its_own_again_after_shutdown() -> None:
    places = (profiler.profile, "_start_trace"), (profiler_legacy, "_parse_legacy_records")
    theirs = [getattr(*place) for place in places]
    rpc.init_with_store(None, HashStore(), "alone", 0, 1)
    try:
        assert [getattr(*place) for place in places] != theirs
    finally:
        rpc.shutdown()
    assert [getattr(*place) for place in places] == theirs
