"""Errors as gRPC's clients get them."""

from __future__ import annotations

import concurrent.futures
import traceback
from pathlib import Path
from types import TracebackType
from typing import Final

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from farcall.values import Malformed
from rpc.errors import RpcTimeoutError, WorkerLostError

__all__ = ["BadArguments", "Refused", "Unknown", "details_of", "status_of"]

DOMAIN: Final = "farcall"
"""Of the reasons in ``google.rpc.ErrorInfo``."""

_OURS: Final = (str(Path(__file__).parent), str(Path(concurrent.futures.__file__).parent))

_LONGEST_TEXT: Final = 2000
_LONGEST_TRACEBACK: Final = 4000
"""Characters; gRPC sends both as headers, of which its clients take some 8 KiB."""


class BadArguments(TypeError):
    """What is served does not take these arguments."""


class Unknown(LookupError):
    """Nothing is served under this name."""


class Refused(Exception):
    """The server is too busy for this call, or about to end; it was not begun, and can be made again."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


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
    text = _cut(str(error), _LONGEST_TEXT)
    own = kind.__module__.split(".")[0] == DOMAIN
    name = (
        kind.__qualname__
        if own or kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    details = [error_details_pb2.ErrorInfo(reason=name, domain=DOMAIN)]
    if tracebacks and not own:
        lines = "".join(traceback.format_exception(kind, error, _beyond_the_server(error.__traceback__)))
        details.append(error_details_pb2.DebugInfo(detail=_cut(lines, _LONGEST_TRACEBACK)))
    packed = [any_pb2.Any() for _ in details]
    for each, detail in zip(packed, details, strict=True):
        each.Pack(detail)
    code: tuple[int, str] = status_of(error).value
    assert code[0] in code_pb2.Code.values()
    return status_pb2.Status(code=code[0], message=text, details=packed)


def _beyond_the_server(trace: TracebackType | None) -> TracebackType | None:
    """Without the frames before the user's code, which say nothing to a caller."""
    begin = trace
    while begin is not None and begin.tb_frame.f_code.co_filename.startswith(_OURS):
        begin = begin.tb_next
    return begin or trace


def _cut(text: str, longest: int) -> str:
    """The end of a text that is too long: where a traceback says what was raised."""
    return text if len(text) <= longest else f"...{text[-longest:]}"
