"""What served functions leave in force on their thread, or in a context, is in force in no other call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from farcall.serving import Limits
from tests.support.gateway import Connect, Serve
from tests.support.modes import DEFAULTS, leave_everything, look


async def leave_in_a_coroutine() -> None:
    leave_everything()
    await asyncio.sleep(0)


async def look_in_a_coroutine() -> dict[str, Any]:
    return look()


def leave_in_a_stream() -> Iterator[int]:
    leave_everything()
    yield 1


async def leave_in_an_async_stream() -> AsyncIterator[int]:
    leave_everything()
    yield 1
    await asyncio.sleep(0)
    yield 2


SERVED = {
    "leave": leave_everything,
    "leave_in_a_coroutine": leave_in_a_coroutine,
    "leave_in_a_stream": leave_in_a_stream,
    "leave_in_an_async_stream": leave_in_an_async_stream,
    "look": look,
    "look_in_a_coroutine": look_in_a_coroutine,
}


@pytest.mark.parametrize("leaver", [name for name in SERVED if name.startswith("leave")])
def test_what_a_served_function_leaves_is_in_force_in_no_other_call(
    serve: Serve, connect: Connect, leaver: str
) -> None:
    client = connect(serve(SERVED, limits=Limits(in_flight=1)))
    if leaver.endswith("stream"):
        assert list(client.stream(leaver))
    else:
        client.call(leaver)
    assert client.call("look") == DEFAULTS
    assert client.call("look_in_a_coroutine") == DEFAULTS
