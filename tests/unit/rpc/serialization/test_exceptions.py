from __future__ import annotations

import threading
import traceback
import warnings
from typing import Any

import msgpack
import pytest
import torch

from rpc.errors import RemoteError
from rpc.serialization import exceptions
from tests.unit.rpc.serialization.callees import trouble
from tests.unit.rpc.serialization.journey import CALLEE, CALLER, PICKLES, SERIALIZER, deliver, raise_remotely


def raised(function: Any, *args: Any) -> Exception:
    """What a function raises, as it arrives at the caller."""
    with pytest.raises(Exception) as caught:  # noqa: PT011  # whatever it raises is what is wanted
        function(*args)
    header, buffers = deliver(SERIALIZER.dump_exception(caught.value, CALLEE.name, CALLER))
    return SERIALIZER.load_exception(header, buffers, None, CALLEE)


def printed(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def test_causes_are_part_of_the_remote_traceback() -> None:
    def chained() -> None:
        try:
            trouble(0)
        except ValueError as error:
            raise RuntimeError("outer") from error

    text = printed(raised(chained))
    assert "ValueError: trouble" in text
    assert "direct cause" in text


def test_notes_travel_and_are_printed_once() -> None:
    def noted() -> None:
        error = ValueError("x")
        error.add_note("mind the gap")
        raise error

    assert printed(raised(noted)).count("mind the gap") == 1


def test_exception_that_passes_two_workers_shows_both_tracebacks_once() -> None:
    def middle() -> None:
        raise raised(trouble, 0)

    text = printed(raised(middle))
    assert text.count("Traceback on worker 'callee':") == 2
    assert text.count("in trouble") == 1
    assert text.count("in middle") == 1


def test_local_exception_class_travels_by_value() -> None:
    class LocalError(Exception):
        pass

    assert type(raise_remotely(LocalError("x"))).__name__ == "LocalError"


def test_torchscript_error_is_a_runtime_error() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)

        @torch.jit.script
        def failing(text: str) -> torch.Tensor:
            raise ValueError(text)

    arrived = raised(failing, "Expected error")
    assert isinstance(arrived, RuntimeError)
    assert "Expected error" in str(arrived)


def test_lone_surrogates_and_long_tracebacks_can_be_sent() -> None:
    error = ValueError("x\udc80" + "y" * 2_000_000)
    payload = SERIALIZER.dump_exception(error, CALLEE.name, CALLER)
    assert len(msgpack.packb(payload.header)) < 1 << 20
    header, buffers = deliver(payload)
    assert type(SERIALIZER.load_exception(header, buffers, None, CALLEE)) is ValueError


def test_exception_too_large_to_be_sent_is_described_in_few_bytes() -> None:
    kind = type("\U0001f422" * 10_000, (Exception,), {})
    with pytest.raises(Exception) as caught:  # noqa: PT011  # its class has no name here
        raise kind("\U0001f422" * 1_000_000)
    payload = SERIALIZER.dump_exception(caught.value, CALLEE.name, CALLER)
    described = SERIALIZER.without_exception(payload.header | {"done": 7}, ValueError("over the limit"))
    assert len(msgpack.packb(described.header)) < 64 << 10
    assert described.header["done"] == 7
    header, buffers = deliver(described)
    arrived = SERIALIZER.load_exception(header, buffers, None, CALLEE)
    assert type(arrived) is RemoteError
    assert "It was too large to be sent: over the limit" in str(arrived)
    assert arrived.remote_traceback.endswith("\U0001f422")


def test_leading_frames_of_the_agent_are_left_out() -> None:
    module: dict[str, Any] = {"trouble": trouble}
    source = "def run():\n    try:\n        trouble(0)\n    except ValueError as e:\n        return e"
    exec(compile(source, exceptions.__file__, "exec"), module)
    header, _ = deliver(SERIALIZER.dump_exception(module["run"](), CALLEE.name, CALLER))
    assert "in trouble" in header["!"][2]
    assert "in run" not in header["!"][2]


@pytest.mark.parametrize(
    "header", [{}, {"!": 1}, {"!": []}, {"!": ["a", "b", "c"]}, {"!": ["a", "b", "c", "d", "e"]}]
)
def test_malformed_failure_is_a_remote_error(header: dict[str, Any]) -> None:
    assert type(SERIALIZER.load_exception(header, [b"x"], None, CALLEE)) is RemoteError


def test_pickle_of_something_else_is_a_remote_error() -> None:
    header, _ = deliver(SERIALIZER.dump_exception(ValueError("x"), CALLEE.name, CALLER))
    for other in (3, KeyboardInterrupt(), ValueError):
        buffers = PICKLES.dumps(other, CALLER).buffers
        assert type(SERIALIZER.load_exception(header, buffers, None, CALLEE)) is RemoteError


class Connection:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.code = 14


class NeedsItsLock(Exception):
    def __init__(self, *, said: str) -> None:
        super().__init__()
        self.connection = Connection()
        self.said = said

    def __str__(self) -> str:
        with self.connection.lock:
            return self.said

    __repr__ = __str__


_said: dict[str, str] = {}


class NeedsItsProcess(Exception):
    def __str__(self) -> str:
        return _said["text"]


def test_a_text_arrives_though_it_needs_what_cannot_be_sent() -> None:
    sent = ExceptionGroup("several", [NeedsItsLock(said="member")])
    sent.__cause__ = NeedsItsLock(said="cause")
    for _ in range(2):  # it can be sent on
        arrived = raise_remotely(sent)
        assert isinstance(arrived, ExceptionGroup)
        cause, (member,) = arrived.__cause__, arrived.exceptions
        assert isinstance(cause, NeedsItsLock)
        assert isinstance(member, NeedsItsLock)
        assert (str(cause), repr(cause), str(member), repr(member)) == ("cause", "cause", "member", "member")
        assert member.connection.code == 14
        assert f"{__name__}.NeedsItsLock: member" in printed(arrived)
        sent = arrived


def test_a_text_arrives_though_it_needs_the_state_of_its_process() -> None:
    _said["text"] = "no heartbeat"
    with pytest.raises(NeedsItsProcess) as caught:
        raise NeedsItsProcess
    header, buffers = deliver(SERIALIZER.dump_exception(caught.value, CALLEE.name, CALLER))
    del _said["text"]
    arrived = SERIALIZER.load_exception(header, buffers, None, CALLEE)
    assert isinstance(arrived, NeedsItsProcess)
    assert str(arrived) == "no heartbeat"
