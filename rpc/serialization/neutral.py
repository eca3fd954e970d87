"""Serialization of values without pickle: msgpack, which any language can read, and extensions.

Null, booleans, integers of 64 bits, floats, texts, bytes, lists and maps are msgpack's own. Each extension
contains msgpack again, in these types:

====== ============================================================================================
number content
====== ============================================================================================
0      *tuple*: a list
1      *tensor*: ``[dtype, shape, stride, data, requires_grad]``; strides are in elements; ``data`` is the
       elements' memory, little-endian: bytes, or a buffer
2      *buffer*: the number of a buffer of the message, from 1 on
3      *integer* of any size: bytes, big-endian, in two's complement
4      *name* of an object that both sides have: ``[module, qualified name]``
5      *object*: ``[made by, arguments, state, items, pairs, set by]``, as Python's ``__reduce__`` returns;
       without a function that makes it, the first argument is its class
6      *again*: the number of a tensor or an object that occurred before, from 0 on; never that of a tuple or
       a frozen set, which is written again: hashing or comparing such values that share parts could take
       exponential time
====== ============================================================================================

A reader admits the names of an allow-list (``safe``), or whatever can be imported. It makes only objects that
are written there, imports nothing for an allow-list, and checks sizes before it makes anything. A list or map
that contains itself cannot be written, one that occurs twice arrives as two, as does a tuple or a frozen set;
a ``bytearray`` arrives as ``bytes``. An allow-list's reader gives items and attributes only to objects
without other references.
"""

from __future__ import annotations

import copyreg
import pickle
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final

import msgpack
import torch

from rpc.errors import RpcError, SerializationError, with_article
from rpc.runtime.interrupts import interruptible, is_interruption, protected
from rpc.serialization import checked
from rpc.serialization.codecs import NEUTRAL
from rpc.serialization.functions import resolve
from rpc.serialization.memory import INLINE_BYTES
from rpc.serialization.payload import TRACKED, Buffer, Destination, Payload, Tracked
from rpc.serialization.pickler import Departing, Reducers
from rpc.serialization.safe import AllowList
from rpc.serialization.tensors import dense, elements, placed
from rpc.serialization.tracked import separate, tell_of_copies
from rpc.wire.headers import check_entries

__all__ = ["dump", "read"]

_TUPLE, _TENSOR, _BUFFER, _INTEGER, _NAME, _OBJECT, _AGAIN = range(7)

_MAX_DEPTH: Final = 100
"""Maximum depth of nested extensions: each takes C stack."""

_SHALLOW: Final = 4
_CONTAINERS: Final = frozenset((list, dict))

_NAMED: Final = (type, FunctionType, BuiltinFunctionType)
_REPEATED: Final = (tuple, frozenset)
_FILLED: Final = (set, frozenset, deque, torch.Size)
"""Types that can have any elements."""

_INDICES: Final = {checked.sparse_coo: 1, checked.sparse_compressed: 2}
"""The number of arguments that are indices, which are checked."""


class Writer(Departing):
    """Writes one value.

    Args:
        reducers: define how types travel.
        to: the destination.

    Attributes:
        buffers: memory that is not part of the written bytes; their numbers count from 1.
    """

    def __init__(self, reducers: Reducers, to: Destination | None) -> None:
        self.reducers = reducers
        self.to = to
        self.buffers: list[Buffer] = []
        self._known: dict[int, tuple[int | None, object]] = {}
        """Each object met, by identity, which keeps it alive: its number, None while it is being written."""
        self._numbered = 0
        self._depth = 0

    def write(self, value: Any) -> bytes:
        """Serialize a value."""
        self._depth += 1
        if self._depth > _MAX_DEPTH or (self._depth > _SHALLOW and _nesting(value) > _deepest(self._depth)):
            raise RecursionError
        try:
            packed: bytes = msgpack.packb(
                value, default=self._extension, strict_types=True, unicode_errors="surrogatepass"
            )
        except ValueError as error:
            if "recursion" in str(error):
                raise RecursionError from None
            raise
        self._depth -= 1
        return packed

    def _extension(self, value: Any) -> Any:
        """Return the extension for a value that msgpack does not know."""
        kind = type(value)
        if kind is tuple:
            return msgpack.ExtType(_TUPLE, self.write(list(value)))
        if kind is int:
            return msgpack.ExtType(_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
        if kind is pickle.PickleBuffer:
            return self._memory(value.raw())
        known = self._known.get(id(value))
        if known is not None:
            if known[0] is None:
                raise SerializationError(f"{with_article(kind)} that holds itself can go in a pickle only")
            return msgpack.ExtType(_AGAIN, self.write(known[0]))
        reducer = self.reducers[kind]
        reduced = NotImplemented if reducer is None else reducer(value, self)
        if reduced is NotImplemented:
            reduced = value.__qualname__ if isinstance(value, _NAMED) else _reduce(value)
        if type(reduced) is str:
            module = pickle.whichmodule(value, reduced)  # type: ignore[attr-defined]  # what pickle uses
            return msgpack.ExtType(_NAME, self.write([module, reduced]))
        self._known[id(value)] = None, value
        extension = self._reduced(*reduced)
        if isinstance(value, _REPEATED):
            del self._known[id(value)]
        else:
            self._known[id(value)] = self._numbered, value
        self._numbered += 1
        return extension

    def _reduced(
        self,
        made_by: Any,
        arguments: tuple[Any, ...],
        state: Any = None,
        items: Iterable[Any] | None = None,
        pairs: Iterable[Any] | None = None,
        set_by: Any = None,
    ) -> msgpack.ExtType:
        if made_by in (dense, placed) and set_by is None:
            return msgpack.ExtType(_TENSOR, self.write(elements(made_by, arguments)))
        if made_by is copyreg.__newobj__:  # type: ignore[attr-defined]  # what pickle uses
            made_by = None
        listed = [None if parts is None else list(parts) for parts in (items, pairs)]
        return msgpack.ExtType(_OBJECT, self.write([made_by, list(arguments), state, *listed, set_by]))

    def _memory(self, memory: memoryview) -> Any:
        if memory.readonly and memory.nbytes <= INLINE_BYTES:
            return bytes(memory)  # what the reader makes of it is read-only, too
        self.buffers.append(memory)
        return msgpack.ExtType(_BUFFER, self.write(len(self.buffers)))


def _deepest(depth: int) -> int:
    """Return the maximum nesting of lists and maps inside extensions of a depth: for the outer ones, all that
    msgpack accepts, so that it need not be checked. They take C stack, too.
    """
    return 1024 if depth <= _SHALLOW else 50


def _nesting(value: Any) -> int:
    """Return the nesting depth of lists and maps, up to ``_MAX_DEPTH``; some contain themselves."""
    level, deep = [value] if type(value) in _CONTAINERS else [], 0
    while level and deep < _MAX_DEPTH:
        contents = [outer.values() if type(outer) is dict else outer for outer in level]
        level = [inner for each in contents for inner in each if type(inner) in _CONTAINERS]
        deep += 1
    return deep


def _reduce(value: Any) -> Any:
    reduce = copyreg.dispatch_table.get(type(value))
    return value.__reduce_ex__(pickle.HIGHEST_PROTOCOL) if reduce is None else reduce(value)


@protected  # departed objects are either taken back or returned
def dump(
    record: Any, to: Destination | None, reducers: Reducers, *, trial: bool = False, tracked: Tracked = None
) -> Payload:
    """Write a value; if that raises, objects that have departed by then are taken back.

    Args:
        record: the value.
        to: the destination.
        reducers: define how types travel.
        trial: only find out whether it can be written.
        tracked: collects the tensors that require grad, which are written separately: see ``tracked``.
    """
    writer = Writer(reducers, to)
    writer.trial, writer.tracked, writer.owned = trial, tracked, {}
    header: dict[str, Any] = {}
    try:
        buffers = [_write(writer, record), *writer.buffers]
        if writer.carried:
            header = {kind: descriptors for kind, (_, descriptors) in writer.carried.items()}
        if tracked is not None:
            tell_of_copies(writer.owned)
        if tracked:
            header[TRACKED] = len(buffers)
            apart = Writer(reducers, to)
            buffers += [_write(apart, separate(tracked, writer.owned)), *apart.buffers]
    except BaseException:
        for carrier, descriptors in (writer.carried or {}).values():
            carrier.take_back(descriptors, to)
        raise
    return Payload(header, buffers, NEUTRAL)


@interruptible
def _write(writer: Writer, value: Any) -> bytes:
    return writer.write(value)


class Reader:
    """Reads one value.

    Args:
        allow: the allow-list; None admits whatever can be imported.
        buffers: buffers of the value, the first of which has number 1.
        size: size in bytes of the value without its buffers.
    """

    def __init__(self, allow: AllowList | None, buffers: Iterable[Any], size: int) -> None:
        self._allow = allow
        self._buffers = list(buffers)
        self._unchecked = size + sum(memoryview(buffer).nbytes for buffer in self._buffers)
        """Number of bytes that have not been checked as indices."""
        self._known: list[Any] = []
        self._depth = 0

    def read(self, packed: Any) -> Any:
        """Deserialize a value."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise SerializationError(f"extensions are nested more than {_MAX_DEPTH} deep")
        check_entries(memoryview(packed), "a value", sys.maxsize, _deepest(self._depth))
        value = msgpack.unpackb(
            packed, ext_hook=self._extension, strict_map_key=False, unicode_errors="surrogatepass"
        )
        self._depth -= 1
        return value

    def _extension(self, number: int, content: bytes) -> Any:
        extension = _EXTENSIONS.get(number)
        if extension is None:
            raise SerializationError(f"there is no extension {number}")
        return extension(self, content)

    def _tuple(self, content: bytes) -> tuple[Any, ...]:
        return tuple(_exactly(self.read(content), list))

    def _tensor(self, content: bytes) -> Any:
        dtype, shape, stride, data, requires_grad = self.read(content)
        if not isinstance(data, bytes | bytearray | memoryview):
            raise SerializationError(f"{with_article(type(data))} in the place of a tensor's memory")
        tensor = checked.placed(dtype, tuple(shape), tuple(stride), data, requires_grad)
        self._known.append(tensor)
        return tensor

    def _buffer(self, content: bytes) -> Any:
        place = _exactly(self.read(content), int) - 1
        if not 0 <= place < len(self._buffers) or self._buffers[place] is None:
            raise SerializationError(f"there is no buffer {place + 1}, or it is used twice")
        buffer, self._buffers[place] = self._buffers[place], None
        return buffer

    def _name(self, content: bytes) -> Any:
        module, name = (_exactly(part, str) for part in self.read(content))
        return resolve(module, name) if self._allow is None else self._allow.find(module, name)

    def _again(self, content: bytes) -> Any:
        number = _exactly(self.read(content), int)
        if not 0 <= number < len(self._known):
            raise SerializationError(f"object {number} has not come before")
        known = self._known[number]
        if isinstance(known, _REPEATED):
            raise SerializationError(f"object {number} is {with_article(type(known))}, and comes once")
        return known

    def _object(self, content: bytes) -> Any:
        made_by, arguments, state, items, pairs, set_by = self.read(content)
        made, is_shared = self._make(made_by, _exactly(arguments, list))
        if is_shared and not (items is pairs is state is None):
            raise SerializationError(f"items or attributes of {with_article(type(made))} that others have")
        if items is not None:
            self._extend(made, _exactly(items, list))
        if pairs is not None:
            self._put(made, _exactly(pairs, list))
        if set_by is not None:
            self._check_construct(set_by)
            set_by(made, state)
        elif state is not None:
            self._set_state(made, state, is_new=made_by is None)
        self._known.append(made)
        return made

    def _make(self, made_by: Any, arguments: list[Any]) -> tuple[Any, bool]:
        """Return the object, and whether an allow-list's reader finds that it existed before: a member of an
        enumeration, or the only instance of a class.
        """
        if made_by is not None:
            self._check_construct(made_by)
            if self._allow is not None:
                self._check_arguments(made_by, arguments)
        else:
            kind = arguments[0]
            if not isinstance(kind, type) or not (self._allow is None or self._allow.may_have_state(kind)):
                raise SerializationError(f"{_called(kind)} is not admitted: no instance of it is made")
            made_by = kind.__new__
        made, references = _count(made_by, arguments)
        return made, self._allow is not None and references > _count(object, [])[1]

    def _check_arguments(self, made_by: Any, arguments: list[Any]) -> None:
        """Limit the checks of elements: a tensor can have very many, and can be named again and again."""
        if made_by in _FILLED and arguments and type(arguments[0]) not in (list, tuple):
            raise SerializationError(f"elements of {with_article(type(arguments[0]))}")
        for indices in arguments[: _INDICES.get(made_by, 0)]:
            if type(indices) is not torch.Tensor or indices.nbytes > self._unchecked:
                raise SerializationError("sparse indices are no tensor with memory for each, and their own")
            self._unchecked -= indices.nbytes

    def _check_construct(self, function: Any) -> None:
        if not callable(function) or not (self._allow is None or self._allow.may_construct(function)):
            raise SerializationError(f"{_called(function)} is not for messages to call")

    def _extend(self, made: Any, items: list[Any]) -> None:
        if self._allow is not None and type(made) is not deque and type(made) is not list:
            raise SerializationError(f"items of {with_article(type(made))}")
        made.extend(items)

    def _put(self, made: Any, pairs: list[Any]) -> None:
        if self._allow is not None and not isinstance(made, dict):
            raise SerializationError(f"items of {with_article(type(made))}, which is no dict")
        for key, value in pairs:
            made[key] = value

    def _set_state(self, made: Any, state: Any, *, is_new: bool) -> None:
        is_module_state = type(made) is OrderedDict and type(state) is dict and state.keys() == {"_metadata"}
        is_admitted = self._allow is None or (is_new and self._allow.may_have_state(type(made)))
        if not is_admitted and not is_module_state:
            raise SerializationError(f"attributes of {with_article(type(made))}")
        set_state = getattr(made, "__setstate__", None)
        if set_state is not None:
            set_state(state)
            return
        slots: dict[str, Any] = {}
        if type(state) is tuple and len(state) == 2:
            state, slots = state
        for name, value in _exactly(state or {}, dict).items():
            made.__dict__[_exactly(name, str)] = value
        known = copyreg._slotnames(type(made)) if slots else ()  # type: ignore[attr-defined]  # what pickle uses
        for name, value in _exactly(slots or {}, dict).items():
            if name not in known:
                raise SerializationError(f"attribute '{name}' of {with_article(type(made))}")
            setattr(made, name, value)


_EXTENSIONS: Final[dict[int, Callable[[Reader, bytes], Any]]] = {
    _TUPLE: Reader._tuple,
    _TENSOR: Reader._tensor,
    _BUFFER: Reader._buffer,
    _INTEGER: lambda _, content: int.from_bytes(content, "big", signed=True),
    _NAME: Reader._name,
    _OBJECT: Reader._object,
    _AGAIN: Reader._again,
}


def read(allow: AllowList | None, data: Any, /, *, buffers: Iterable[Any] = ()) -> Any:
    """Read a value that ``dump`` has written; ``SerializationError`` if it is malformed, or contains
    something that is not admitted.
    """
    try:
        return Reader(allow, buffers, memoryview(data).nbytes).read(data)
    except RpcError as error:
        if isinstance(error, SerializationError) or is_interruption(error):
            raise
        raise SerializationError(str(error)) from None
    except Exception as error:
        if is_interruption(error) or (allow is None and not isinstance(error, ValueError | TypeError)):
            raise  # of a signal handler, or of a user's class
        raise SerializationError(f"a value is malformed: {type(error).__name__}: {error}") from error


def _count(make: Callable[..., Any], arguments: list[Any]) -> tuple[Any, int]:
    """Make the object, and return the number of references to it beyond those to a new object."""
    made = make(*arguments)
    return made, sys.getrefcount(made)


def _exactly(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise SerializationError(f"{with_article(type(value))} where {with_article(kind)} belongs")
    return value


def _called(value: Any) -> str:
    """Return the name of an object for error messages. Never its ``repr``, which can take very long."""
    return str(getattr(value, "__qualname__", None) or with_article(type(value)))
