"""A reader of pickles that does nothing but what is written here.

It knows the instructions of protocol 5 that the C pickler writes, no others (not those of older protocols,
nor the ones for registered extensions and persistent ids). Every name is looked up in the allow-list, what
is called and what gets attributes must be admitted there, and lengths are checked before memory is taken.

What is built may be nested as deep as the pickle says; Python copes with that, except while it hashes
tuples, which takes C stack for each level and looks at a tuple once for each reference to it. So every tuple
is weighed when it is made, and one is refused that would be too deep or too large to hash.
"""

from __future__ import annotations

import copyreg
import struct
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

from rpc.errors import SerializationError

_MAX_TUPLE_DEPTH: Final = 100
_MIN_TUPLE_WEIGHT: Final = 1 << 16
_HASHED_IN_DEPTH: Final = (tuple, frozenset)
_MARK: Final = object()

_u32: Final = struct.Struct("<I").unpack


class Admission(Protocol):
    """What is admitted: see ``AllowList``."""

    def find(self, module: str, name: str) -> Any: ...

    def may_construct(self, function: Any) -> bool: ...

    def may_have_state(self, kind: type) -> bool: ...


class Machine:
    """Reads one pickle, ``data``, and what left it, ``buffers``."""

    def __init__(self, allow: Admission, data: bytes, buffers: Iterable[Any]) -> None:
        self._allow = allow
        self._data = data
        self._at = 0
        self._buffers = iter(buffers)
        self._stack: list[Any] = []
        self._memo: list[Any] = []
        self._made: dict[int, Any] = {}
        """Instances made here, which may still be given a state: kept, so that ids are unique."""
        self._max_weight = max(_MIN_TUPLE_WEIGHT, 2 * len(data))
        """More parts than a tuple can have unless the same parts occur in it many times."""
        self._nested: dict[int, tuple[int, int, object]] = {}
        """Depth and weight of tuples that hold tuples, and the tuple itself."""

    def run(self) -> Any:
        """The object that the pickle describes; ``SerializationError`` if it is malformed, or names what is
        not admitted.
        """
        data, stack = self._data, self._stack
        try:
            while True:
                code = data[self._at]
                self._at += 1
                if code == _STOP:
                    (result,) = stack
                    return result
                instruction = _INSTRUCTIONS.get(code)
                if instruction is None:
                    raise SerializationError(f"a pickle has an instruction that is refused ({code:#x})")
                instruction(self)
        except SerializationError:
            raise
        except Exception as error:
            raise SerializationError(f"a pickle is malformed: {type(error).__name__}: {error}") from error

    def _take(self, size: int) -> bytes:
        start = self._at
        self._at = start + size
        if self._at > len(self._data):
            raise SerializationError("a pickle ends in the middle of an instruction")
        return self._data[start : self._at]

    def _byte(self) -> int:
        return self._take(1)[0]

    def _since_mark(self) -> list[Any]:
        stack = self._stack
        for position in range(len(stack) - 1, -1, -1):
            if stack[position] is _MARK:
                items = stack[position + 1 :]
                del stack[position:]
                return items
        raise SerializationError("a pickle refers to a mark that it has not made")

    def _protocol(self) -> None:
        if self._byte() != 5:
            raise SerializationError("a pickle is not of protocol 5")

    def _tuple(self, size: int) -> None:
        if len(self._stack) < size:
            raise SerializationError("a pickle takes more from its stack than there is")
        self._stack[-size:] = [self._weighed(tuple(self._stack[-size:]))]

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list and type(target) is not deque:
            raise SerializationError(f"a pickle appends to a {type(target).__name__}")
        target.extend(items)

    def _set_item(self) -> None:
        value = self._stack.pop()
        self._put([self._stack.pop(), value])

    def _put(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise SerializationError("a pickle sets items of something that is no dict")
        for position in range(0, len(items), 2):
            target[items[position]] = items[position + 1]

    def _add_items(self) -> None:
        items = self._since_mark()
        self._exactly(self._stack[-1], set).update(items)

    def _frozenset(self) -> None:
        items = self._since_mark()
        self._weighed(tuple(items))
        self._stack.append(self._weighed(frozenset(items)))

    def _readonly(self) -> None:
        buffer = self._stack[-1]
        if type(buffer) is not bytearray and type(buffer) is not memoryview:
            raise SerializationError(f"a pickle has a {type(buffer).__name__} where a buffer belongs")
        self._stack[-1] = bytes(buffer)

    def _global(self) -> None:
        name, module = self._pop(str), self._pop(str)
        self._stack.append(self._allow.find(module, name))

    def _reduce(self) -> None:
        arguments = self._pop(tuple)
        function = self._stack.pop()
        if not callable(function) or not self._allow.may_construct(function):
            raise SerializationError(f"a pickle calls {_called(function)}, which is not for pickles to call")
        made = function(*arguments)
        self._push_made(made, has_state=isinstance(made, BaseException))

    def _new(self, keywords: dict[str, Any]) -> None:
        arguments = self._pop(tuple)
        kind = self._stack.pop()
        if not isinstance(kind, type) or not self._allow.may_have_state(kind):
            raise SerializationError(f"a pickle makes an instance of {_called(kind)}, which is not admitted")
        self._push_made(kind.__new__(kind, *arguments, **keywords), has_state=True)

    def _push_made(self, made: Any, *, has_state: bool) -> None:
        if has_state:  # its attributes follow
            self._made[id(made)] = made
        self._stack.append(self._weighed(made) if isinstance(made, _HASHED_IN_DEPTH) else made)

    def _build(self) -> None:
        state = self._stack.pop()
        instance = self._stack[-1]
        if id(instance) not in self._made or not self._allow.may_have_state(type(instance)):
            raise SerializationError(f"a pickle sets attributes of a {type(instance).__name__}")
        if isinstance(instance, BaseException):
            for name, value in self._exactly(state, dict).items():
                if name.startswith("__") and name != "__notes__":
                    raise SerializationError(f"a pickle sets '{name}' of an exception")
                setattr(instance, name, value)
            return
        set_state = getattr(instance, "__setstate__", None)
        if set_state is not None:
            set_state(state)
            return
        slots: dict[str, Any] = {}
        if type(state) is tuple and len(state) == 2:
            state, slots = state
        for name, value in self._exactly(state or {}, dict).items():
            instance.__dict__[self._exactly(name, str)] = value
        known = copyreg._slotnames(type(instance)) if slots else ()  # type: ignore[attr-defined]  # what pickle uses
        for name, value in self._exactly(slots or {}, dict).items():
            if name not in known:
                raise SerializationError(f"a pickle sets '{name}' of a {type(instance).__name__}")
            setattr(instance, name, value)

    def _pop(self, kind: type) -> Any:
        return self._exactly(self._stack.pop(), kind)

    @staticmethod
    def _exactly(obj: Any, kind: type) -> Any:
        if type(obj) is not kind:
            raise SerializationError(f"a pickle has a {type(obj).__name__} where a {kind.__name__} belongs")
        return obj

    def _weighed(self, made: Any) -> Any:
        depth, weight = 1, 1
        for item in tuple.__iter__(made) if isinstance(made, tuple) else frozenset.__iter__(made):
            if isinstance(item, _HASHED_IN_DEPTH):
                inner_depth, inner_weight, _ = self._nested.get(id(item), (1, len(item), None))
                depth = max(depth, inner_depth + 1)
                weight += inner_weight
            if depth > _MAX_TUPLE_DEPTH or weight > self._max_weight:
                raise SerializationError("a pickle nests tuples too deeply, or in too many ways")
        if depth > 1:
            self._nested[id(made)] = depth, weight + len(made), made
        return made


def _called(obj: Any) -> str:
    """The name of something, in an error message. Never its ``repr``, which can take for ever."""
    return str(getattr(obj, "__qualname__", None) or f"a {type(obj).__name__}")


def _push(value: Callable[[], Any]) -> Callable[[Machine], None]:
    return lambda machine: machine._stack.append(value())


def _read(length_bytes: int, make: Callable[[bytes], Any]) -> Callable[[Machine], None]:
    """An instruction that is followed by a length and as many bytes."""

    def instruction(machine: Machine) -> None:
        length = int.from_bytes(machine._take(length_bytes), "little")
        machine._stack.append(make(machine._take(length)))

    return instruction


def _number(form: str) -> Callable[[Machine], None]:
    """An instruction that is followed by a number, in a format of ``struct``."""
    layout = struct.Struct(form)
    return lambda machine: machine._stack.extend(layout.unpack(machine._take(layout.size)))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _integer(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


_STOP: Final = ord(".")

_INSTRUCTIONS: Final[dict[int, Callable[[Machine], object]]] = {
    0x80: Machine._protocol,
    0x95: lambda machine: machine._take(8),  # a frame, which only helps reading files
    ord("N"): _push(lambda: None),
    0x88: _push(lambda: True),
    0x89: _push(lambda: False),
    ord("]"): _push(list),
    ord("}"): _push(dict),
    ord(")"): _push(tuple),
    0x8F: _push(set),
    ord("("): _push(lambda: _MARK),
    ord("J"): _number("<i"),
    ord("K"): _number("<B"),
    ord("M"): _number("<H"),
    ord("G"): _number(">d"),
    0x8A: _read(1, _integer),
    0x8B: _read(4, _integer),
    0x8C: _read(1, _text),
    ord("X"): _read(4, _text),
    0x8D: _read(8, _text),
    ord("C"): _read(1, bytes),
    ord("B"): _read(4, bytes),
    0x8E: _read(8, bytes),
    0x96: _read(8, bytearray),
    0x94: lambda machine: machine._memo.append(machine._stack[-1]),
    ord("h"): lambda machine: machine._stack.append(machine._memo[machine._byte()]),
    ord("j"): lambda machine: machine._stack.append(machine._memo[_u32(machine._take(4))[0]]),
    0x85: lambda machine: machine._tuple(1),
    0x86: lambda machine: machine._tuple(2),
    0x87: lambda machine: machine._tuple(3),
    ord("t"): lambda machine: machine._stack.append(machine._weighed(tuple(machine._since_mark()))),
    ord("a"): lambda machine: machine._extend([machine._stack.pop()]),
    ord("e"): lambda machine: machine._extend(machine._since_mark()),
    ord("s"): Machine._set_item,
    ord("u"): lambda machine: machine._put(machine._since_mark()),
    0x90: Machine._add_items,
    0x91: Machine._frozenset,
    ord("0"): lambda machine: machine._stack.pop(),
    ord("1"): Machine._since_mark,
    0x93: Machine._global,
    ord("R"): Machine._reduce,
    0x81: lambda machine: machine._new({}),
    0x92: lambda machine: machine._new(machine._pop(dict)),
    ord("b"): Machine._build,
    0x97: lambda machine: machine._stack.append(next(machine._buffers, None)),
    0x98: Machine._readonly,
}
