"""How the ranks of a new world find each other's agents."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from rpc.errors import GroupMismatchError, RendezvousTimeoutError
from rpc.group.authentication import Seal
from rpc.options import AgentOptions
from spmd.collectives.node import find_node


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
        find_node(store, 0, 2, 5, options)
