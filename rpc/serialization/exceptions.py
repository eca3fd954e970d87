"""Serialization of exceptions.

The caller gets an exception of the same type, with the same text, arguments, attributes, notes and causes;
the callee's traceback, with those of its causes, is added as a note. ``exception_state`` describes how it is
rebuilt. Attributes that cannot be sent are left out, arguments that cannot be sent are replaced by
placeholders that print in the same way, and notes say so. If an exception cannot be rebuilt from its state,
because the class of an attribute is missing here, or methods of its own class that pickle calls fail, the
caller gets one of the same class with the text as its argument.

The caller gets a ``RemoteError`` with the same text and note if the class is missing here. It also does so
for anything that is not an ``Exception`` (``SystemExit``, ``KeyboardInterrupt``, ``asyncio.CancelledError``),
which concerns the thread or task that raised it, and for ``torch.jit.Error``, since ``torch.distributed.rpc``
raises a ``RuntimeError`` when TorchScript fails.

In safe mode, only the type, the text and the traceback are used: see ``safe``.

An exception's header is ``{"!": [type, text, traceback, worker]}``, so that these are known even if no pickle
can be read; then come the buffers of the exception itself, none if it could not be pickled. Texts that are
too long are cut in the middle.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from rpc.errors import RemoteError, RpcError, SerializationError
from rpc.runtime.interrupts import is_interruption
from rpc.runtime.tracebacks import folded
from rpc.serialization.exception_state import Partly, add_note, keep_text, new_exception, restore
from rpc.serialization.failures import cut, encodable, text_of, type_name
from rpc.serialization.functions import MAIN_NAMES
from rpc.serialization.payload import EXCEPTION, Payload, Source

_MAX_TRACEBACK: Final = 256 << 10
_MAX_TYPE_ALONE: Final = 512
_MAX_TEXT_ALONE: Final = 2 << 10
_MAX_TRACEBACK_ALONE: Final = 8 << 10
"""Maximum number of characters, of at most four bytes, such that every worker accepts the header."""


def dump_exception(
    error: BaseException, worker: str, dumps: Callable[[Any, object], Payload] | None
) -> Payload:
    """See ``Serializer.dump_exception``. ``dumps`` serializes a value for the caller, and takes its
    description for errors; without it, only the exception's description is sent.
    """
    header = [type_name(type(error)), text_of(error), _traceback(error), worker]
    payload = None
    if dumps is not None and isinstance(error, Exception) and not isinstance(error, torch.jit.Error):
        payload = _dump(error, dumps)
    payload = payload or Payload({}, [])  # the header describes an exception that cannot be pickled
    payload.header[EXCEPTION] = header
    return payload


def shortened(header: dict[str, Any], reason: BaseException) -> dict[str, Any]:
    """Return the header of an exception that is too large to be sent: its description, cut, and the
    reason.
    """
    kind, text, remote_traceback, worker = header[EXCEPTION]
    said = f"{cut(text, _MAX_TEXT_ALONE)}\nIt was too large to be sent: {text_of(reason)}".lstrip()
    described = [cut(kind, _MAX_TYPE_ALONE), said, remote_traceback[-_MAX_TRACEBACK_ALONE:], worker]
    return header | {EXCEPTION: described}


def _dump(error: Exception, dumps: Callable[[Any, object], Payload]) -> Payload | None:
    for attempt in (error, Partly(error), Partly(error, bare=True)):
        with contextlib.suppress(BaseException):  # its own methods may raise anything
            return dumps(attempt, None)
    return None


def load_exception(
    header: dict[str, Any],
    source: Source,
    load: Callable[[], Any] | None,
    make: Callable[[str, str], Exception] | None = None,
    *,
    by_name: bool = False,
) -> Exception:
    """See ``Serializer.load_exception``. ``load`` rebuilds the exception itself, if it was sent; ``make``
    makes one from the name of a type and a text. If it cannot be rebuilt, its class may be looked up
    ``by_name``.
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
                error = keep_text(loaded, text)
            else:
                why = f"it was rebuilt as a {type_name(type(loaded))}"
        except BaseException as reason:
            if is_interruption(reason):
                raise
            why = _reason(reason)
            error = _of_class(kind, text, why) if by_name else None
    if error is None:
        error = RemoteError(
            f"Original exception on remote side was {kind}, raised by worker '{worker}'"
            + (f": {text}" if text else "")
            + (f"\nIt cannot be raised as itself here: {why}" if why else ""),
            kind,
            remote_traceback,
        )
    if remote_traceback != text:  # an error of ours, which was raised in no function of the program's
        add_note(error, f"\nTraceback on worker '{worker}':\n{remote_traceback}")
    return error


def _of_class(kind: str, text: str, why: str) -> Exception | None:
    """Return an exception of the class with that name, with the text as its argument; None if no imported
    module has such a class, in which case no ``except`` clause of this process names it.
    """
    found = _imported(kind)
    if not isinstance(found, type) or not issubclass(found, Exception):
        return None
    try:
        error = new_exception(found)
    except TypeError:
        return None
    restore(error, ((text,), {}, {}))
    keep_text(error, text)
    said = "" if text_of(error) == text else f" Its text was: {text}"
    add_note(error, f"its arguments and attributes are missing: {why}{said}")
    return error if isinstance(error, Exception) else None


def _imported(name: str) -> Any:
    """Return the object that an imported module has under a name from ``type_name``; None if there
    is none.
    """
    parts = name.split(".")
    for count in range(len(parts) - 1, -1, -1):
        module = ".".join(parts[:count]) or "builtins"
        found: Any = sys.modules.get("__main__" if module in MAIN_NAMES else module)
        if found is not None:
            with contextlib.suppress(AttributeError):
                for part in parts[count:]:
                    found = inspect.getattr_static(found, part)
                return found
    return None


def _reason(error: BaseException) -> str:
    """Describe briefly why an exception cannot be rebuilt."""
    if type(error) is SerializationError and error.__cause__ is not None:
        error = error.__cause__
    text = text_of(error)
    return text if isinstance(error, RpcError) else f"{type_name(type(error))}: {text}"


def _traceback(error: BaseException) -> str:
    try:
        # Notes travel with the exception; those from other workers would otherwise be printed twice.
        text = folded(error, for_caller=True).rstrip()
    except BaseException:
        return f"{type_name(type(error))} (its traceback cannot be formatted)"
    return encodable(cut(text, _MAX_TRACEBACK))
