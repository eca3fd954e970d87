"""OpenTelemetry: calls made while a span is active are spans, and so are the functions that they run.

The context is sent in the header of the call, in the form that the program's global propagator gives it (by
default W3C's ``traceparent``). This is active in a program that has imported OpenTelemetry's SDK before
``init_rpc``; others have no cost. A call that is made while no span is active has neither span nor context.

Spans follow the semantic conventions for RPC: kind CLIENT and SERVER, the function's name,
``rpc.system.name``, ``rpc.method``, and ``error.type`` after an error. ``farcall.caller`` and
``farcall.callee`` are workers.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Final

from rpc.agent.agent import Agent
from rpc.agent.tape import Observation, Recording
from rpc.runtime.events import CallBegun, CallEnded
from rpc.serialization.payload import EXCEPTION

__all__ = ["install"]

logger = logging.getLogger(__name__)

_KEY: Final = "otel"
"""The key of a call's header: the function's name, and what the propagator has given."""

_SDK: Final = "opentelemetry.sdk.trace"
_MAX_FIELDS: Final = 8
"""Maximum number of fields of a context that are read from a header."""

_MAX_LENGTH: Final = 8192
"""Maximum length of a field, in characters: that of W3C's baggage."""


def install(agent: Agent) -> None:
    """Show the calls of an agent that has not joined its group yet, if the program has the SDK."""
    if _SDK in sys.modules:
        spans = _Spans(agent)
        agent.events.record(CallBegun, spans.call_begun)
        agent.events.record(CallEnded, spans.call_ended)
        agent.tracing.observe(_KEY, spans.requested)


class _Spans:
    """The spans of one agent. From any thread."""

    def __init__(self, agent: Agent) -> None:
        from opentelemetry import context, propagate, trace

        self._agent = agent
        self._trace, self._propagate, self._context = trace, propagate, context
        self._tracer = trace.get_tracer("farcall")
        self._open: dict[int, Any] = {}

    def call_begun(
        self, call_id: int, to: str, what: str, asked: object, how: str, header: dict[str, Any] | None
    ) -> None:
        """Open a span for a call, and put its context into the header."""
        trace = self._trace
        if header is None or not trace.get_current_span().get_span_context().is_valid:
            return
        if isinstance(asked, str) and "method" not in header:
            return  # between agents
        try:
            name = str(header.get("method", what))
            facts = self._facts(name, self._agent.info.name, to)
            span = self._tracer.start_span(name, kind=trace.SpanKind.CLIENT, attributes=facts)
            carrier: dict[str, str] = {}
            self._propagate.inject(carrier, trace.set_span_in_context(span))
            header[_KEY] = [name, carrier]
            self._open[call_id] = span
        except Exception:  # an error of the program's own propagator or processor; the call goes on
            logger.exception("a call of worker '%s' has no span", to)

    def call_ended(
        self,
        call_id: int,
        to: str,
        what: str,
        seconds: float,
        error: BaseException | None,
        header: dict[str, Any] | None,
    ) -> None:
        """Close the span of a call."""
        span = self._open.pop(call_id, None)
        if span is None:
            return
        try:
            if error is not None:
                self._failed(span, error)
            elif header and EXCEPTION in header:
                kind, text, *_ = map(str, header[EXCEPTION])
                span.set_attribute("error.type", kind)
                span.set_status(self._trace.StatusCode.ERROR, text)
            span.end()
        except Exception:
            logger.exception("the span of a call of worker '%s' could not be ended", to)

    def requested(self, value: Any, inner: Recording | Observation | None) -> Observation:
        """Return the observation of a request with a context."""
        name, carrier = _checked(value)
        try:
            context = self._propagate.extract(carrier)
        except Exception:
            logger.exception("the context of a call of %s could not be read", name)
            return _Request(self, inner, name, None)
        return _Request(self, inner, name, context)

    def begin_run(self, name: str, context: Any) -> tuple[Any, Any] | None:
        """Begin a span for a function that runs, and make it the active one of this thread or task.

        Returns:
            The span, and a token that ends it; None if the program's OpenTelemetry fails: the function runs
            in any case.
        """
        facts = self._facts(name, None, self._agent.info.name)
        try:
            span = self._tracer.start_span(
                name, context=context, kind=self._trace.SpanKind.SERVER, attributes=facts
            )
            return span, self._context.attach(self._trace.set_span_in_context(span, context))
        except Exception:
            logger.exception("a run of %s has no span", name)
            return None

    def end_run(self, begun: tuple[Any, Any] | None, error: BaseException | None) -> None:
        """End it, and make the previous one active again."""
        if begun is None:
            return
        span, token = begun
        self._context.detach(token)
        try:
            if error is not None:
                self._failed(span, error)
            span.end()
        except Exception:
            logger.exception("the span of a run could not be ended")

    def _failed(self, span: Any, error: BaseException) -> None:
        span.set_attribute("error.type", type(error).__qualname__)
        span.set_status(self._trace.StatusCode.ERROR, str(error))

    def _facts(self, name: str, caller: str | None, callee: str) -> dict[str, str]:
        facts = {"rpc.system.name": "farcall", "rpc.method": name, "farcall.callee": callee}
        return facts if caller is None else facts | {"farcall.caller": caller}


class _Request(Observation):
    """A request whose function runs inside a span."""

    def __init__(self, spans: _Spans, inner: Recording | Observation | None, name: str, context: Any) -> None:
        super().__init__(inner)
        self._spans = spans
        self._name = name
        self._parent = context
        self._running: list[tuple[Any, Any] | None] = []

    def __enter__(self) -> None:
        self._running.append(self._spans.begin_run(self._name, self._parent))
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        try:
            super().__exit__(*error)
        finally:
            raised = next((each for each in error if isinstance(each, BaseException)), None)
            self._spans.end_run(self._running.pop(), raised)


def _checked(value: Any) -> tuple[str, dict[str, str]]:
    """Return the name and the context in a header of another worker; nothing, if they are malformed."""
    if not isinstance(value, list) or len(value) != 2:
        return "", {}
    name, carrier = value
    if not isinstance(name, str) or not isinstance(carrier, dict) or len(carrier) > _MAX_FIELDS:
        return "", {}
    fields = {
        key: text
        for key, text in carrier.items()
        if isinstance(key, str) and isinstance(text, str) and len(text) <= _MAX_LENGTH
    }
    return name[:_MAX_LENGTH], fields
