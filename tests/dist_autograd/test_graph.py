"""What a backward reaches on one worker, on graphs made by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dist_autograd.graph import Mark, Reach


@dataclass(eq=False)
class Node:
    next_functions: list[tuple[Any, int]] = field(default_factory=list)
    kind: str = "node"

    def name(self) -> str:
        return self.kind


@dataclass
class Origin:
    sender: int
    message: int


@dataclass(eq=False)
class Recv:
    origin: Origin
    next_functions: list[tuple[Any, int]] = field(default_factory=list)


def leaf() -> Node:
    return Node(kind="torch::autograd::AccumulateGrad")


def node(*following: Any) -> Node:
    return Node([successor if isinstance(successor, tuple) else (successor, 0) for successor in following])


def reach() -> tuple[Reach, list[Any]]:
    visited: list[Any] = []
    return Reach(Recv, visited.append), visited


def test_leaves_are_found_through_shared_and_missing_successors() -> None:
    first, second = leaf(), leaf()
    shared = node(first, (None, 0))
    start = node(shared, node(shared, second))
    found, visited = reach()
    assert found.extend([(start, 0)]) == []
    assert set(found.leaves) == {first, second}
    assert len(visited) == 5


def test_a_recv_is_marked_for_each_of_its_tensors_and_not_passed() -> None:
    beyond = node(leaf())
    recv = Recv(Origin(7, 3), [(beyond, 0)])
    found, visited = reach()
    start = node((recv, 0), (recv, 2), node((recv, 2)))
    assert set(found.extend([(start, 0)])) == {Mark(7, 3, 0), Mark(7, 3, 2)}
    assert found.recvs == [recv]
    assert beyond not in visited
    assert found.leaves == []


def test_a_root_may_be_a_received_tensor() -> None:
    recv = Recv(Origin(7, 3))
    found, _ = reach()
    assert found.extend([(recv, 1)]) == [Mark(7, 3, 1)]


def test_more_starts_add_only_what_is_new() -> None:
    recv = Recv(Origin(7, 3))
    shared = node((recv, 0), leaf())
    found, visited = reach()
    found.extend([(node(shared), 0)])
    seen = len(visited)
    assert found.extend([(node(shared, (recv, 1)), 0)]) == [Mark(7, 3, 1)]
    assert len(visited) == seen + 1
    assert visited.count(recv) == 1
    assert len(found.leaves) == 1


def test_a_graph_deeper_than_the_stack_is_walked() -> None:
    end = leaf()
    start = node(end)
    for _ in range(100_000):
        start = node(start)
    found, visited = reach()
    found.extend([(start, 0)])
    assert found.leaves == [end]
    assert len(visited) == 100_002
