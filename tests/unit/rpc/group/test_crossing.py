"""Two workers connect to each other at the same moment: whatever the order of events, one connection results.

The two share a network without sockets, whose every step is chosen: which attempt gets through first, which
message arrives first, when the group is formed and when something is sent.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from rpc.group.link import LinkState
from rpc.testing.memory_transport import MemoryNetwork, MemoryTransport
from rpc.transport.base import Transport
from tests.support.effort import examples
from tests.support.nodes import Node

MESSAGES = 3

Choose = Callable[[int], int]
"""Picks one of so many possible next steps."""


async def cross(incarnations: tuple[int, int], late_group: bool, choose: Choose) -> tuple[Node, Node]:
    """Let both send a few messages to each other, in the order that ``choose`` brings about."""
    loop = asyncio.get_running_loop()
    network = MemoryNetwork()
    nodes = [
        Node(
            name,
            index,
            incarnation,
            loop,
            lambda function, *arguments: function(*arguments),
            reach={"memory": _as_transport(MemoryTransport(network))},
            listen_on=name,
        )
        for index, (name, incarnation) in enumerate(zip(("left", "right"), incarnations, strict=True))
    ]
    left, right = nodes
    own_steps: list[list[Callable[[], None]]] = [
        [
            *([lambda here=here, there=there: here.form_group(there.member)] if late_group else []),
            *(
                lambda here=here, there=there, number=number: here.send(there, number)
                for number in range(MESSAGES)
            ),
        ]
        for here, there in ((left, right), (right, left))
    ]
    if not late_group:
        left.form_group(right.member)
        right.form_group(left.member)
    while True:
        for _ in range(4):
            await asyncio.sleep(0)
        steps = [*network.events(), *(steps[0] for steps in own_steps if steps)]
        if not steps:
            return left, right
        step = steps[choose(len(steps))]
        for own in own_steps:
            if own and own[0] is step:
                own.pop(0)
        step()


def _as_transport(transport: MemoryTransport) -> Transport:
    return transport


def check(left: Node, right: Node) -> None:
    """Exactly one connection, no message lost, doubled or out of order, nobody given up, nothing left."""
    for here, there in ((left, right), (right, left)):
        assert here.numbers_from(there) == list(range(MESSAGES))
        assert here.gone == []
        assert len(here.open_connections()) == 1
        assert not here.connections.handshaking
        assert here.peers[there.member.incarnation].link.state is LinkState.ESTABLISHED
    (end,), (other_end,) = left.open_connections(), right.open_connections()
    assert end.other is other_end  # type: ignore[attr-defined]


@pytest.mark.parametrize("late_group", [False, True])
@pytest.mark.parametrize("incarnations", [(1, 2), (2, 1)])
def test_one_connection_results_whatever_the_order_of_events(
    incarnations: tuple[int, int], late_group: bool
) -> None:
    chance = random.Random(11)

    async def many() -> None:
        for _ in range(examples(250)):
            check(*await cross(incarnations, late_group, chance.randrange))

    asyncio.run(many())
