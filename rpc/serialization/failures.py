"""Error messages for objects that cannot be sent or read: which argument, of which type, and why."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from types import AsyncGeneratorType, FunctionType, GeneratorType
from typing import Any, Final

import torch

from rpc.errors import NoMemoryError, RpcError, SerializationError, with_article
from rpc.runtime.interrupts import is_interruption
from rpc.runtime.legible import legible
from rpc.serialization.functions import not_found
from rpc.serialization.kept_errors import noted
from rpc.serialization.payload import Destination

Attempt = Callable[[Any], object]
"""Pickles an object without sending it, or raises."""

_MAX_DEPTH: Final = 12
_MAX_TRIALS: Final = 1000
_STATE_METHODS: Final = ("__getstate__", "__reduce__", "__reduce_ex__")
_MAX_TEXT: Final = 16 << 10
_MISSING: Final = re.compile(r"Can't get attribute '(?P<name>[^']*)' on <module '(?P<module>[^']*)'")


def describe(obj: Any) -> str:
    """Return the qualified name of a function or class, otherwise the type of an object."""
    name = getattr(obj, "__qualname__", None)
    if not isinstance(name, str):
        return with_article(type_name(type(obj)))
    module = getattr(obj, "__module__", None)
    return f"{module}.{name}" if module else name


def type_name(kind: type) -> str:
    """Return a class's name as it is usually written: without the module for builtins, and for a class that
    has none, such as one that code without a module has made.
    """
    module = getattr(kind, "__module__", "builtins")
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"


def text_of(error: BaseException) -> str:
    """Return an exception's text, cut if it is long. Never raises, whatever its ``__str__`` does."""
    try:
        return encodable(cut(str(error), _MAX_TEXT))
    except BaseException:
        return "(its text is not available)"


def beginning_of(text: str, limit: int) -> str:
    """Return a text on one line, legible, without what exceeds ``limit`` characters."""
    line = " ".join(text.split())
    return legible(line if len(line) <= limit else f"{line[: limit - 4].rstrip()} ...")


def cut(text: str, limit: int) -> str:
    """Leave out the middle of a text that is longer than ``limit`` characters."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]}\n...\n{text[-half:]}"


def encodable(text: str) -> str:
    """Return the text without lone surrogates, which msgpack cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def cannot_call(
    error: Exception,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    to: Destination,
    attempt: Attempt,
) -> Exception:
    """Return the error for a call that cannot be pickled; it names the argument that causes it."""
    headline = f"cannot call {describe(func)} on worker '{to.name}'"
    if _speaks_for_itself(error):
        error.add_note(headline)
        return error
    pieces: list[tuple[str, Any]] = [("the function", func)]
    pieces += [(f"argument {position}", value) for position, value in enumerate(args)]
    pieces += [(f"argument '{name}'", value) for name, value in kwargs.items()]
    for what, value in pieces:
        cause = _try(value, attempt)
        if cause is not None:
            said = f"{headline}: {what}, of type {type_name(type(value))}, cannot be sent"
            return _explained(said, value, cause, attempt)
    return _explained(f"{headline}: the call cannot be sent", (func, args, kwargs), error, attempt)


def cannot_send(
    error: Exception, obj: Any, to: Destination | None, what: object, attempt: Attempt
) -> Exception:
    """Return the error for an object that cannot be pickled; ``what`` as for ``Codec.dumps``."""
    if not isinstance(what, str):
        what = "the result" if what is None else f"the result of {describe(what)}"
    where = "" if to is None else f", to worker '{to.name}'"
    if _speaks_for_itself(error):
        error.add_note(f"cannot send {what}{where}")
        return error
    said = f"cannot send {what}, of type {type_name(type(obj))}{where}"
    if isinstance(obj, GeneratorType | AsyncGeneratorType):
        refused = SerializationError(
            f"{said}: {text_of(error)}. Call the function by rpc.stream, which brings its values one by one, "
            "or return a list of them"
        )
        refused.__cause__ = error
        return refused
    return _explained(said, obj, error, attempt)


def _speaks_for_itself(error: Exception) -> bool:
    """Whether the class and text of an error must be kept: for example, a reference is no longer valid."""
    return isinstance(error, RpcError) and not isinstance(error, SerializationError)


def _explained(said: str, value: Any, cause: Exception, attempt: Attempt) -> Exception:
    path, culprit = "", value
    if not isinstance(cause, RecursionError):
        path, culprit, cause = _locate(value, cause, attempt)
    if path:
        said = f"{said}, because of {path.lstrip()} in it, of type {type_name(type(culprit))}"
    error = SerializationError(f"{said}: {_reason(cause, culprit)}")
    error.__cause__ = cause
    return error


def _reason(cause: Exception, culprit: Any) -> str:
    if isinstance(cause, RecursionError):
        return "it is nested too deeply: send something flat, such as a list with indices in place of nesting"
    reason = text_of(cause) or type(cause).__name__
    if isinstance(culprit, GeneratorType):
        return (
            f"{reason}. Send a list of its items, or a reference to it (rpc.remote makes one for a callee's "
            "result, and rpc.RRef for an object): rref.rpc_sync().__next__() returns the next item"
        )
    if isinstance(culprit, AsyncGeneratorType):
        return f"{reason}. Send a list of its items"
    if isinstance(culprit, torch.futures.Future):
        return f"{reason}. Send its value: future.wait() returns it"
    if reason.startswith("cannot pickle '"):
        return (
            f"{reason}. Create it on the worker that uses it, leave it out by a __getstate__, or send a "
            "reference to it (rpc.remote makes one for a callee's result, and rpc.RRef for an object)"
        )
    return reason


def _try(obj: Any, attempt: Attempt) -> Exception | None:
    """Return why an object cannot be pickled; None if it can."""
    try:
        attempt(obj)
    except Exception as error:
        if is_interruption(error):
            raise
        return noted(error)  # its frames would refer to the callers, which keep it: a cycle
    return None


def _locate(obj: Any, cause: Exception, attempt: Attempt) -> tuple[str, Any, Exception]:
    """Find the innermost part of an object that cannot be pickled, and the path to it."""
    path = ""
    trials = 0
    for _ in range(_MAX_DEPTH):
        for step, part in _parts(obj):
            trials += 1
            if trials > _MAX_TRIALS:
                return path, obj, cause
            error = _try(part, attempt)
            if error is not None:
                path, obj, cause = path + step, part, error
                break
        else:
            break
    return path, obj, cause


def _parts(obj: Any) -> Iterable[tuple[str, Any]]:
    """Yield an object's parts, as far as they are visible."""
    if isinstance(obj, (list, tuple)):
        return ((f"[{index}]", part) for index, part in enumerate(obj))
    if isinstance(obj, dict):
        return ((f"[{key!r:.60}]", part) for key, part in list(obj.items()))
    if isinstance(obj, FunctionType):
        return ((f" its variable '{name}'", value) for name, value in _variables(obj).items())
    kind = type(obj)
    if all(getattr(kind, name) is getattr(object, name) for name in _STATE_METHODS):
        return ((f".{name}", part) for name, part in list(getattr(obj, "__dict__", {}).items()))
    return ()


def _variables(function: FunctionType) -> dict[str, Any]:
    """Return what a function sent by value includes: its closure's variables, and the globals that
    it uses.
    """
    code, known = function.__code__, function.__globals__
    variables = {name: known[name] for name in code.co_names if name in known}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # nothing has been assigned to it yet
            variables[name] = cell.cell_contents
    return variables


def unreadable(error: Exception, what: str) -> RpcError:
    """Return the error to raise for an exception of the unpickler."""
    if isinstance(error, MemoryError):
        return NoMemoryError(f"{what} cannot be unpickled here: there is no memory for it. {text_of(error)}")
    if isinstance(error, AttributeError) and (missing := _MISSING.match(text_of(error))):
        module, name = missing["module"], missing["name"]
        return not_found(module, name, f"module '{module}' has no attribute '{name}'")
    if isinstance(error, ModuleNotFoundError) and error.name:
        return not_found(error.name, "", f"there is no module named '{error.name}'")
    return SerializationError(f"{what} cannot be unpickled here: {type(error).__name__}: {text_of(error)}")
