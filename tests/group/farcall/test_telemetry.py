"""OpenTelemetry: the spans of callers and callees are one trace, where a span is active, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rpc
from tests.support.workers import RunWorkers, Worker

pytest.importorskip("opentelemetry.sdk")

Seen = list[tuple[str, str, str, str, str]]
"""For each span: name, kind, identifier, that of its parent, and the type of the error."""


def relay(to: str) -> torch.Tensor:
    return rpc.rpc_sync(to, torch.add, args=(torch.ones(2), 1))


async def relay_async(to: str) -> Any:
    return await rpc.rpc_async(to, torch.mul, args=(torch.ones(2), 2))


def fail() -> None:
    raise LookupError("as told")


class Counter:
    def count(self) -> int:
        return 1


def call_in_a_span(worker: Worker) -> tuple[str, Seen]:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    trace_id = ""
    with worker.group():
        if worker.rank == 0:
            rpc.rpc_sync("worker1", relay, args=("worker2",))  # no span is active
            counter = rpc.remote("worker1", Counter)
            with trace.get_tracer("test").start_as_current_span("step") as step:
                trace_id = f"{step.get_span_context().trace_id:032x}"
                rpc.rpc_sync("worker1", relay, args=("worker2",))
                rpc.rpc_async("worker1", relay_async, args=("worker2",)).wait()
                counter.rpc_sync().count()
                with pytest.raises(LookupError):
                    rpc.rpc_sync("worker1", fail)
            rpc.rpc_sync("worker1", relay, args=("worker2",))
    found: Seen = []
    for span in exporter.get_finished_spans():
        context, attributes = span.get_span_context(), span.attributes or {}
        assert context is not None
        assert rpc_facts(span.name, attributes)
        found.append(
            (
                span.name,
                span.kind.name,
                f"{context.trace_id:032x}/{context.span_id:016x}",
                "" if span.parent is None else f"{span.parent.trace_id:032x}/{span.parent.span_id:016x}",
                str(attributes.get("error.type", "")),
            )
        )
    return trace_id, found


def rpc_facts(name: str, attributes: Any) -> bool:
    return name == "step" or (attributes["rpc.system.name"], attributes["rpc.method"]) == ("farcall", name)


def test_spans_of_callers_and_callees_are_one_trace(run_workers: RunWorkers) -> None:
    results = run_workers(call_in_a_span, 3)
    trace_id = results[0][0]
    by_worker = [seen for _, seen in results]
    spans = {span[2]: (worker, span) for worker, seen in enumerate(by_worker) for span in seen}
    assert all(each.startswith(trace_id) for each in spans), "a call outside of spans has none"

    def ways() -> list[tuple[str, ...]]:
        """For each span: the names, kinds and workers from the outermost one to it."""
        found = []
        for last in spans:
            way: tuple[str, ...] = ()
            identity = last
            while identity:
                worker, (name, kind, _, parent, _) = spans[identity]
                way = (f"{worker} {kind} {name}", *way)
                identity = parent
            found.append(way)
        return sorted(found)

    step = "0 INTERNAL step"
    relayed = (step, "0 CLIENT relay", "1 SERVER relay")
    coroutine = (step, "0 CLIENT relay_async", "1 SERVER relay_async")
    for way in (
        (*relayed, "1 CLIENT torch.add", "2 SERVER torch.add"),
        (*coroutine, "1 CLIENT torch.mul", "2 SERVER torch.mul"),
        (step, "0 CLIENT count", "1 SERVER count"),
        (step, "0 CLIENT fail", "1 SERVER fail"),
    ):
        for length in range(1, len(way) + 1):
            assert way[:length] in ways()
    errors = {(worker, span[1]): span[4] for worker, span in spans.values() if span[0] == "fail"}
    assert errors == {(0, "CLIENT"): "LookupError", (1, "SERVER"): "LookupError"}


def names_of_spans(worker: Worker) -> bool:
    with worker.group():
        from rpc.runtime.current import current_agent

        return current_agent().events.call_begun is None


def test_a_program_without_the_sdk_pays_nothing(run_workers: RunWorkers) -> None:
    assert run_workers(names_of_spans, 1) == [True]
