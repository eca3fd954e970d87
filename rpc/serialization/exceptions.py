"""How exceptions travel.

The caller gets an exception of the same type, with the same arguments, attributes and notes; the callee's
traceback, with those of its causes, is a note of it. Attributes that cannot be sent are left out, and a note
says so. It gets a ``RemoteError`` instead, with the same text and the same note, if the exception cannot be
rebuilt as itself: its class is missing here, or does not take the arguments that it leaves in ``args``. And
always for what is no ``Exception`` (``SystemExit``, ``KeyboardInterrupt``, ``asyncio.CancelledError``), which
is about the thread or task that raised it, and for ``torch.jit.Error``, since ``torch.distributed.rpc``
raises a ``RuntimeError`` when TorchScript fails.

In safe mode only the type, the text and the traceback count: see ``safe``.

An exception's header is ``{"!": [type, text, traceback, worker]}``, so that all this is known even when no
pickle can be read; then come the buffers of the exception itself, none if it could not be pickled. Of what
is too long, a header has the beginning and the end.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from rpc.errors import RemoteError, RpcError, SerializationError
from rpc.serialization.failures import cut, encodable, text_of, type_name
from rpc.serialization.payload import EXCEPTION, Payload, Source

_MAX_TRACEBACK: Final = 256 << 10
_MAX_TYPE_ALONE: Final = 512
_MAX_TEXT_ALONE: Final = 2 << 10
_MAX_TRACEBACK_ALONE: Final = 8 << 10
"""These are so few characters, of at most four bytes, that every worker accepts a header of them."""
_OWN_FOLDERS: Final = tuple(
    os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(__file__))), package, "")
    for package in ("rpc", "rref")
)


def dump_exception(
    error: BaseException, worker: str, dumps: Callable[[Any, object], Payload] | None
) -> Payload:
    """See ``Serializer.dump_exception``. ``dumps`` serializes a value for the caller, and takes what to call
    it in errors; without, the exception goes as its description alone.
    """
    header = [type_name(type(error)), text_of(error), _traceback(error), worker]
    payload = Payload({}, [])
    if dumps is not None and isinstance(error, Exception) and not isinstance(error, torch.jit.Error):
        with contextlib.suppress(BaseException):  # what cannot be pickled is described by the header
            payload = _dump(error, dumps)
    payload.header[EXCEPTION] = header
    return payload


def shortened(header: dict[str, Any], reason: BaseException) -> dict[str, Any]:
    """The header of an exception that is too large to be sent: its description alone, cut, and the reason."""
    kind, text, remote_traceback, worker = header[EXCEPTION]
    said = f"{cut(text, _MAX_TEXT_ALONE)}\nIt was too large to be sent: {text_of(reason)}".lstrip()
    described = [cut(kind, _MAX_TYPE_ALONE), said, remote_traceback[-_MAX_TRACEBACK_ALONE:], worker]
    return header | {EXCEPTION: described}


def _dump(error: Exception, dumps: Callable[[Any, object], Payload]) -> Payload:
    try:
        return dumps(error, None)
    except Exception:
        if not error.__dict__:
            raise
    return dumps(_Reduced(error, dumps), None)


class _Reduced:
    """An exception without those of its attributes that cannot be sent."""

    def __init__(self, error: Exception, dumps: Callable[[Any, object], Payload]) -> None:
        self.error = error
        self.dumps = dumps

    def __reduce__(self) -> tuple[Any, ...]:
        reduced: Any = self.error.__reduce__()
        constructor, arguments, attributes = reduced
        kept = {}
        notes = list(attributes.get("__notes__", ()))
        for name, value in attributes.items():
            try:
                self.dumps(value, f"attribute '{name}'")
            except Exception as reason:
                notes.append(f"attribute '{name}' is missing: {reason}")
            else:
                kept[name] = value
        return constructor, arguments, kept | {"__notes__": notes}


def load_exception(
    header: dict[str, Any],
    source: Source,
    load: Callable[[], Any] | None,
    make: Callable[[str, str], Exception] | None = None,
) -> Exception:
    """See ``Serializer.load_exception``. ``load`` rebuilds the exception itself, if it has been sent;
    ``make`` makes one of the name of a type and a text.
    """
    try:
        kind, text, remote_traceback, worker = map(str, header[EXCEPTION])
    except (KeyError, TypeError, ValueError):
        return RemoteError(f"worker '{source.name}' reported a failure that cannot be read")
    error: Exception | None = None
    why = ""
    if make is not None:
        load = partial(make, kind, text)
    if load is not None:
        try:
            loaded = load()
            if isinstance(loaded, Exception):
                error = loaded
            else:
                why = f"it was rebuilt as a {type_name(type(loaded))}"
        except KeyboardInterrupt:
            raise
        except BaseException as reason:
            why = _reason(reason)
    if error is None:
        error = RemoteError(
            f"Original exception on remote side was {kind}, raised by worker '{worker}'"
            + (f": {text}" if text else "")
            + (f"\nIt cannot be raised as itself here: {why}" if why else ""),
            kind,
            remote_traceback,
        )
    try:
        error.add_note(f"\nTraceback on worker '{worker}':\n\n{remote_traceback}")
    except Exception:
        # It has spoilt its own notes.
        return RemoteError(f"{kind}, raised by worker '{worker}': {text}", kind, remote_traceback)
    return error


def _reason(error: BaseException) -> str:
    """Why an exception cannot be rebuilt, in few words."""
    if type(error) is SerializationError and error.__cause__ is not None:
        error = error.__cause__
    text = text_of(error)
    return text if isinstance(error, RpcError) else f"{type_name(type(error))}: {text}"


def _traceback(error: BaseException) -> str:
    try:
        described = traceback.TracebackException.from_exception(error)
        # Notes travel with the exception; those from workers further on would else be printed twice.
        described.__notes__ = None
        _leave_out_own_frames(described, isinstance(error, RpcError))
        text = "".join(described.format()).rstrip()
    except BaseException:
        return f"{type_name(type(error))} (its traceback cannot be formatted)"
    return encodable(cut(text, _MAX_TRACEBACK))


def _leave_out_own_frames(described: traceback.TracebackException | None, raised_by_us: bool) -> None:
    """Leave out leading frames in our own files; of errors that we raise ourselves, in their causes too, and
    all frames if there are no others.
    """
    while described is not None:
        frames = described.stack
        theirs = (at for at, frame in enumerate(frames) if not frame.filename.startswith(_OWN_FOLDERS))
        del frames[: next(theirs, len(frames) if raised_by_us else 0)]
        if not frames:
            described.stack = None  # type: ignore[assignment]  # and so no headline either
        described = (described.__cause__ or described.__context__) if raised_by_us else None
