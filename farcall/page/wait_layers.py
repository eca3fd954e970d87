"""The graph of waits as the page draws it: equal nodes as one box, in layers. Pure.

Layers go from what waits to what is waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from farcall.observe.why.analysis import Report
from farcall.observe.why.wait_nodes import Key, Node

__all__ = ["wait_layers"]

MAX_BOXES: Final = 40
"""Maximum number of boxes that are drawn; the report lists the most telling nodes first."""

_MAX_NAMES: Final = 12
"""Maximum number of workers that are named in one box."""


@dataclass(slots=True)
class _Box:
    """Nodes that do the same, at as many workers."""

    nodes: list[Node]
    to: dict[int, str] = field(default_factory=dict)
    depth: int = 0


def wait_layers(report: Report) -> dict[str, Any]:
    """Boxes and arrows for a report.

    Returns:
        ``boxes``, each with its ``depth`` (its layer, from 0), ``arrows`` between boxes by index, those that
        close a cycle marked ``back``, and ``left_out``, the number of nodes that are not drawn.
    """
    cycle = [node.key for each in report.findings if each.kind == "cycle" for node in each.nodes]
    ends = {each.culprit.key for each in report.findings if each.kind != "cycle" and each.waiting}
    boxes, index = _boxes(report.nodes, set(cycle))
    for box in boxes:
        for node in box.nodes:
            for edge in node.edges:
                to = index.get(edge.to)
                if to is not None and boxes[to] is not box:
                    box.to.setdefault(to, edge.how)
    back = _layer(boxes, [index[key] for key in cycle if key in index])
    in_cycle = _cycle_arrows(report, index)
    return {
        "boxes": [_box_to_json(box, set(cycle), ends) for box in boxes],
        "arrows": [
            {"from": n, "to": to, "how": how, "back": (n, to) in back, "cycle": (n, to) in in_cycle}
            for n, box in enumerate(boxes)
            for to, how in box.to.items()
        ],
        "left_out": len(report.nodes) - sum(len(box.nodes) for box in boxes),
    }


def _boxes(nodes: Sequence[Node], cycle: set[Key]) -> tuple[list[_Box], dict[Key, int]]:
    boxes: list[_Box] = []
    places: dict[object, int] = {}
    index: dict[Key, int] = {}
    for node in nodes:
        same: object = (node.thread, node.kind, node.text, node.place, node.remark)
        same = node.key if node.key in cycle else same
        at = places.get(same)
        if at is None:
            if len(boxes) == MAX_BOXES:
                continue
            at = places[same] = len(boxes)
            boxes.append(_Box([]))
        boxes[at].nodes.append(node)
        index[node.key] = at
    return boxes, index


def _layer(boxes: Sequence[_Box], first: Iterable[int]) -> set[tuple[int, int]]:
    """Give each box its layer; returns the arrows that lead back to a box before.

    Args:
        first: the boxes from which to begin: those of cycles, in their order.
    """
    back: set[tuple[int, int]] = set()
    done: list[int] = []
    seen: set[int] = set()
    aimed = {to for box in boxes for to in box.to}
    starts = [n for n in range(len(boxes)) if n not in aimed]
    for start in [*first, *starts, *range(len(boxes))]:
        if start in seen:
            continue
        seen.add(start)
        on_way = [start]
        ahead = [iter(boxes[start].to)]
        while on_way:
            to = next(ahead[-1], None)
            if to is None:
                done.append(on_way.pop())
                ahead.pop()
            elif to in on_way:
                back.add((on_way[-1], to))
            elif to not in seen:
                seen.add(to)
                on_way.append(to)
                ahead.append(iter(boxes[to].to))
    for n in reversed(done):
        for to in boxes[n].to:
            if (n, to) not in back:
                boxes[to].depth = max(boxes[to].depth, boxes[n].depth + 1)
    return back


def _cycle_arrows(report: Report, index: dict[Key, int]) -> set[tuple[int, int]]:
    found: set[tuple[int, int]] = set()
    for finding in report.findings:
        if finding.kind == "cycle":
            keys = [node.key for node in finding.nodes]
            pairs = zip(keys, [*keys[1:], keys[0]], strict=True)
            found |= {(index[a], index[b]) for a, b in pairs if a in index and b in index}
    return found


def _box_to_json(box: _Box, cycle: set[Key], ends: set[Key]) -> dict[str, Any]:
    longest = max(box.nodes, key=lambda node: node.seconds)
    names = list(dict.fromkeys(node.worker for node in box.nodes))
    return {
        "workers": names[:_MAX_NAMES],
        "count": len(names),
        **longest.to_json(),
        "depth": box.depth,
        "cycle": any(node.key in cycle for node in box.nodes),
        "culprit": any(node.key in ends for node in box.nodes),
    }
