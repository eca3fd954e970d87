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


@dataclass(eq=False)
class Recv:
    origin: Origin
    next_functions: list[tuple[Any, int]] = field(default_factory=list)


def leaf() -> Node:
    return Node(kind="torch::autograd::AccumulateGrad")


def node(*following: Any) -> Node:
    return Node([successor if isinstance(successor, tuple) else (successor, 0) for successor in following])


def reach() -> Reach:
    return Reach(Recv)


def tensors_of(found: Reach, start: int) -> list[object]:
    return [leaf.tensor for leaf in found.leaves.get(start, [])]


def test_a_recv_is_marked_for_each_of_its_tensors_and_not_passed() -> None:
    beyond = node(leaf())
    recv = Recv(Origin(7, 3), [(beyond, 0)])
    found = reach()
    start = node((recv, 0), (recv, 2), node((recv, 2)))
    assert set(found.extend(ROOTS, [(start, 0)])) == {Mark(7, 3, 0), Mark(7, 3, 2)}
    assert found.recvs == [recv]
    assert beyond not in found.nodes()
    assert found.leaves == {ROOTS: []}


def test_a_graph_deeper_than_the_stack_is_walked() -> None:
    end = leaf()
    start = node(end)
    for _ in range(100_000):
        start = node(start)
    found = reach()
    found.extend(ROOTS, [(start, 0)])
    assert tensors_of(found, ROOTS) == [end.variable]
    assert len(found.nodes()) == 100_002


def test_a_leaf_that_was_sent_itself_is_found_once() -> None:
    end = leaf()
    found = reach()
    found.add_leaf(1, end.variable)
    found.extend(1, [(node(end), 0)])
    (only,) = found.leaves[1]
    assert (only.tensor, only.node) == (end.variable, end)
    assert found.separate


def test_leaf_that_two_nodes_accumulate_into_is_found_at_both() -> None:
    first, second = leaf(), leaf()
    second.variable = first.variable
    found = reach()
    found.extend(ROOTS, [(node(first, second), 0)])
    assert {each.node for each in found.leaves[ROOTS]} == {first, second}
    assert tensors_of(found, ROOTS) == [first.variable] * 2


def test_starts_are_not_separate_where_one_is_a_leaf_that_another_reaches() -> None:
    end = leaf()
    found = reach()
    found.extend(1, [(node(end), 0)])
    found.add_leaf(2, end.variable)
    assert not found.separate
    assert (tensors_of(found, 1), tensors_of(found, 2)) == ([end.variable], [])


def test_starts_that_reach_one_recv_are_not_separate() -> None:
    recv = Recv(Origin(7, 3))
    found = reach()
    found.extend(1, [(node((recv, 0)), 0)])
    found.extend(2, [(node((recv, 1)), 0)])
    assert not found.separate


def in_context(recv: Recv, context_id: int = 1) -> Recv:
    vars(recv.origin)["context_id"] = context_id
    return recv


def test_what_lies_behind_a_tensor_is_each_recv_once() -> None:
    recv = in_context(Recv(Origin(7, 3), [(leaf(), 0)]))
    start = node((recv, 0), (recv, 2), node((recv, 2), leaf()))
    found = marks_behind(start, Recv, 1, 3)
    assert found is not None
    assert set(found[0]) == {Mark(7, 3, 0), Mark(7, 3, 2)}
    assert found[1] == 3
    assert len(found[0]) == 2


def test_nothing_is_said_of_a_graph_that_is_too_large_or_leads_out_of_the_context() -> None:
    assert marks_behind(node(node(), node()), Recv, 1, 2) is None
    assert marks_behind(node(node(), node()), Recv, 1, 3) == ([], 3)
    assert marks_behind(node(in_context(Recv(Origin(7, 3)), 2)), Recv, 1, 3) is None
