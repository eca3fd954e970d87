"""What a user's program gets told about the types of what it calls. It is checked, and not run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_type

import torch
from torch import Tensor, nn

from farcall import rpc


class Table:
    """An object on another worker."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def look_up(self, row: int) -> Tensor:
        """One row."""
        return torch.zeros(row)


def evaluate(batch: Tensor, names: Sequence[str]) -> dict[str, float]:
    """A function."""
    return dict.fromkeys(names, batch.sum().item())


async def evaluate_later(batch: Tensor) -> float:
    """A coroutine, awaited at the callee."""
    return batch.sum().item()


@rpc.functions.async_execution
def evaluate_in_turn(batch: Tensor) -> torch.futures.Future[float]:
    """A function that answers later."""
    return rpc.rpc_async("worker1", evaluate_later, args=(batch,))


def main() -> None:
    """Calls everything in each way."""
    batch = torch.ones(2)
    assert_type(rpc.rpc_sync("worker1", evaluate, args=(batch, ["a"])), dict[str, float])
    assert_type(rpc.rpc_sync("worker1", evaluate_later, args=(batch,)), float)
    assert_type(rpc.rpc_sync("worker1", evaluate_in_turn, args=(batch,)), float)
    assert_type(rpc.rpc_sync("worker1", lambda: 3), int)
    future = rpc.rpc_async("worker1", evaluate, args=(batch, ["a"]))
    assert_type(future, rpc.Future[dict[str, float]])
    assert_type(future.result(timeout=5), dict[str, float])
    assert_type(rpc.rpc_async("worker1", evaluate_in_turn, args=(batch,)).wait(), float)
    assert_type(future.cancel(), bool)
    assert_type([done.result() for done in rpc.as_completed([future])], list[dict[str, float]])
    assert_type(rpc.wait_any([future]), rpc.Future[dict[str, float]])
    assert_type(future.then(lambda done: len(done.result())).wait(), int)
    table = rpc.remote("worker1", Table, args=(3,))
    assert_type(table, rpc.RRef[Table])
    assert_type(table.to_here(), Table)
    assert_type(rpc.remote("worker1", nn.Linear, args=(4, 1)), rpc.RRef[nn.Linear])
    assert_type(rpc.remote("worker1", evaluate_later, args=(batch,)).to_here(), float)
    assert_type(rpc.remote("worker1", Table, args=(3,), concurrency=1).owner().name, str)
    with rpc.wait_all():
        rpc.rpc_async("worker1", evaluate_later, args=(batch,))
    rpc.rpc_sync("worker1", 3)  # type: ignore[call-overload]  # what cannot be called
    table.look_up(1)  # type: ignore[attr-defined]  # the object's, not the reference's


async def awaits() -> None:
    """Waits on its own loop."""
    assert_type(await rpc.rpc_async("worker1", evaluate_later, args=(torch.ones(1),)), float)


def spawned(steps: int) -> float:
    """The function of a worker."""
    return steps / 2


if __name__ == "__main__":
    rpc.spawn(spawned, 3, workers=2)
    with rpc.local_group(2) as group:
        assert_type([rpc.rpc_sync(name, spawned, args=(1,)) for name in group], list[float])
    with rpc.serve({"evaluate": evaluate}, port=8443) as server:
        assert_type(server.port, int)
        assert_type(server.stop(grace=1.0), int)
