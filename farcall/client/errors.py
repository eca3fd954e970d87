"""Errors of calls at the client."""

from __future__ import annotations

from typing import Any, Final

import grpc
from google.rpc import error_details_pb2, status_pb2

__all__ = ["CallError", "ServedError", "error_of", "error_of_status"]

_DETAILS: Final = "grpc-status-details-bin"
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


class CallError(Exception):
    """A call had no result.

    Attributes:
        code: gRPC's status code, such as ``grpc.StatusCode.UNAVAILABLE``.
        text: the text of the server, or of gRPC.
    """

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(f"{code.name}: {text}")
        self.code = code
        self.text = text


class ServedError(CallError):
    """The server answered with an error.

    Attributes:
        type: name of the exception's class at the server.
        traceback: its traceback; empty unless the server sends it.
    """

    def __init__(self, code: grpc.StatusCode, text: str, kind: str, traceback: str) -> None:
        super().__init__(code, text)
        self.type = kind
        self.traceback = traceback

    def __str__(self) -> str:
        where = f"\n\n{self.traceback}" if self.traceback else ""
        return f"{self.code.name}: {self.type}: {self.text}{where}"


def error_of(error: Any) -> CallError:
    """Return the exception to raise for an error of gRPC's."""
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS:
            return error_of_status(status_pb2.Status.FromString(value))
    return CallError(error.code(), error.details() or "")


def error_of_status(status: status_pb2.Status) -> ServedError:
    """Return the exception to raise for an error that a server has described."""
    info, debug = error_details_pb2.ErrorInfo(), error_details_pb2.DebugInfo()
    for detail in status.details:
        for each in (info, debug):
            detail.Unpack(each)
    return ServedError(_CODES[status.code], status.message, info.reason, debug.detail)
