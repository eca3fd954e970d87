"""Sends and receives between ranks: what ends on other threads while the loss of a rank is handled."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from spmd.collectives.messages import Messages


class Gone(dict[int, str]):
    """The ranks that are gone; other threads go on while one looks."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        super().__init__({1: "it has left the process group"})
        self._meanwhile = meanwhile

    def __contains__(self, rank: object) -> bool:
        self._meanwhile()
        return super().__contains__(rank)


def test_operations_may_end_while_the_loss_of_a_rank_is_handled() -> None:
    lost: list[Callable[[], None]] = []

    def end_one() -> None:
        for ending in (messages._offers, messages._coming):
            if len(ending) > 1:
                ending.popitem()
                return

    members: Any = SimpleNamespace(
        rank=0, size=2, failed=False, gone=Gone(end_one), watch=lost.append, check_rank=str, describe=str
    )
    bulk: Any = SimpleNamespace(send=lambda *_: SimpleNamespace(on_done=id))
    messages = Messages(bulk, [members] * 2, members, [0, 1], run_soon=id)
    works = [messages.send(torch.ones(1 << 20), 1, tag=0) for _ in range(4)]
    cancelled: list[int] = []
    for number in range(4):
        message: Any = type("Arriving", (), {"cancel": lambda _, number=number: cancelled.append(number)})()
        messages._coming[message] = 1
    lost[0]()
    assert works[0].is_completed()
    assert cancelled[0] == 0
