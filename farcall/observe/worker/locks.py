"""Locks that threads wait for, and their holders, as far as frames and code show them.

A lock of ``threading`` does not know its owner. But the code of a waiting frame has the name by which it
reaches the lock, and the code of another frame shows the ``with`` blocks that it is in. Names are followed
through variables, plain attributes, and items of dicts and lists: nothing that runs code of the user's.
"""

from __future__ import annotations

import dis
import functools
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType, MethodType
from typing import Any, Final

from farcall.observe.worker.frames import variables_of

__all__ = ["Awaited", "Holder", "awaited_object", "holder_of", "is_lock", "kind_of"]

_OWNER: Final = re.compile(r"owner=(\d+)")
_MISSING: Final = object()
_MRO: Final[Any] = vars(type)["__mro__"]
"""Descriptor of a class's method resolution order, which no code of a metaclass can replace."""

_LOCKS: Final = (type(threading.Lock()), type(threading.RLock()))

_VARIABLES: Final = frozenset(
    (
        "LOAD_FAST",
        "LOAD_FAST_CHECK",
        "LOAD_FAST_BORROW",
        "LOAD_GLOBAL",
        "LOAD_NAME",
        "LOAD_DEREF",
        "LOAD_CLASSDEREF",
    )
)
_ATTRIBUTES: Final = frozenset(("LOAD_ATTR", "LOAD_METHOD"))
_CONSTANTS: Final = frozenset(("LOAD_CONST", "LOAD_SMALL_INT", "LOAD_CONST_IMMORTAL"))
_ENTERS: Final = frozenset(("BEFORE_WITH", "LOAD_SPECIAL"))
_SKIPPED: Final = frozenset(("CACHE", "PUSH_NULL", "COPY", "SWAP", "PRECALL", "NOP", "EXTENDED_ARG"))

Chain = tuple[tuple[str, Any], ...]
"""A path by which code reaches an object: a variable, then attributes and items."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """The object that a thread waits for, and the program's expression for it."""

    object: Any
    name: str


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a lock: a thread, and the frame that has acquired the lock if that is known."""

    thread: int
    frame: FrameType | None
    line: int
    sure: bool


def _raw(lock: Any) -> Any:
    """Return the lock of C that a lock is, or is built on."""
    if isinstance(lock, threading.Condition):
        lock = lock.__dict__.get("_lock", lock)
    return lock


# ---- names in code


@functools.lru_cache(maxsize=2048)
def _instructions(code: CodeType) -> tuple[dis.Instruction, ...]:
    return tuple(each for each in dis.get_instructions(code) if each.opname not in _SKIPPED)


def _chain_before(code: CodeType, index: int) -> Chain | None:
    """Return how the code reaches the value that is on the stack before the instruction at an index."""
    steps: list[tuple[str, Any]] = []
    instructions = _instructions(code)
    while index > 0:
        index -= 1
        each = instructions[index]
        if each.opname in _ATTRIBUTES:
            steps.append(("attribute", each.argval))
        elif each.opname == "BINARY_SUBSCR" or (each.opname == "BINARY_OP" and each.argrepr == "[]"):
            index -= 1
            if index < 0 or instructions[index].opname not in _CONSTANTS:
                return None
            steps.append(("item", instructions[index].argval))
        elif each.opname in _VARIABLES:
            steps.append(("variable", each.argval))
            return tuple(reversed(steps))
        else:
            return None
    return None


def _words(chain: Chain) -> str:
    text = ""
    for kind, name in chain:
        text += f"[{name!r}]" if kind == "item" else f".{name}" if kind == "attribute" else str(name)
    return text


def _variable(frame: FrameType, name: str) -> Any:
    for values in (variables_of(frame), frame.f_globals, frame.f_builtins):
        if name in values:
            return values[name]
    return _MISSING


def _follow(frame: FrameType, chain: Chain) -> Any:
    """Return the object that a chain leads to; ``_MISSING`` if that is not known without running code."""
    value: Any = _MISSING
    for kind, name in chain:
        if kind == "variable":
            value = _variable(frame, name)
        elif kind == "attribute":
            value = _attribute(value, name)
        elif type(value) in (dict, list, tuple):
            try:
                value = value[name]
            except (LookupError, TypeError):
                return _MISSING
        else:
            return _MISSING
        if value is _MISSING:
            return _MISSING
    return value


def _attribute(value: Any, name: str) -> Any:
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        own = None
    if isinstance(own, dict | Mapping) and name in own:
        return own[name]
    for kind in _MRO.__get__(value if isinstance(value, type) else type(value)):
        found = kind.__dict__.get(name, _MISSING)
        if found is not _MISSING:
            return found.__get__(value) if type(found).__name__ == "member_descriptor" else found
    return _MISSING


# ---- waiting threads


def awaited_object(frame: FrameType) -> Awaited | None:
    """Return the lock, queue or event that a frame of the program waits for: in a ``with`` statement, or by a
    method that it calls; None if its code does not show it.
    """
    code = frame.f_code
    instructions = _instructions(code)
    at = (
        next((n for n, each in enumerate(instructions) if each.offset > frame.f_lasti), len(instructions)) - 1
    )
    if at < 1:
        return None
    if instructions[at].opname == "CALL" and any(
        each.opname == "LOAD_SPECIAL" for each in instructions[max(0, at - 3) : at]
    ):
        while instructions[at].opname != "LOAD_SPECIAL" or instructions[at - 1].opname == "LOAD_SPECIAL":
            at -= 1
    elif instructions[at].opname not in _ENTERS:
        return _of_method(frame, instructions, at)
    chain = _chain_before(code, at)
    value = _MISSING if chain is None else _follow(frame, chain)
    return None if chain is None or value is _MISSING else Awaited(value, _words(chain))


def _of_method(frame: FrameType, instructions: tuple[dis.Instruction, ...], at: int) -> Awaited | None:
    """Return the object whose method is called by the instruction at an index."""
    call = instructions[at].positions
    if not instructions[at].opname.startswith("CALL") or call is None:
        return None
    for index in range(at - 1, -1, -1):
        each, where = instructions[index], instructions[index].positions
        if each.opname in _ATTRIBUTES and where is not None:
            starts = (where.lineno, where.col_offset) == (call.lineno, call.col_offset)
            if starts and (where.end_lineno, where.end_col_offset) < (call.end_lineno, call.end_col_offset):
                chain = _chain_before(frame.f_code, index)
                value = _MISSING if chain is None else _follow(frame, chain)
                if chain is not None and value is not _MISSING:
                    return Awaited(value, _words(chain))
                return None
    return None


# ---- holders


@functools.lru_cache(maxsize=2048)
def _with_blocks(code: CodeType) -> tuple[tuple[int, int, int, Chain], ...]:
    """Return the ``with`` blocks of a code object: begin and end of the protected code, their line, and the
    object entered.
    """
    instructions = _instructions(code)
    by_offset = {each.offset: number for number, each in enumerate(instructions)}
    found: dict[int, tuple[int, list[tuple[int, int]]]] = {}
    entries = getattr(dis.Bytecode(code), "exception_entries", ())
    for entry in entries:
        handler = by_offset.get(entry.target)
        if handler is None or "WITH_EXCEPT_START" not in [
            each.opname for each in instructions[handler : handler + 2]
        ]:
            continue
        found.setdefault(entry.target, (handler, []))[1].append((entry.start, entry.end))
    blocks: list[tuple[int, int, int, Chain]] = []
    for _, ranges in found.values():
        begin = min(start for start, _ in ranges)
        enter = max(
            (n for n, each in enumerate(instructions) if each.opname in _ENTERS and each.offset < begin),
            default=None,
        )
        if enter is None:
            continue
        while instructions[enter - 1].opname == "LOAD_SPECIAL" or (
            instructions[enter].opname == "LOAD_SPECIAL" and instructions[enter - 2].opname == "LOAD_SPECIAL"
        ):
            enter -= 1
        chain = _chain_before(code, enter)
        where = instructions[enter].positions
        if chain is not None:
            blocks += [(start, end, where.lineno or 0 if where else 0, chain) for start, end in ranges]
    return tuple(blocks)


@functools.lru_cache(maxsize=2048)
def _acquires(code: CodeType) -> tuple[tuple[int, int, str, Chain], ...]:
    """Return the uses of the methods ``acquire`` and ``release`` in a code object: offset, line, method, and
    chain.
    """
    found: list[tuple[int, int, str, Chain]] = []
    for number, each in enumerate(_instructions(code)):
        if each.opname in _ATTRIBUTES and each.argval in ("acquire", "release"):
            chain = _chain_before(code, number)
            if chain is not None:
                line = each.positions.lineno if each.positions is not None else None
                found.append((each.offset, line or 0, each.argval, chain))
    return tuple(found)


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def holder_of(lock: Any, waiting: int, frames: Mapping[int, FrameType]) -> Holder | None:
    """Return the thread that holds a lock that the thread ``waiting`` waits for; None if that is not known.

    Args:
        frames: innermost frames of all threads.
    """
    lock = _raw(lock)
    owner = _OWNER.search(repr(lock)) if type(lock) is type(threading.RLock()) else None
    if owner is not None:
        ident = int(owner.group(1))
        found = _taken_by(lock, ident, frames.get(ident), waits=ident == waiting) if ident in frames else None
        return found or Holder(ident, None, 0, sure=True)
    guesses = []
    for ident, innermost in frames.items():
        found = _taken_by(lock, ident, innermost, waits=ident == waiting)
        if found is not None:
            if found.sure:
                return found
            guesses.append(found)
    return guesses[0] if guesses else None


def _taken_by(lock: Any, ident: int, innermost: FrameType | None, *, waits: bool) -> Holder | None:
    guess: Holder | None = None
    for frame in _outward(innermost):
        at = frame.f_lasti
        for begin, end, line, chain in _with_blocks(frame.f_code):
            if begin <= at < end and _raw(_follow(frame, chain)) is lock:
                return Holder(ident, frame, line, sure=True)
        held: int | None = None
        for offset, line, method, chain in _acquires(frame.f_code):
            # The call in which a thread waits has not succeeded.
            is_current = waits and line == frame.f_lineno
            if offset < at and _raw(_follow(frame, chain)) is lock and not is_current:
                held = line if method == "acquire" else None
        if held is not None and guess is None:
            guess = Holder(ident, frame, held, sure=False)
    return guess


def is_lock(value: Any) -> bool:
    """Whether one thread at a time can hold it."""
    return isinstance(_raw(value), _LOCKS)


def kind_of(value: Any) -> str:
    """Return the name of the type of an object that is waited for."""
    if isinstance(value, MethodType):
        value = value.__self__
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
