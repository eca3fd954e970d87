"""A line of the log stands alone: whose it is, which function, for whom, how long, what happened."""

from __future__ import annotations

import logging
import re
from types import FunctionType
from typing import Any

import pytest
import torch

import rpc
from tests.support.serving import in_worker0


def fail() -> None:
    raise LookupError("as told")


@rpc.functions.async_execution
def fail_later() -> torch.futures.Future[Any]:
    failed: torch.futures.Future[Any] = rpc.Future()
    failed.set_exception(LookupError("as told"))
    return failed


async def fail_as_coroutine() -> None:
    raise LookupError("as told")


def fail_silently() -> None:
    raise LookupError


RAISED = (
    (fail_silently, (), "fail_silently, called by worker 'worker0', raised LookupError after {} s at {file}"),
    (fail, (), "fail, called by worker 'worker0', raised LookupError after {} s at {file}: as told"),
    (fail_later, (), "fail_later, called by worker 'worker0', raised LookupError after {} s: as told"),
    (
        fail_as_coroutine,
        (),
        "fail_as_coroutine, called by worker 'worker0', raised LookupError after {} s at {file}: ",
    ),
    (torch.add, (1, "one"), "torch.add, called by worker 'worker0', raised TypeError after {} s: add"),
    (int, ("one",), "int, called by worker 'worker0', raised ValueError after {} s: invalid literal"),
)


def failing_objects() -> None:
    """Calls of objects that fail, in the user's code and before it."""
    with pytest.raises(LookupError):
        rpc.remote("worker0", fail).to_here()
    with pytest.raises(AttributeError):
        rpc.remote("worker0", list).rpc_sync().missing()


class Kept(logging.Handler):
    def __init__(self, records: list[logging.LogRecord]) -> None:
        super().__init__()
        self.records = records

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@in_worker0(world_size=1)
def test_what_a_callee_raises_is_in_its_log() -> None:
    records: list[logging.LogRecord] = []
    handler = Kept(records)
    log = logging.getLogger("rpc.agent.received_requests")
    log.addHandler(handler)
    for level in (logging.INFO, logging.DEBUG):
        log.setLevel(level)
        for function, args, said in RAISED:
            with pytest.raises((LookupError, TypeError, ValueError)):
                rpc.rpc_sync("worker0", function, args)
            line = re.escape("worker 'worker0': " + said).replace(r"\{\}", r"[\de.-]+")
            line = line.replace(r"\{file\}", rf"{re.escape(__file__)}:\d+")
            record = records.pop()
            assert re.match(line, record.getMessage()), record.getMessage()
            assert not record.getMessage().endswith(": ")
            assert (record.exc_info is not None) is (level == logging.DEBUG), "for those who debug"
            assert not records


@in_worker0(world_size=1)
def test_log_of_a_failed_call_names_no_function_of_ours() -> None:
    records: list[logging.LogRecord] = []
    handler = Kept(records)
    log = logging.getLogger("rpc.agent.received_requests")
    log.addHandler(handler)
    failing_objects()
    named = {re.sub(r".*?: (.*), called by .*", r"\1", record.getMessage()) for record in records}
    assert named == {"fail", "a call"}


def fail_with(text: str) -> None:
    raise LookupError(text)


@in_worker0(world_size=1)
def test_what_a_caller_sends_cannot_forge_a_line() -> None:
    records: list[logging.LogRecord] = []
    log = logging.getLogger("rpc.agent.received_requests")
    log.addHandler(Kept(records))
    forged = FunctionType(fail_with.__code__.replace(co_qualname="f\nERROR"), {"LookupError": LookupError})
    forged.__qualname__ = "f\nERROR"
    for text in ("a\nERROR", "a\x1b[31m", "a\x07", "a\udcff"):
        with pytest.raises(LookupError, match=r"^a"):
            rpc.rpc_sync("worker0", forged, (text,))
        line = records.pop().getMessage()
        assert line.isprintable()
        assert re.match(
            r"worker 'worker0': 'f\\nERROR', called by worker 'worker0', raised LookupError", line
        )


def fail_as(name: str) -> None:
    raise type(name, (LookupError,), {})("a")


@in_worker0(world_size=1)
def test_what_code_of_a_caller_names_classes_and_files_cannot_forge_a_line() -> None:
    records: list[logging.LogRecord] = []
    log = logging.getLogger("rpc.agent.received_requests")
    log.addHandler(Kept(records))
    code = fail_as.__code__.replace(co_filename="file\nERROR")
    forged = FunctionType(code, {"type": type, "LookupError": LookupError})  # so the class has no module
    forged.__qualname__ = "f"
    with pytest.raises(LookupError, match=r"^a\b"):
        rpc.rpc_sync("worker0", forged, ("class\nERROR",), timeout=5)
    line = records.pop().getMessage()
    assert line.isprintable()
    assert r"raised 'class\nERROR' after" in line
    assert r" at 'file\nERROR':" in line


def fail_at_length() -> None:
    raise LookupError("as told:\n" + 100 * "and more ")


@in_worker0(world_size=1)
def test_log_of_a_failed_call_is_short_since_the_caller_gets_all_of_the_error() -> None:
    records: list[logging.LogRecord] = []
    handler = Kept(records)
    log = logging.getLogger("rpc.agent.received_requests")
    log.addHandler(handler)
    with pytest.raises(LookupError) as caught:
        rpc.rpc_sync("worker0", fail_at_length)
    assert len(str(caught.value)) > 900
    (record,) = records
    text = record.getMessage().partition(": as told: and more")[2]
    assert text.endswith(" ...")
    assert len(text) < 100
