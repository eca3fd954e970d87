"""What the page shows of one worker: its threads with their stacks, and its calls. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from farcall.observe.format.positions import Position
from farcall.observe.reading.state import ThreadState, WorkerState, items
from farcall.observe.why.analysis import Report

__all__ = ["worker_view"]


def worker_view(report: Report, name: str) -> dict[str, Any] | None:
    """The threads of a worker with their stacks, and its calls; None if there is no such worker."""
    number, worker = next(
        ((number, each) for number, each in enumerate(report.job) if each.name == name), (0, None)
    )
    if worker is None:
        return None
    texts = {node.key[1]: node.text for node in report.all_nodes if node.key[0] == number}
    return {
        "name": worker.name,
        "rank": worker.rank,
        "host": worker.host,
        "pid": worker.pid,
        "program": str(worker.fact("program")),
        "folder": worker.folder,
        "frozen": worker.is_frozen,
        "threads": _frozen_threads(worker)
        if worker.frozen
        else [_thread(each, texts.get(str(each.id))) for each in worker.threads],
        "coroutines": [
            {
                "from": str(each.get("from")),
                "seconds": round(worker.age(each.get("began")), 1),
                "stack": _stack([Position.of(frame, worker.folder) for frame in items(each.get("stack"))]),
            }
            for each in worker.requests
            if each.get("stack")
        ],
        "calls": [
            {
                "to": str(each.get("to")),
                "what": str(each.get("what")),
                "seconds": round(worker.age(each.get("began")), 1),
            }
            for each in worker.calls
        ],
        "requests": [
            {
                "from": str(each.get("from")),
                "state": str(each.get("state")),
                "seconds": round(worker.age(each.get("began")), 1),
            }
            for each in worker.requests
        ],
    }


def _thread(thread: ThreadState, text: str | None) -> dict[str, Any]:
    """One thread.

    Args:
        text: what it does, in the words of ``farcall why``; None if that does not show it.
    """
    return {
        "name": thread.name,
        "idle": bool(thread.fields.get("idle")) and not thread.waits,
        "doing": str(thread.fields.get("doing") or "") if text is None else text,
        "stack": _stack(list(thread.stack)),
    }


def _frozen_threads(worker: WorkerState) -> list[dict[str, Any]]:
    names = {each.id: each.name for each in worker.threads}
    return [
        {
            "name": names.get(ident, f"thread {ident:#x}"),
            "idle": False,
            "doing": "",
            "stack": _stack([Position.of(list(frame), worker.folder) for frame in stack.frames]),
        }
        for ident, stack in worker.frozen.items()
    ]


def _stack(places: Sequence[Position | None]) -> list[list[Any]]:
    return [[each.function, each.file, each.line] for each in places if each is not None]
