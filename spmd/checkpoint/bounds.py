"""Bounds of what a pickle builds, found without building it.

A few hundred bytes of a pickle can describe a structure of any size: tuples of references to one tuple, whose
elements are again references, and so on. It takes little memory, but hashing, comparing or printing it visits
each element as often as it is referred to, in C code that no signal ends. So before a pickle is loaded, its
opcodes are followed with the sizes of objects in place of the objects. A size counts each element as often as
it is visited.

An object can only be referred to twice by the memo. From the first time on it must not change, so that the
sizes of those that refer to it stay right. (``pickle`` writes an object completely before it refers to it
again, unless it contains itself.)
"""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Iterable
from typing import Any, Final

__all__ = ["check_pickle"]

_MAX_DEPTH: Final = 1000
"""Maximum depth of nested objects. C code that hashes tuples does not check its stack."""

_LEAST_SIZE: Final = 1_000_000
_SIZE_OF_A_BYTE: Final = 100
"""Maximum size that is built, in objects: a number, and one for each byte of the pickle."""

_NUMBERS: Final = ("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT")
_TEXTS: Final = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINSTRING", "BINSTRING")
_BYTES: Final = ("SHORT_BINBYTES", "BINBYTES", "BINBYTES8")
_OTHERS: Final = ("NONE", "NEWTRUE", "NEWFALSE", "GLOBAL", "EMPTY_TUPLE")
_VALUES: Final = frozenset((*_NUMBERS, *_TEXTS, *_BYTES, *_OTHERS))
"""Opcodes that push a value without elements."""

_GETS: Final = frozenset({"BINGET", "LONG_BINGET"})
_PUTS: Final = frozenset({"BINPUT", "LONG_BINPUT"})
_INTO_FROM_MARK: Final = frozenset({"APPENDS", "SETITEMS", "ADDITEMS"})
_CONTAINERS: Final = frozenset(["EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"])
_FROM_MARK: Final = frozenset(["TUPLE", "FROZENSET"])
_INTO: Final = {"APPEND": 1, "SETITEM": 2, "BUILD": 1}
"""Opcodes that put a number of objects into the one before them."""

_OF: Final = {
    "TUPLE1": 1,
    "TUPLE2": 2,
    "TUPLE3": 3,
    "STACK_GLOBAL": 2,
    "REDUCE": 2,
    "NEWOBJ": 2,
    "BINPERSID": 1,
}
"""Opcodes that make one object of a number of others."""

_MARK: Final = object()


class _Built:
    """An object that would be built: its size and depth, and whether something may still be put into it."""

    __slots__ = ("depth", "is_shared", "size")

    def __init__(self, parts: Iterable[_Built] = ()) -> None:
        self.size = self.depth = 1
        self.is_shared = False
        self.take(parts)

    def take(self, parts: Iterable[_Built]) -> None:
        """Put objects into this one."""
        if self.is_shared:
            raise pickle.UnpicklingError("an object changes after it was referred to")
        size, depth = self.size, self.depth
        for each in parts:
            size += each.size
            if each.depth >= depth:
                depth = each.depth + 1
        self.size, self.depth = size, depth
        if depth > _MAX_DEPTH:
            raise pickle.UnpicklingError(f"objects are nested more than {_MAX_DEPTH} deep")


_VALUE: Final = _Built()


def check_pickle(packed: bytes) -> None:
    """Check that a pickle builds nothing that is out of proportion to its size.

    Raises:
        pickle.UnpicklingError: it does, or is damaged; the text says how.
    """
    try:
        _follow(packed)
    except (ValueError, IndexError, KeyError, AttributeError, TypeError) as error:  # by what it lacks
        raise pickle.UnpicklingError(f"it is no pickle: {error}") from error


def _follow(packed: bytes) -> None:
    most = left = _LEAST_SIZE + _SIZE_OF_A_BYTE * len(packed)
    stack: list[Any] = []
    memo: dict[int, _Built] = {}
    for opcode, arg, _ in pickletools.genops(packed):
        name = opcode.name
        if name == "MEMOIZE":
            memo[len(memo)] = _last(stack)
        elif name in _VALUES:
            stack.append(_VALUE)
        elif name in _GETS:
            found = memo[arg]  # type: ignore[index]
            left -= found.size
            if left < 0:
                raise pickle.UnpicklingError(f"its {len(packed)} bytes build more than {most} objects")
            if found is not _VALUE:
                found.is_shared = True
            stack.append(found)
        elif name in _PUTS:
            memo[arg] = _last(stack)  # type: ignore[index]
        elif name == "MARK":
            stack.append(_MARK)
        elif name in _CONTAINERS:
            stack.append(_Built())
        elif name in _OF:
            parts = _popped(stack, _OF[name])
            stack.append(_Built(parts))
        elif name in _INTO:
            _put(_popped(stack, _INTO[name]), stack)
        elif name in _INTO_FROM_MARK:
            _put(_from_mark(stack), stack)
        elif name in _FROM_MARK:
            stack.append(_Built(_from_mark(stack)))
        elif name == "POP":
            stack.pop()
        elif name == "POP_MARK":
            _from_mark(stack)
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise pickle.UnpicklingError(f"it has the opcode {name}, which is not used here")


def _put(parts: list[_Built], stack: list[Any]) -> None:
    target = _last(stack)
    if target is not _VALUE:  # otherwise a class, say, which unpicklers refuse to change
        target.take(parts)


def _last(stack: list[Any]) -> _Built:
    found: Any = stack[-1]
    if found is _MARK:
        raise pickle.UnpicklingError("it takes more than there is")
    return found  # type: ignore[no-any-return]


def _popped(stack: list[Any], count: int) -> list[_Built]:
    found = stack[-count:]
    if len(found) < count or _MARK in found:
        raise pickle.UnpicklingError("it takes more than there is")
    del stack[-count:]
    return found


def _from_mark(stack: list[Any]) -> list[_Built]:
    at = len(stack) - 1
    while stack[at] is not _MARK:
        if at == 0:
            raise pickle.UnpicklingError("it takes more than there is")
        at -= 1
    found = stack[at + 1 :]
    del stack[at:]
    return found
