"""Why a job makes no progress: cycles in the graph of waits, and the ends of its chains. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from farcall.observe.reading.state import JobState
from farcall.observe.why.wait_graph import wait_graph
from farcall.observe.why.wait_nodes import Graph, Key, Node

__all__ = ["STILL_SECONDS", "Finding", "Report", "analyze", "severity"]

STILL_SECONDS: Final = 2.0
"""Time in seconds without movement after which a job does not count as moving."""


_RANK: Final = {
    "cycle": 0,
    "dead": 1,
    "failed": 1,
    "frozen": 2,
    "traced": 3,
    "stopped": 3,
    "unreachable": 4,
    "link": 4,
    "rendezvous": 5,
}
"""Order of the kinds of findings: those with lower numbers come first."""

_BY_THEMSELVES: Final = frozenset(
    ("dead", "failed", "frozen", "traced", "stopped", "unreachable", "rendezvous")
)
"""Kinds of nodes that are findings even if nothing is known to wait for them."""

_AT_WORK: Final = frozenset(("computes", "runs", "sleeps"))
"""Kinds of nodes at the end of a chain that may go on by themselves."""

_USUAL: Final = frozenset(("shutdown", "left", "frozen out"))
"""Kinds of nodes that wait as intended, until others are done."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A reason why something makes no progress.

    Attributes:
        kind: "cycle", or the kind of the node at the end of a chain.
        text: description of the reason.
        nodes: the nodes of the cycle, or the one at the end.
        waiting: number of threads that wait for it, directly or through others.
    """

    kind: str
    text: str
    nodes: tuple[Node, ...]
    waiting: int

    @property
    def culprit(self) -> Node:
        """The node to look at first."""
        return self.nodes[0]


@dataclass(frozen=True, slots=True)
class Report:
    """What is known of a job that may hang.

    Attributes:
        job: its state.
        nodes: the nodes to show, in the order of the chains.
        findings: the reasons why it makes no progress, the most important first.
        all_nodes: all nodes.
    """

    job: JobState
    nodes: tuple[Node, ...]
    findings: tuple[Finding, ...]
    all_nodes: tuple[Node, ...] = ()

    def label(self, finding: Finding) -> str:
        """Return what a finding is: "cycle", "culprit", or "note" if nothing is wrong because of it."""
        if finding.kind == "cycle":
            return "cycle"
        moves = bool(self.job.living) and min(self.job.still, self.job.quiet) < STILL_SECONDS
        is_cause = finding.waiting and (finding.kind in _BY_THEMSELVES or not moves)
        return "culprit" if is_cause or finding.kind == "failed" else "note"

    def to_json(self) -> dict[str, Any]:
        """Return it as values for JSON."""
        return {
            "job": self.job.id,
            "still_seconds": round(self.job.still, 1),
            "workers": [
                {
                    "name": each.name,
                    "rank": each.rank,
                    "host": each.host,
                    "pid": each.pid,
                    "phase": each.phase,
                    "alive": each.process.alive,
                    "stopped": each.process.stopped,
                }
                for each in self.job
            ],
            "waits": [_node_to_json(node) for node in self.nodes],
            "findings": [
                {
                    "kind": each.kind,
                    "text": each.text,
                    "waiting": each.waiting,
                    "nodes": [_node_to_json(node) for node in each.nodes],
                }
                for each in self.findings
            ],
            "skipped": [{"file": file, "why": why} for file, why in self.job.skipped],
        }


def _node_to_json(node: Node) -> dict[str, Any]:
    return {"worker": node.worker, "rank": node.rank, "host": node.host, **node.to_json()}


def analyze(job: JobState) -> Report:
    """Find out what waits for what in a job, and why."""
    graph = wait_graph(job)
    waited = graph.waited_for()
    cycles = _cycles(graph)
    in_cycle = {key for cycle in cycles for key in cycle}
    findings = [_of_cycle(graph, cycle) for cycle in cycles]
    findings += [
        Finding(node.kind, node.in_words(), (node,), _waiting_for(graph, {node.key}))
        for node in _ends(graph, waited, in_cycle)
    ]
    findings.sort(key=lambda each: (_RANK.get(each.kind, 9), -each.waiting, each.culprit.key))
    shown = tuple(_in_order(graph, findings, waited))
    return Report(job, shown, tuple(findings), tuple(graph.nodes.values()))


def severity(report: Report) -> int:
    """Return how clearly a job hangs, as the number of a rank: lower is clearer."""
    found = [each for each in report.findings if each.kind in _BY_THEMSELVES or report.label(each) != "note"]
    ranks = [_RANK.get(each.kind, 20 if each.kind in _AT_WORK else 9) for each in found]
    return min(ranks, default=30)


# ---- cycles


def _cycles(graph: Graph) -> list[list[Key]]:
    """Yield the shortest cycle of each strongly connected part of the graph."""
    found: list[list[Key]] = []
    seen: set[Key] = set()
    for key in sorted(graph.nodes):
        if key in seen:
            continue
        cycle = _cycle_through(graph, key)
        if cycle is not None and not seen.intersection(cycle):
            seen.update(cycle)
            found.append(cycle)
    return found


def _cycle_through(graph: Graph, start: Key) -> list[Key] | None:
    """Return the shortest path from a node back to it."""
    ways: list[list[Key]] = [[start]]
    seen: set[Key] = set()
    while ways:
        following: list[list[Key]] = []
        for way in ways:
            for edge in graph.nodes[way[-1]].edges:
                if edge.to == start:
                    return way
                if edge.to not in seen:
                    seen.add(edge.to)
                    following.append([*way, edge.to])
        ways = following
    return None


def _of_cycle(graph: Graph, cycle: list[Key]) -> Finding:
    """Describe a cycle, from the main thread of the lowest rank if that is part of it."""
    nodes = [graph.nodes[key] for key in cycle]
    first = min(nodes, key=lambda node: (node.thread != "MainThread", node.key))
    begin = nodes.index(first)
    nodes = nodes[begin:] + nodes[:begin]
    parts = [first.who]
    for node, following in zip(nodes, [*nodes[1:], first], strict=True):
        how = next((edge.how for edge in node.edges if edge.to == following.key), "")
        parts.append(f"lock {how}" if "held by" in how else following.who)
    waiting = _waiting_for(graph, set(cycle))
    return Finding("cycle", " → ".join(parts), tuple(nodes), len(nodes) + waiting)


# ---- ends of chains


def _ends(graph: Graph, waited: set[Key], in_cycle: set[Key]) -> Iterator[Node]:
    """Yield the nodes that wait for no other node, and for which others wait."""
    found = False
    rest: list[Node] = []
    for node in graph.nodes.values():
        if node.key in in_cycle or node.edges:
            continue
        if node.key in waited or node.kind in _BY_THEMSELVES or node.kind in _CALLS_WITHOUT_END:
            if node.kind != "left" or node.key in waited:
                found = True
                yield node
        elif node.kind not in _USUAL:
            rest.append(node)
    if not found and not in_cycle:
        yield from rest


_CALLS_WITHOUT_END: Final = frozenset(("link", "call", "unanswered", "arriving", "postponed", "queued"))
"""Kinds of calls whose callee has no thread that runs them."""


def _waiting_for(graph: Graph, ends: set[Key]) -> int:
    """Return the number of nodes that wait for one of these, directly or through others."""
    backwards: dict[Key, list[Key]] = {}
    for node in graph.nodes.values():
        for edge in node.edges:
            backwards.setdefault(edge.to, []).append(node.key)
    seen, left = set(ends), list(ends)
    while left:
        for key in backwards.get(left.pop(), ()):
            if key not in seen:
                seen.add(key)
                left.append(key)
    return len(seen) - len(ends)


# ---- what to show


def _in_order(graph: Graph, findings: Sequence[Finding], waited: set[Key]) -> Iterator[Node]:
    """Return the nodes of the findings and all that wait for them: each chain from its beginning to
    its end.
    """
    wanted = _leading_to(graph, {node.key for each in findings for node in each.nodes})
    shown: set[Key] = set()
    in_findings = {node.key for each in findings for node in each.nodes}

    def follow(key: Key) -> Iterator[Node]:
        left = [key]
        while left:
            at = left.pop()
            if at in shown or at not in wanted:
                continue
            shown.add(at)
            node = graph.nodes[at]
            if node.kind not in _USUAL or at in in_findings:
                yield node
            left += [edge.to for edge in reversed(node.edges)]

    starts = [node for node in graph.nodes.values() if node.key in wanted and node.key not in waited]
    for cycle in (each for each in findings if each.kind == "cycle"):
        for node in cycle.nodes:
            yield from follow(node.key)
    for node in sorted(starts, key=lambda each: (each.kind in _USUAL, each.key)):
        yield from follow(node.key)
    for key in sorted(wanted):
        yield from follow(key)


def _leading_to(graph: Graph, ends: set[Key]) -> set[Key]:
    wanted = set(ends)
    changed = True
    while changed:
        changed = False
        for node in graph.nodes.values():
            if node.key not in wanted and any(edge.to in wanted for edge in node.edges):
                wanted.add(node.key)
                changed = True
    return wanted
