"""What a backward reaches on one worker. Pure: it only follows the edges of the graph that it is given.

The graph on a worker ends in two kinds of nodes: *leaves*, whose gradients are wanted, and *recvs*, which
stand for tensors that came from another worker, where the graph goes on from the *send* of that message.
A walk does not go past a recv; it finds out which tensors of which messages take part there, the *marks*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

__all__ = ["Mark", "Reach"]

_LEAF = "torch::autograd::AccumulateGrad"

Edge = tuple[Any, int]
"""A node, and which of its outputs."""


class Mark(NamedTuple):
    """A tensor of a message, from the view of its receiver: the gradient of this one will be sent back."""

    sender: int
    """The incarnation of the worker that sent it."""
    message: int
    tensor: int
    """Which of the message's tensors."""


class Reach:
    """The nodes that the starts of one backward reach on one worker, as far as they are known.

    Args:
        recv: the class of recv nodes. Such a node has an ``origin`` with ``sender`` and ``message``.
        on_visit: called with each node, recvs included, when it is first seen.

    Attributes:
        leaves: the nodes that accumulate gradients.
        recvs: the recv nodes.
    """

    def __init__(self, recv: type[Any], on_visit: Callable[[Any], object]) -> None:
        self.leaves: list[Any] = []
        self.recvs: list[Any] = []
        self._recv = recv
        self._on_visit = on_visit
        self._seen: dict[int, Any] = {}  # holds the nodes: the identity of one that is gone may come again
        self._marked: set[Mark] = set()

    def extend(self, edges: Iterable[Edge]) -> list[Mark]:
        """Take in what more starts reach; returns the marks that are new."""
        marks: list[Mark] = []
        seen, recv, on_visit = self._seen, self._recv, self._on_visit
        todo: list[Any] = []
        for node, output in edges:
            self._follow(node, output, todo, marks)
        while todo:
            node = todo.pop()
            if id(node) in seen:
                continue
            seen[id(node)] = node
            on_visit(node)
            following = node.next_functions
            if not following and node.name() == _LEAF:
                self.leaves.append(node)
            for successor, output in following:
                if successor is None or (id(successor) in seen and not isinstance(successor, recv)):
                    continue
                self._follow(successor, output, todo, marks)
        return marks

    def _follow(self, node: Any, output: int, todo: list[Any], marks: list[Mark]) -> None:
        if not isinstance(node, self._recv):
            todo.append(node)
            return
        if id(node) not in self._seen:
            self._seen[id(node)] = node
            self._on_visit(node)
            self.recvs.append(node)
        mark = Mark(node.origin.sender, node.origin.message, output)
        if mark not in self._marked:
            self._marked.add(mark)
            marks.append(mark)
