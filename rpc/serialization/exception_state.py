"""Taking exceptions apart and rebuilding them, without calling their class.

Pickle rebuilds an exception by calling its class on ``args``. A class whose constructor builds its message,
counts its instances, or takes other arguments than it passes on, then gives another text, runs twice, or
fails. Here the new exception is allocated by the constructor of the nearest base class that is written in C,
and its state is restored:

- ``args``;
- slots: attributes that are not in ``__dict__``, such as ``OSError.errno`` or ``SystemExit.code``, and those
  of ``__slots__``. Without ``AttributeError.obj``, which CPython does not pickle either;
- ``__dict__``, in which the notes are; passed to ``__setstate__`` if the class defines one, as pickle does;
- the chain of causes and contexts, as far as a traceback would print it.

No other code of the class runs. A class that defines how it is reduced (``__reduce__``, ``__reduce_ex__`` or
``copyreg``) is reduced and rebuilt in its own way, and its chain and its notes are restored; a class with a
base class in C other than Python's own exceptions is left to pickle.

Each link of the chain is pickled apart from the rest. Otherwise, a cause whose class only the sender can
import would keep its exception from being rebuilt. A ``RemoteError`` with the same text replaces such a link.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import pickle
from collections.abc import Callable, Iterator
from types import (
    BuiltinFunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    ModuleType,
)
from typing import Any, Final, Protocol, TypeVar, cast

from rpc.errors import RemoteError
from rpc.runtime.interrupts import is_interruption
from rpc.serialization.failures import cannot_send, cut, encodable, text_of, type_name
from rpc.serialization.kept_errors import noted
from rpc.serialization.payload import Destination

__all__ = [
    "Partly",
    "add_note",
    "keep_text",
    "new_exception",
    "reduce_exception",
    "reduce_partly",
    "restore",
    "to_keep",
    "twin",
]

_MAX_LINKS: Final = 32
"""Maximum number of causes and contexts that travel with an exception."""
_MAX_LINK_BYTES: Final = 64 << 10
"""Maximum size of the pickle of one of them, in bytes."""

_Descriptor = MemberDescriptorType | GetSetDescriptorType
# Used as descriptors: the class may have properties of these names, or refuse access to its attributes.
_args: Final[Any] = BaseException.args
_cause: Final[Any] = BaseException.__cause__
_context: Final[Any] = BaseException.__context__
_suppress: Final[Any] = BaseException.__suppress_context__
_traceback: Final[Any] = BaseException.__traceback__
_class: Final[Any] = vars(object)["__class__"]
_dict: Final[Any] = vars(BaseException)["__dict__"]
_NOT_SENT: Final = (vars(AttributeError)["obj"],)

_TEXTS: Final = "__farcall_texts__"
"""Attribute of the class of an exception whose own methods cannot print it: its ``str`` and ``repr``."""

Link = tuple[bool, bytes, str, str]
"""One exception of a chain: whether it is a cause, its pickle (empty if there is none), type and text."""


E = TypeVar("E", bound=BaseException)


class Writing(Protocol):
    """The interface of the pickler that reducers use."""

    to: Destination | None
    rebuilds_exceptions: bool
    sends_chains: bool
    links: dict[int, tuple[BaseException, bytes]]

    def apart(self, obj: Any) -> bytes: ...

    def attempt(self, obj: Any) -> object: ...


def reduce_exception(error: BaseException, pickler: Writing) -> Any:
    """Reduce an exception for ``new_exception`` and ``restore``."""
    if not pickler.rebuilds_exceptions:
        return NotImplemented
    if _reduces_itself(type(error)):
        return _with_chain(_own_reduction(error), error, pickler)
    if _base_in_c(type(error)) is None:
        return NotImplemented
    state = *_state(error), _chain(error, pickler), *_texts_of(error)
    return new_exception, _needed(error), state, None, None, restore


def new_exception(kind: type[BaseException], *needed: Any) -> BaseException:
    """Allocate an exception without running code of its class; ``TypeError`` if that is impossible. Named in
    pickles.
    """
    base = _base_in_c(kind)
    if base is None:
        raise TypeError(f"{type_name(kind)} is no exception class that can be rebuilt from its state")
    return base.__new__(kind, *needed)  # type: ignore[no-any-return]


def restore(error: BaseException, state: tuple[Any, ...]) -> None:
    """Restore the state of an exception. Named in pickles."""
    args, slots, attributes, *rest = state
    _args.__set__(error, args)
    for name, value in slots.items():
        descriptor = next((each for each in _descriptors(type(error)) if each.__name__ == name), None)
        if descriptor is None:  # the class here has no such slot
            _dict.__get__(error)[name] = value
        else:
            descriptor.__set__(error, value)
    if attributes:
        if type(error).__setstate__ is BaseException.__setstate__:
            _dict.__get__(error).update(attributes)
        else:
            error.__setstate__(attributes)
    if rest:
        _link(error, rest[0])
    if len(rest) > 1:
        _describe(error, *rest[1])


def keep_text(error: E, text: str) -> E:
    """Make a rebuilt exception print ``text`` if its own methods fail, since they need what was not sent."""
    texts = [_attempt(function, error) for function in (str, repr)]
    if None in texts:
        _describe(error, *(text if each is None else each for each in texts))
    return error


def restore_own(error: BaseException, state: tuple[Any, ...]) -> None:
    """Restore what an exception has in addition to the result of its own ``__reduce__``. Named in pickles."""
    own_state, notes, chain = state
    if own_state is not None:
        error.__setstate__(own_state)
    if notes:
        _dict.__get__(error).setdefault("__notes__", notes)
    _link(error, chain)


def add_note(error: BaseException, note: str) -> None:
    """Add a note, even if the class overrides attribute access."""
    attributes = _dict.__get__(error)
    notes = attributes.get("__notes__")
    attributes["__notes__"] = [*notes, note] if isinstance(notes, list) else [note]


def twin(error: E) -> E:
    """A shallow copy with the same traceback and causes, or the error itself if it cannot be copied.

    A raised exception refers to the frames that it passes, so an error that is kept and raised several times
    would keep the frames of everything that waited for it.
    """
    kind = type(error)
    try:
        if _reduces_itself(kind) or _base_in_c(kind) is None:
            copied = copy.copy(error)
            if type(copied) is not kind:
                return error
        else:
            copied = cast("E", new_exception(*_needed(error)))
            restore(copied, (*_state(error), [], *_texts_of(error)))
    except Exception:  # raised by the class's own methods
        return error
    for each in (_cause, _context, _suppress, _traceback):
        each.__set__(copied, each.__get__(error))
    return copied


def to_keep(error: E) -> E:
    """Return a copy of an error for a future or an object to keep: without frames, its place is a note. The
    error itself keeps its traceback, unless it cannot be copied.
    """
    if error.__traceback__ is None:
        return error
    copied = twin(error)
    return noted(copied, copy=None if copied is error else twin)


class Partly:
    """An exception of which only the picklable parts are pickled.

    Args:
        error: the exception.
        bare: leave out all parts; ``args`` is the text.
    """

    def __init__(self, error: BaseException, *, bare: bool = False) -> None:
        self.error = error
        self.bare = bare


def reduce_partly(partly: Partly, pickler: Writing) -> Any:
    """Reduce an exception without its parts that cannot be pickled; notes list what is missing."""
    error, bare = partly.error, partly.bare
    kind = type(error)
    if _base_in_c(kind) is None:
        raise TypeError(f"{type_name(kind)} cannot be rebuilt from its state")
    needed = _needed(error)
    if isinstance(error, BaseExceptionGroup):
        needed = (needed[0], error.message, [Partly(each, bare=bare) for each in error.exceptions])
    if bare:
        note = "its arguments and attributes are missing: they cannot be pickled"
        state: Any = needed[1:] or (text_of(error),), {}, {"__notes__": [note]}, []
        return new_exception, needed, (*state, *_lost_texts(error, state)), None, None, restore
    if _reduces_itself(kind):
        return _with_chain(_partial_reduction(error, pickler), error, pickler)
    args, slots, attributes = _state(error)
    notes = list(attributes.get("__notes__", ()))
    if isinstance(error, BaseExceptionGroup):
        args = (error.message, list(error.exceptions))
        kept_args: list[Any] = list(needed[1:])
    else:
        kept_args = []
        for place, value in enumerate(args):
            why = _refusal(value, f"argument {place}", pickler)
            kept_args.append(value if why is None else Unsent(value))
            notes += [] if why is None else [f"argument {place} is missing: {why}"]
    slots = dict(_sendable(slots, notes, pickler))
    kept = dict(_sendable(attributes, notes, pickler))
    missing = {
        name: Unsent(value, dict(_sendable(_attributes(value), [], pickler)))
        for name, value in attributes.items()
        if name not in kept
    }
    if missing and not _has_same_text(error, (args, slots, kept)):
        kept |= missing  # otherwise its text would be lost
    kept["__notes__"] = notes
    state = tuple(kept_args), slots, kept, _chain(error, pickler)
    return new_exception, needed, (*state, *_lost_texts(error, state)), None, None, restore


class Unsent:
    """A placeholder for a value that could not be sent; it prints like that value, and has those of its
    attributes that can be sent.
    """

    def __init__(self, value: object, attributes: dict[str, Any] | None = None) -> None:
        self.__dict__.update(attributes or {})
        self._texts: list[str] = []
        for function in (str, repr):
            try:
                self._texts.append(function(value))
            except Exception:
                self._texts.append(f"<{type_name(type(value))}>")

    def __str__(self) -> str:
        return self._texts[0]

    def __repr__(self) -> str:
        return self._texts[1]


# ---- the parts of an exception


def _needed(error: BaseException) -> tuple[Any, ...]:
    """Return the arguments of ``new_exception``: the content of groups cannot be set later."""
    kind: Any = type(error)
    if _TEXTS in vars(kind):
        kind = kind.__base__
    return (kind, error.message, error.exceptions) if isinstance(error, BaseExceptionGroup) else (kind,)


def _state(error: BaseException) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    slots = {}
    for descriptor in _descriptors(type(error)):
        try:
            value = descriptor.__get__(error)
        except AttributeError:  # it has not been set
            continue
        if value is not None or descriptor.__objclass__.__module__ != "builtins":
            slots[descriptor.__name__] = value
    return _args.__get__(error), slots, _dict.__get__(error)


def _descriptors(kind: type) -> Iterator[Any]:
    """Yield the descriptors of an exception's slots."""
    for each in kind.__mro__:
        if each not in (BaseException, BaseExceptionGroup, object):
            for name, descriptor in vars(each).items():
                if isinstance(descriptor, _Descriptor) and not (
                    (name.startswith("__") and name.endswith("__")) or descriptor in _NOT_SENT
                ):
                    yield descriptor


def _base_in_c(kind: type) -> Any:
    """Return the builtin class that allocates instances of an exception class; None if another class in C
    does so.
    """
    base: type | None = kind
    while base is not None:
        if type(vars(base).get("__new__")) is BuiltinFunctionType:
            return base if issubclass(base, BaseException) and base.__module__ == "builtins" else None
        base = base.__base__
    return None


def _reduces_itself(kind: type) -> bool:
    """Whether a class defines how it is pickled."""
    reduce: Any = kind.__reduce__
    reduce_ex: Any = kind.__reduce_ex__
    return (
        kind in copyreg.dispatch_table
        or reduce_ex is not object.__reduce_ex__
        or not (isinstance(reduce, MethodDescriptorType) and reduce.__objclass__.__module__ == "builtins")
    )


def _own_reduction(error: BaseException) -> Any:
    reduce = copyreg.dispatch_table.get(type(error))
    return error.__reduce_ex__(pickle.HIGHEST_PROTOCOL) if reduce is None else reduce(error)


def _with_chain(reduced: Any, error: BaseException, pickler: Writing) -> Any:
    """Return the result of a class's own reduction, with the chain of the exception and its notes."""
    chain, notes = _chain(error, pickler), getattr(error, "__notes__", None)
    if not (chain or notes) or type(reduced) is not tuple or len(reduced) > 3:
        return reduced
    made_by, arguments, *state = reduced
    return made_by, arguments, (state[0] if state else None, notes, chain), None, None, restore_own


# ---- the parts that can be sent


def _partial_reduction(error: BaseException, pickler: Writing) -> Any:
    made_by, arguments, attributes = _own_reduction(error)
    notes = list(attributes.get("__notes__", ()))
    kept = dict(_sendable(attributes, notes, pickler))
    return made_by, arguments, kept | {"__notes__": notes}


def _sendable(attributes: dict[str, Any], notes: list[str], pickler: Writing) -> Iterator[tuple[str, Any]]:
    """Yield those attributes that can be pickled; the others are listed in the notes."""
    for name, value in attributes.items():
        why = _refusal(value, f"attribute '{name}'", pickler)
        if why is None:
            yield name, value
        else:
            notes.append(f"attribute '{name}' is missing: {why}")


def _refusal(value: Any, what: str, pickler: Writing) -> Exception | None:
    """Return why a value cannot be pickled; None if it can."""
    try:
        pickler.attempt(value)
    except Exception as error:
        return cannot_send(error, value, pickler.to, what, pickler.attempt)
    return None


def _attributes(value: object) -> dict[str, Any]:
    return {} if isinstance(value, (type, ModuleType)) else dict(getattr(value, "__dict__", {}))


def _has_same_text(error: BaseException, state: tuple[Any, ...]) -> bool:
    try:
        rebuilt = new_exception(*_needed(error))
        restore(rebuilt, state)
        return str(rebuilt) == str(error)
    except Exception:  # raised by the class's own methods
        return False


# ---- texts of exceptions whose own methods cannot print them any more


def _lost_texts(error: BaseException, state: tuple[Any, ...]) -> list[tuple[str, str]]:
    """Return the texts of an exception, if one that is rebuilt from the state could not print itself; else
    nothing.
    """
    lost = _texts_of(error)
    if lost:
        return lost
    try:
        rebuilt = new_exception(*_needed(error))
        restore(rebuilt, state[:3])
        str(rebuilt), repr(rebuilt)
    except Exception:  # raised by the class's own methods
        return [(text_of(error), _attempt(repr, error) or text_of(error))]
    return []


def _texts_of(error: BaseException) -> list[tuple[str, str]]:
    """Return the texts that ``_describe`` has given an exception, as a list of none or one."""
    texts = vars(type(error)).get(_TEXTS)
    return [] if texts is None else [texts]


def _describe(error: BaseException, text: str, shown: str) -> None:
    """Make an exception print these texts: its class becomes a subclass of the same name."""
    kind: Any = type(error)
    attributes: dict[str, Any] = {
        _TEXTS: (text, shown),
        "__slots__": (),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__str__": lambda _: text,
        "__repr__": lambda _: shown,
    }
    with contextlib.suppress(Exception):  # the class does not allow it, and remains as it is
        _class.__set__(error, type(kind)(kind.__name__, (kind,), attributes))


def _attempt(function: Callable[[BaseException], str], error: BaseException) -> str | None:
    """Return a text of an exception; None if its own methods fail."""
    try:
        return encodable(cut(function(error), _MAX_LINK_BYTES))
    except BaseException as reason:
        if is_interruption(reason):
            raise
        return None


# ---- the chain of causes and contexts


def _chain(error: BaseException, pickler: Writing) -> list[Link]:
    if not pickler.sends_chains:
        return []
    links: list[Link] = []
    seen = {id(error)}
    while len(links) < _MAX_LINKS:
        linked = _cause.__get__(error)
        is_cause = linked is not None
        if not (is_cause or _suppress.__get__(error)):
            linked = _context.__get__(error)
        if linked is None or id(linked) in seen:
            break
        error = linked
        seen.add(id(error))
        links.append((is_cause, _link_of(error, pickler), type_name(type(error)), text_of(error)))
    return links


def _link_of(error: BaseException, pickler: Writing) -> bytes:
    """Return the pickle of one exception of a chain. It is made once for each message: if every exception has
    the next one both as its cause and as its argument, each of them is in the chains of all before it.
    """
    if id(error) not in pickler.links:
        pickler.links[id(error)] = error, _pickled_apart(error, pickler)
    return pickler.links[id(error)][1]


def _pickled_apart(error: BaseException, pickler: Writing) -> bytes:
    for attempt in (error, Partly(error), Partly(error, bare=True)):
        try:
            data = pickler.apart(attempt)
        except Exception:  # a reduced version is tried next
            continue
        return data if len(data) <= _MAX_LINK_BYTES else b""
    return b""


def _link(error: BaseException, chain: list[Link]) -> None:
    for is_cause, data, kind, text in chain:
        linked = _linked(data, kind, text)
        (_cause if is_cause else _context).__set__(error, linked)
        error = linked


def _linked(data: bytes, kind: str, text: str) -> BaseException:
    if data:
        try:
            linked = pickle.loads(data)
        except Exception:  # its class is missing here, for one
            linked = None
        if isinstance(linked, BaseException):
            return keep_text(linked, text)
    return RemoteError(f"Original exception on remote side was {kind}: {text}", kind)
