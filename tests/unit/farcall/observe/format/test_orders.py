"""Orders to the workers of a job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from farcall.observe.format import orders as orders_module
from farcall.observe.format.job_files import read_facts
from farcall.observe.format.jobs import make_private
from farcall.observe.format.orders import Orders, give_order
from farcall.observe.worker.state_file import StateFile
from tests.unit.farcall.observe.format.test_layout import BEAT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_private(tmp_path / "job")
    return tmp_path / "job"


def test_each_order_is_followed_once(folder: Path) -> None:
    orders, followed = Orders(), list[Any]()
    orders.on("trace", lambda order: followed.append(order["number"]))
    for number in (1, 2):
        give_order(folder, "trace", number=number)
        os.utime(folder / "trace.order", (1.0, 1.0))  # a clock that may not have gone on
        for _ in range(2):
            orders.look(folder)
    assert followed == [1, 2]


def test_workers_that_write_make_nobody_read_an_order_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, state, reads = Orders(), StateFile(folder / "w.state"), list[Path]()
    orders.on("count", lambda _: None)
    orders.on("trace", lambda _: None)

    def read(path: Path) -> dict[str, Any]:
        reads.append(path)
        return read_facts(path)

    monkeypatch.setattr(orders_module, "read_facts", read)
    give_order(folder, "trace")
    for _ in range(3):
        state.beat(BEAT)
        orders.look(folder)
    assert reads == [folder / "trace.order"]
