"""Nodes and edges of the graph of what waits for what. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from farcall.observe.reading.state import Position

__all__ = ["PROCESS", "Edge", "Graph", "Key", "Node"]

Key = tuple[int, str]
"""Key of a node: the index of its worker in the job, and its name there."""

PROCESS: Final = "process"
"""Second part of the key of a node that is a whole process."""


@dataclass(frozen=True, slots=True)
class Edge:
    """An edge: another node that a node waits for, and the relation between them, for the description of a
    cycle.
    """

    to: Key
    how: str = ""


@dataclass(slots=True)
class Node:
    """Something that waits, or that others wait for.

    Attributes:
        key: its key.
        worker: name of its worker.
        rank: rank of its worker.
        host: host of its worker.
        thread: name of the thread; "" for a process.
        kind: kind of what it does: "call", "lock", "barrier", "sleeps", "computes", "dead" and so on.
        text: description of what it does.
        seconds: duration in seconds; 0 if that is not known.
        place: position in the program, or None.
        remark: further description.
        edges: what it waits for.
        stack: the positions of its stack, innermost first.
        serves: function of the request that it runs; "".
        moves: whether it computes, or has computed between the last two looks.
    """

    key: Key
    worker: str
    rank: int
    host: str
    thread: str
    kind: str
    text: str
    seconds: float = 0.0
    place: Position | None = None
    remark: str = ""
    edges: list[Edge] = field(default_factory=list)
    stack: list[Position] = field(default_factory=list)
    serves: str = ""
    moves: bool = False

    @property
    def who(self) -> str:
        """The names of its worker and thread."""
        return f"{self.worker} {self.thread}".strip()

    def in_words(self) -> str:
        """Describe it in one line."""
        text = f"{self.who} {self.text}"
        if self.place is not None:
            seen = ", last seen" if self.kind in ("dead", "traced", "stopped", "unreachable") else ","
            text += f"{seen} at {self.place} in {self.place.function}"
        return f"{text}; {self.remark}" if self.remark else text

    def to_json(self) -> dict[str, Any]:
        """Return what it does, and where in the program, as values for JSON."""
        return {
            "thread": self.thread,
            "kind": self.kind,
            "text": self.text,
            "seconds": round(self.seconds, 1),
            "place": None if self.place is None else str(self.place),
            "function": None if self.place is None else self.place.function,
            "remark": self.remark,
        }


@dataclass(slots=True)
class Graph:
    """All nodes, by key."""

    nodes: dict[Key, Node] = field(default_factory=dict)

    def waited_for(self) -> set[Key]:
        """Return the nodes that others wait for."""
        return {edge.to for node in self.nodes.values() for edge in node.edges if edge.to != node.key}
