"""The part of the graph that a backward pass reaches on one worker. Pure: it only follows the given edges.

The graph on a worker ends in two kinds of nodes: *leaves*, whose gradients are computed, and *recvs*, which
represent tensors that came from another worker, where the graph continues at the *send* of that message. A
walk does not go past a recv; it finds out which tensors of which messages take part there, the *marks*.

The walk begins from *starts*: all roots together are one, and each message sent from here is another. If no
node is reached from two of them, each can be run separately, as soon as its gradients are there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

__all__ = ["ROOTS", "Edge", "Leaf", "Mark", "Reach", "marks_behind"]

ROOTS: Final = 0
"""The start that all roots together form; others are numbers of messages."""

_LEAF: Final = "torch::autograd::AccumulateGrad"

_new_mark: Final = tuple.__new__
"""Makes a named tuple without calling its constructor, which is a Python function."""

Edge = tuple[Any, int]
"""A node, and the index of one of its outputs."""


class Mark(NamedTuple):
    """A tensor of a message, as its receiver sees it: the gradient of this tensor will be sent back."""

    sender: int
    """Incarnation of the worker that sent it."""
    message: int
    tensor: int
    """Index of the tensor in the message."""


@dataclass(slots=True, eq=False)
class Leaf:
    """A leaf that is reached."""

    tensor: Any
    node: Any
    """The node that accumulates into it; None while no graph leads to it, since it was sent itself."""
    start: int
    """The start that reached it first."""


class Reach:
    """The nodes that the starts of one backward pass reach on one worker, as far as they are known.

    Args:
        recv: the class of recv nodes. Such a node has an ``origin`` with ``sender`` and ``message``.

    Attributes:
        leaves: the leaves, under the start that reached them first; each once, or once for each node that
            accumulates into it, if its data was replaced by data of another type.
        recvs: the recv nodes.
        marks: the tensors of recvs that take part.
        separate: whether no node is reached from two starts.
    """

    __slots__ = ("_known", "_recv", "_seen", "leaves", "marks", "recvs", "separate")

    def __init__(self, recv: type[Any]) -> None:
        self.leaves: dict[int, list[Leaf]] = {}
        self.recvs: list[Any] = []
        self.separate = True
        self._recv = recv
        self._seen: dict[int, tuple[Any, int]] = {}
        """Each node, by identity, and its start. The node is kept alive, so that its identity stays
        unique.
        """
        self._known: dict[int, Leaf] = {}
        """Each leaf, by the identity of its tensor."""
        self.marks: set[Mark] = set()

    def nodes(self) -> list[Any]:
        """All nodes that are reached, including recvs."""
        return [node for node, _ in self._seen.values()]

    def extend(self, start: int, edges: Iterable[Edge]) -> list[Mark]:
        """Add the nodes that a start reaches, which may have more edges than before; returns the
        new marks.
        """
        marks: list[Mark] = []
        todo = list(edges)
        mine = self.leaves.setdefault(start, [])
        seen, known, recv = self._seen, self._known, self._recv
        while todo:
            node, output = todo.pop()
            if node is None:
                continue
            before = seen.get(id(node))
            if before is None:
                seen[id(node)] = (node, start)
            elif before[1] != start:
                self.separate = False
            if isinstance(node, recv):
                if before is None:
                    self.recvs.append(node)
                mark = _new_mark(Mark, (node.origin.sender, node.origin.message, output))
                if mark not in self.marks:
                    self.marks.add(mark)
                    marks.append(mark)
            elif before is None:
                following = node.next_functions
                if following:
                    todo += following
                elif node.name() == _LEAF:
                    tensor = node.variable
                    if id(tensor) in known:
                        self.add_leaf(start, tensor, node)
                    else:
                        leaf = known[id(tensor)] = Leaf(tensor, node, start)
                        mine.append(leaf)
        return marks

    def add_leaf(self, start: int, tensor: Any, node: Any = None) -> None:
        """Add a leaf that a start reaches, through this node or because it is the start's own tensor."""
        before = self._known.get(id(tensor))
        if before is not None:
            if before.start != start:
                self.separate = False
            if node is None:
                return
            if before.node is None:
                before.node = node
                return
        leaf = Leaf(tensor, node, start)
        self._known.setdefault(id(tensor), leaf)
        self.leaves.setdefault(start, []).append(leaf)


def marks_behind(node: Any, recv: type[Any], context_id: int, limit: int) -> tuple[list[Mark], int] | None:
    """Return the marks on other workers that a gradient of a tensor leads to; called when the tensor is sent.

    The graph behind a node never changes: operations in place give a tensor another node.

    Args:
        node: the send node of the tensor.
        recv: the class of recv nodes.
        context_id: id of the context that all of them must belong to.
        limit: maximum number of nodes to visit.

    Returns:
        The marks, and the number of visited nodes; None if the graph is too large or leads out of the
        context.
    """
    marks: list[Mark] = []
    todo: list[Edge] = [(node, 0)]
    seen: dict[int, Any] = {}
    while todo:
        node, output = todo.pop()
        if node is None:
            continue
        if isinstance(node, recv):
            origin = node.origin
            if origin.context_id != context_id:
                return None
            mark = _new_mark(Mark, (origin.sender, origin.message, output))
            if mark not in marks:
                marks.append(mark)
        elif id(node) not in seen:
            seen[id(node)] = node
            if len(seen) > limit:
                return None
            todo += node.next_functions
    return marks, len(seen)
