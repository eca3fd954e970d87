"""Errors as gRPC's clients receive them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from farcall.grpc.values import Malformed
from rpc import runtime
from rpc.errors import RpcTimeoutError, WorkerLostError

__all__ = [
    "BadArguments",
    "Ended",
    "Refused",
    "Unknown",
    "answerable",
    "beyond_the_server",
    "contained",
    "details_of",
    "status_of",
    "text_of",
]

DOMAIN: Final = "farcall"
"""Domain of the reasons in ``google.rpc.ErrorInfo``."""

_OURS: Final = (
    str(Path(__file__).parent),
    str(Path(runtime.__file__).parent),
    str(Path(concurrent.futures.__file__).parent),
    str(Path(importlib.__file__).parent),
    "<frozen importlib",
)

_LONGEST_NAME: Final = 200
_LONGEST_TEXT: Final = 1500
_LONGEST_TRACEBACK: Final = 3000
"""Maximum number of bytes of a traceback, as ``_cut`` counts them. All is sent in headers, the text twice,
some of it as base64; clients accept 8 KiB of headers.
"""


class BadArguments(TypeError):
    """The endpoint does not accept these arguments."""


class Unknown(LookupError):
    """Nothing is served under this name."""


class Refused(Exception):
    """The server is too busy for this call, or about to end; the call did not begin, and can be
    made again.
    """

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class Ended(Exception):
    """The endpoint tried to end the process or the task that it ran in."""


@contextmanager
def contained() -> Iterator[None]:
    """Let nothing but an ``Exception`` escape from an endpoint, on the loop.

    ``SystemExit`` would end the loop. ``CancelledError`` and ``StopIteration`` have a meaning for asyncio, so
    that the call would not be answered; a task that is cancelled is still cancelled, and a coroutine that is
    closed is closed.

    Raises:
        Ended: one of these was raised.
    """
    try:
        yield
    except BaseException as error:
        if _is_told_by_asyncio(error):
            raise
        raise answerable(error)  # noqa: B904  # it has its cause


def answerable(error: BaseException) -> Exception:
    """Return the error that a call ends with if its function raised this: the same, or ``Ended``."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    ended = Ended(f"what is served raised {type(error).__name__}: {text_of(error)}")
    ended.__cause__ = error
    return ended


def _is_told_by_asyncio(error: BaseException) -> bool:
    """Whether this task has been cancelled; or there is none, and a coroutine is closed before its end."""
    task = asyncio.current_task()
    if task is None:
        return isinstance(error, GeneratorExit)
    return isinstance(error, asyncio.CancelledError) and task.cancelling() > 0


_CODES: Final[tuple[tuple[type[BaseException], grpc.StatusCode], ...]] = (
    (Malformed, grpc.StatusCode.INVALID_ARGUMENT),
    (BadArguments, grpc.StatusCode.INVALID_ARGUMENT),
    (Unknown, grpc.StatusCode.NOT_FOUND),
    (TimeoutError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (RpcTimeoutError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (WorkerLostError, grpc.StatusCode.UNAVAILABLE),
    (NotImplementedError, grpc.StatusCode.UNIMPLEMENTED),
)
"""The status code of an error; the first class that fits. All others are INTERNAL."""


def status_of(error: BaseException) -> grpc.StatusCode:
    """Return the status code of an error."""
    if isinstance(error, Refused):
        return error.code
    return next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def details_of(error: BaseException, *, tracebacks: bool) -> status_pb2.Status:
    """Describe an error for a client: its type, its text and, if requested, its traceback."""
    kind = type(error)
    text = _cut(text_of(error), _LONGEST_TEXT)
    own = kind.__module__.split(".")[0] == DOMAIN
    name = (
        kind.__qualname__
        if own or kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    details = [error_details_pb2.ErrorInfo(reason=_cut(name, _LONGEST_NAME), domain=DOMAIN)]
    if tracebacks and not own:
        trace = beyond_the_server(error.__traceback__) or error.__traceback__
        lines = "".join(traceback.format_exception(kind, error, trace))
        details.append(error_details_pb2.DebugInfo(detail=_cut(lines, _LONGEST_TRACEBACK)))
    packed = [any_pb2.Any() for _ in details]
    for each, detail in zip(packed, details, strict=True):
        each.Pack(detail)
    code: tuple[int, str] = status_of(error).value
    assert code[0] in code_pb2.Code.values()
    return status_pb2.Status(code=code[0], message=text, details=packed)


def beyond_the_server(trace: TracebackType | None) -> TracebackType | None:
    """Remove the frames before the user's code; None if there are no others."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS):
        trace = trace.tb_next
    return trace


def text_of(error: BaseException) -> str:
    """Return an error's text; its ``__str__`` is user code, and may fail."""
    try:
        return str(error)
    except Exception as other:
        return f"(its text cannot be made: {type(other).__qualname__})"


def _cut(text: str, longest: int) -> str:
    """Return the end of a text that is too long: a traceback ends with the error.

    gRPC writes three bytes for each byte of UTF-8 that is not printable ASCII; they are counted accordingly.
    """
    end = text[-longest:].encode(errors="replace").decode()
    size = 0
    for place in range(len(end) - 1, -1, -1):
        each = end[place]
        size += 1 if " " <= each <= "~" and each != "%" else 3 * len(each.encode())
        if size > longest:
            return f"...{end[place + 1 :]}"
    return end if len(end) == len(text) else f"...{end}"
