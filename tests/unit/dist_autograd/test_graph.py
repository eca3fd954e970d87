"""What a backward reaches on one worker, on graphs made by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dist_autograd.graph import ROOTS, Mark, Reach, marks_behind


@dataclass(eq=False)
class Node:
    next_functions: list[tuple[Any, int]] = field(default_factory=list)
    kind: str = "node"
    variable: object = field(default_factory=object)

    def name(self) -> str:
        return self.kind


@dataclass
class Origin:
    sender: int
    message: int
    context_id: int = 1


@dataclass(eq=False)
class Recv:
    origin: Origin
    next_functions: list[tuple[Any, int]] = field(default_factory=list)


def leaf() -> Node:
    return Node(kind="torch::autograd::AccumulateGrad")


def node(*following: Any) -> Node:
    return Node([successor if isinstance(successor, tuple) else (successor, 0) for successor in following])


def tensors_of(found: Reach) -> list[object]:
    return [leaf.tensor for leaf in found.leaves[ROOTS]]


def test_a_graph_deeper_than_the_stack_is_walked() -> None:
    end = leaf()
    start = node(end)
    for _ in range(100_000):
        start = node(start)
    found = Reach(Recv)
    found.extend(ROOTS, [(start, 0)])
    assert tensors_of(found) == [end.variable]
    assert len(found.nodes()) == 100_002


def test_leaf_that_two_nodes_accumulate_into_is_found_at_both() -> None:
    first, second = leaf(), leaf()
    second.variable = first.variable
    found = Reach(Recv)
    found.extend(ROOTS, [(node(first, second), 0)])
    assert {each.node for each in found.leaves[ROOTS]} == {first, second}
    assert tensors_of(found) == [first.variable] * 2


def test_what_lies_behind_a_tensor_is_each_recv_once() -> None:
    recv = Recv(Origin(7, 3), [(leaf(), 0)])
    start = node((recv, 0), (recv, 2), node((recv, 2), leaf()))
    found = marks_behind(start, Recv, 1, 3)
    assert found is not None
    assert set(found[0]) == {Mark(7, 3, 0), Mark(7, 3, 2)}
    assert found[1] == 3
    assert len(found[0]) == 2


def test_nothing_is_said_of_a_graph_that_is_too_large_or_leads_out_of_the_context() -> None:
    assert marks_behind(node(node(), node()), Recv, 1, 2) is None
    assert marks_behind(node(node(), node()), Recv, 1, 3) == ([], 3)
    assert marks_behind(node(Recv(Origin(7, 3, context_id=2))), Recv, 1, 3) is None
