"""Errors as gRPC's clients get them."""

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
"""Of the reasons in ``google.rpc.ErrorInfo``."""

_OURS: Final = (
    str(Path(__file__).parent),
    str(Path(concurrent.futures.__file__).parent),
    str(Path(importlib.__file__).parent),
    "<frozen importlib",
)

_LONGEST_NAME: Final = 200
_LONGEST_TEXT: Final = 1500
_LONGEST_TRACEBACK: Final = 3000
"""Bytes, as ``_cut`` counts them. All are sent in headers, the text twice, some of it as base64; clients take
8 KiB of headers."""


class BadArguments(TypeError):
    """What is served does not take these arguments."""


class Unknown(LookupError):
    """Nothing is served under this name."""


class Refused(Exception):
    """The server is too busy for this call, or about to end; it was not begun, and can be made again."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class Ended(Exception):
    """What is served tried to end the process or the task that it ran in."""


@contextmanager
def contained() -> Iterator[None]:
    """Let nothing but an ``Exception`` out of what is served, on the loop.

    ``SystemExit`` would end it. ``CancelledError`` and ``StopIteration`` mean something to asyncio, so that
    nobody would be answered; a task that is cancelled is cancelled as ever, and a coroutine that is closed is
    closed.

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
    """What a call ends with whose function has raised this: itself, or ``Ended``."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    ended = Ended(f"what is served raised {type(error).__name__}: {text_of(error)}")
    ended.__cause__ = error
    return ended


def _is_told_by_asyncio(error: BaseException) -> bool:
    """This task has been cancelled; or there is none, and a coroutine is closed that has not ended."""
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
"""What an error of a call is to the client; the first that fits. All others are INTERNAL."""


def status_of(error: BaseException) -> grpc.StatusCode:
    """The code of an error."""
    if isinstance(error, Refused):
        return error.code
    return next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def details_of(error: BaseException, *, tracebacks: bool) -> status_pb2.Status:
    """An error for a client: its type, its text and, if asked for, where it was raised."""
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
    """Without the frames before the user's code, which say nothing; None where there are no others."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS):
        trace = trace.tb_next
    return trace


def text_of(error: BaseException) -> str:
    """What an error says; its ``__str__`` is the user's, and may fail."""
    try:
        return str(error)
    except Exception as other:
        return f"(its text cannot be made: {type(other).__qualname__})"


def _cut(text: str, longest: int) -> str:
    """The end of a text that is too long: where a traceback says what was raised.

    gRPC writes three bytes for each byte of UTF-8 that is not printable ASCII, and so they are counted.
    """
    end = text[-longest:].encode(errors="replace").decode()
    size = 0
    for place in range(len(end) - 1, -1, -1):
        each = end[place]
        size += 1 if " " <= each <= "~" and each != "%" else 3 * len(each.encode())
        if size > longest:
            return f"...{end[place + 1 :]}"
    return end if len(end) == len(text) else f"...{end}"
