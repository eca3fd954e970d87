"""The budget of a step: where its time goes, from a trace of all workers, whose clocks are aligned.

``python -m benchmarks --budget autograd-op`` prints two tables for each workload, per step:

- What it costs: time, and for each worker processor time, switches between threads, messages and their bytes.
- What it consists of, in a second run under ``rpc.trace``, which takes longer: each kind of interval with its
  number and time. Intervals contain others: a call contains its serialization, and the wait for its answer.
"""

from __future__ import annotations

import collections
import json
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.workload import CALLEE

__all__ = ["show"]

_CALLER: Final = "worker0"
_WARM_UP_SECONDS: Final = 0.5
_SECONDS: Final = 1.0
_TRACED: Final = 50
"""Number of steps that are traced."""

_messages: collections.Counter[str] = collections.Counter()
_listening: list[Any] = []


@dataclass(frozen=True)
class _Cost:
    """What a process has used so far, in seconds and numbers."""

    cpu: float
    switches: int

    def since(self, before: _Cost) -> _Cost:
        return _Cost(self.cpu - before.cpu, self.switches - before.switches)


def _used() -> _Cost:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return _Cost(usage.ru_utime + usage.ru_stime, usage.ru_nvcsw + usage.ru_nivcsw)


def _count_messages() -> None:
    from rpc import events  # in a worker only: another side may be in other processes

    def sent(message: Any) -> None:
        _messages["messages"] += 1
        _messages["bytes"] += message.size

    _messages.clear()
    _listening.append(events.listen(events.MessageSent, sent))


def _counted_messages() -> tuple[int, int]:
    _listening.pop().close()
    return _messages["messages"], _messages["bytes"]


def show(title: str, rpc: Any, step: Callable[[], object]) -> float:
    """Print the budget of a step that worker 0 makes, and return its time in seconds."""
    end = time.perf_counter() + _WARM_UP_SECONDS
    while time.perf_counter() < end:
        step()
    workers = (_CALLER, CALLEE)
    before = [rpc.rpc_sync(worker, _used) for worker in workers]
    made, begin = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < _SECONDS:
        step()
        made += 1
    costs = [rpc.rpc_sync(worker, _used).since(old) for worker, old in zip(workers, before, strict=True)]
    for worker in workers:
        rpc.rpc_sync(worker, _count_messages)
    for _ in range(_TRACED):
        step()
    counts = [rpc.rpc_sync(worker, _counted_messages) for worker in workers]
    with tempfile.TemporaryDirectory(prefix="farcall-budget-") as folder:
        path = Path(folder, "trace.json")
        with rpc.trace(str(path)):
            for _ in range(_TRACED):
                step()
        events = json.loads(path.read_text())["traceEvents"]
    console = Console(highlight=False)
    console.print(_costs(f"{title}: {1e6 * elapsed / made:,.0f} µs a step", costs, counts, made))
    console.print(_intervals(events))
    return elapsed / made


def _costs(title: str, costs: list[_Cost], counts: list[tuple[int, int]], made: int) -> Table:
    table = Table("worker", title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("processor µs", "thread switches", "messages sent", "their bytes"):
        table.add_column(heading, justify="right")
    for worker, cost, (messages, size) in zip((_CALLER, CALLEE), costs, counts, strict=True):
        numbers = (1e6 * cost.cpu / made, cost.switches / made, messages / _TRACED, size / _TRACED)
        table.add_row(worker, *(f"{number:,.1f}" for number in numbers))
    return table


def _intervals(events: list[dict[str, Any]]) -> Table:
    """The intervals in a trace by worker and name, in the order in which a step first has them."""
    names = {
        each["pid"]: each["args"]["name"].split()[0] for each in events if each.get("name") == "process_name"
    }
    found: dict[tuple[str, str], list[float]] = {}
    begun: dict[tuple[Any, ...], float] = {}
    for event in sorted(events, key=lambda each: each.get("ts", 0)):
        key = (names.get(event.get("pid"), ""), event.get("name", ""))
        identity = (*key, event.get("cat"), event.get("id"))
        match event["ph"]:
            case "X":
                found.setdefault(key, []).append(event["dur"])
            case "b":
                begun[identity] = event["ts"]
            case "e" if identity in begun:
                found.setdefault(key, []).append(event["ts"] - begun.pop(identity))
    table = Table("worker", "interval", title="while traced", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("a step", "µs each"):
        table.add_column(heading, justify="right")
    for (worker, name), durations in found.items():
        if len(durations) >= _TRACED / 2:  # the others belong to the trace itself
            number, each = len(durations) / _TRACED, sum(durations) / len(durations)
            table.add_row(worker, name, f"{number:.1f}", f"{each:,.0f}")
    return table
