"""How the ranks of a new world find each other's agents."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from rpc.errors import GroupMismatchError, RendezvousTimeoutError
from rpc.options import AgentOptions
from rpc.transport.authentication import Seal
from spmd.collectives.errors import StoreGivenUpError
from spmd.collectives.node import Node, exchanged, find_node
from tests.support.finalizers import ends_soon, running_in_locked_sections


def test_ranks_that_do_not_come_are_named() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(RendezvousTimeoutError, match=r"rank 0 has waited 0\.2 s .* of 3; missing: 1, 2\."):
        find_node(store, 0, 3, 0.2, None)


def test_a_rank_with_another_token_is_named() -> None:
    store = HashStore()
    store.set("1/agent/1", Seal(b"the token of another job").close("agent/1", b"-"))  # type: ignore[arg-type]
    options = AgentOptions(token="the token of this job")
    with pytest.raises(
        GroupMismatchError, match=r"rank 1 of .* has another token than rank 0.*FARCALL_TOKEN"
    ):
        find_node(store, 0, 3, 5, options)  # rank 2 has not come


@pytest.mark.parametrize("kind", [StoreGivenUpError, GroupMismatchError])
def test_a_reason_that_is_known_at_the_deadline_is_given(kind: type[Exception]) -> None:
    def read(rank: int, _: bytes) -> None:
        Event().wait(0.2)
        raise kind("the reason")

    with pytest.raises(kind, match="the reason"):
        exchanged(HashStore(), "words", b"-", 0, 2, 0.1, read)


class Watching:
    """A group."""

    def worker_gone(self, peer: Any, reason: str) -> None: ...

    def agent_closes(self) -> None: ...

    def observed(self) -> dict[str, Any]:
        return {}


def test_a_finalizer_may_end_a_group_while_another_one_begins() -> None:
    within: list[Callable[[], object]] = []
    lifecycle: Any = SimpleNamespace(hooks=SimpleNamespace(gone=[], close=[]))
    bulk: Any = None
    with running_in_locked_sections(within):
        node = Node(lifecycle, {}, bulk, print, [], "key", shares_memory=False, owned=False)
    garbage, other = Watching(), Watching()
    node.add(garbage)
    within.append(lambda: node.remove(garbage))
    assert ends_soon(lambda: node.add(other))
