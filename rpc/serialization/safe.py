"""``deserialization="safe"``: reading pickles of those one does not trust.

A pickle is a program for a small machine, and Python's own machine imports and calls whatever the program
names. In safe mode messages are read by ``machine.Machine`` instead, which knows only the instructions that
our pickler writes, and which admits only what an ``AllowList`` names:

- scalars, texts, bytes, lists, tuples, dicts, sets; dates and times; ``OrderedDict``, ``deque``;
- tensors: strided and sparse ones of all types, parameters, meta tensors, sizes, dtypes, devices, layouts;
- builtin exceptions and farcall's own, so that failures arrive as themselves;
- functions passed to ``allow_function``, as what is called or as an argument;
- instances of classes passed to ``allow_class``;
- what travels beside the pickle (remote references).

Names are looked up in a dict: nothing is imported, and no attribute is followed. Only admitted classes and
the rebuilding functions of this package are called while a pickle is read, never an allowed function.

What it does not protect from: what allowed functions and classes do with hostile arguments (attributes of
an instance are set without its constructor being run; a tensor may have any shape and any values, also
where the function expects indices); what it takes to print or compare what arrived; dictionary keys chosen
to collide; memory of some 200 times the size of a message; floods of messages.

NumPy arrays, quantized, nested and subclassed tensors, attributes of tensors, lambdas and TorchScript are
refused.
"""

from __future__ import annotations

import builtins
import collections
import datetime as dt
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from rpc import errors
from rpc.errors import SerializationError
from rpc.serialization import carriers, tensor_kinds, tensors
from rpc.serialization.functions import name_of
from rpc.serialization.memory import layout_of, settle
from rpc.serialization.payload import Arrivals, Connect
from rpc.serialization.restricted_unpickler import Machine

__all__ = ["AllowList", "allow_class", "allow_function", "allowed"]

_CONSTANTS: Final = (torch.dtype, torch.layout, torch.memory_format)


class AllowList:
    """What may occur in messages that are read in safe mode. Threads may share it.

    Example::

        allow = AllowList()
        allow.function(score)
        allow.cls(Request)
    """

    def __init__(self) -> None:
        self._functions: dict[tuple[str, str], Callable[..., Any]] = {}
        self._constructors: dict[tuple[str, str], Callable[..., Any]] = dict(_CONSTRUCTORS)
        self._callable: set[Any] = set(_CONSTRUCTORS.values())
        self._classes = {kind for kind in _CONSTRUCTORS.values() if _is_exception(kind)}

    def function(self, function: Callable[..., Any]) -> None:
        """Admit a function, or anything else that can be called by name.

        Raises:
            ValueError: it has no name under which it could be imported.
        """
        if isinstance(function, type):
            raise ValueError(f"{function!r} is a class: use cls(), which admits its instances too")
        self._functions[_name(function)] = function

    def cls(self, kind: type) -> None:
        """Admit a class: its instances, and the class itself as what is called or as an argument.

        Raises:
            ValueError: it has no name under which it could be imported.
        """
        name = _name(kind)
        self._constructors[name] = kind
        self._callable.add(kind)
        self._functions[name] = kind
        self._classes.add(kind)

    def find(self, module: str, name: str) -> Any:
        """What the list admits under a name.

        Raises:
            SerializationError: nothing.
        """
        key = (module, name)
        found = self._constructors.get(key) or self._functions.get(key)
        if found is None:
            raise SerializationError(
                f"'{module}.{name}' is not on this worker's allow-list (it deserializes in safe mode: see "
                "rpc.serialization.allow_function and allow_class)"
            )
        return found

    def may_construct(self, function: Any) -> bool:
        """Whether a pickle may call this: an admitted class, or one of our rebuilding functions."""
        return function in self._callable

    def may_have_state(self, kind: type) -> bool:
        """Whether a pickle may set attributes of new instances of this class."""
        return kind in self._classes

    def load(self, segments: Sequence[Any], arrivals: Arrivals | None, connect: Connect | None = None) -> Any:
        """Read an object.

        Raises:
            SerializationError: it holds what is not admitted, or it is malformed.
        """
        record = self.read(segments, arrivals)
        if len(record) == 1:
            return record[0]
        if connect is not None and len(record) == 4:
            return connect([_dense(*record[:3])])[0]
        return _dense(*record)

    def load_tensors(self, segments: Sequence[Any]) -> list[torch.Tensor | None]:
        """Read tensors and nothing else; raises as ``load`` does."""
        tensors = [_dense(*each) if type(each) is tuple else each for each in self.read(segments, None)]
        if not all(each is None or isinstance(each, torch.Tensor) for each in tensors):
            raise SerializationError("what should be tensors are none")
        return tensors

    def read(self, segments: Sequence[Any], arrivals: Arrivals | None) -> Any:
        """One pickle and its buffers, as a record: a tuple."""
        outer, carriers.receiving.arrivals = carriers.receiving.arrivals, arrivals
        try:
            record = Machine(self, bytes(segments[0]), [settle(segment) for segment in segments[1:]]).run()
        finally:
            carriers.receiving.arrivals = outer
        if type(record) is not tuple or not record:
            raise SerializationError("the message is not a record that this package writes")
        return record

    def load_call(
        self, segments: Sequence[Any], arrivals: Arrivals | None, connect: Connect | None = None
    ) -> tuple[Any, Any, Any]:
        """Read a call, whose function must be admitted; raises as ``load`` does."""
        from rpc.serialization.calls import fill_in

        record = self.read(segments, arrivals)
        if len(record) == 3:
            func, args, kwargs = record
        elif len(record) in (4, 5) and type(record[0]) is str and type(record[1]) is str:
            func, args, kwargs = self.find(record[0], record[1]), record[2], record[3]
        else:
            raise SerializationError("the call is of a kind that safe mode does not read")
        if not any(func is known for known in self._functions.values()):
            name = getattr(func, "__qualname__", type(func).__name__)
            raise SerializationError(f"'{name}' is not a function on this worker's allow-list")
        if type(args) not in (tuple, list) or type(kwargs) is not dict:
            raise SerializationError("the arguments of the call are malformed")
        if len(record) == 5:
            return fill_in(func, args, kwargs, record[4], connect, _dense)
        return func, tuple(args), kwargs


def _name(obj: Any) -> tuple[str, str]:
    name = name_of(obj, None)
    if name is not None:
        return name
    # While a decorator runs, the module does not have the name yet.
    module, qualified = getattr(obj, "__module__", None), getattr(obj, "__qualname__", "<none>")
    if not isinstance(module, str) or "<" in qualified:
        raise ValueError(f"{obj!r} has no name under which another worker could ask for it")
    return module, qualified


def _is_exception(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Exception)


def _constant(name: Any) -> Any:
    found = getattr(torch, name, None) if type(name) is str else None
    if not isinstance(found, _CONSTANTS):
        raise SerializationError(f"'torch.{name}' is no constant that can be sent")
    return found


def _item_size(dtype: Any) -> int:
    element = _constant(dtype)
    if not isinstance(element, torch.dtype) or "qu" in dtype or "qint" in dtype:
        raise SerializationError(f"'torch.{dtype}' is no type of elements that can be sent")
    return element.itemsize


def _check_shape(shape: Any, stride: Any) -> None:
    if type(shape) is not tuple or type(stride) is not tuple or len(shape) != len(stride):
        raise SerializationError("a tensor has a malformed shape")
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in (*shape, *stride)):
        raise SerializationError("a tensor has a malformed shape")


def _dense(code: Any, shape: Any, data: Any, requires_grad: Any = False) -> torch.Tensor:
    _check_shape(shape, shape)
    size = tensors.ITEM_SIZES.get(code)
    if size is None or math.prod(shape) * size != len(data):
        raise SerializationError("a tensor does not fit the memory that came with it")
    return tensors.dense(code, shape, data, bool(requires_grad))


def _placed(dtype: Any, shape: Any, stride: Any, data: Any, requires_grad: Any) -> torch.Tensor:
    _check_shape(shape, stride)
    if layout_of(shape, stride).span * _item_size(dtype) > len(data):
        raise SerializationError("a tensor reaches beyond the memory that came with it")
    return tensors.placed(dtype, shape, stride, data, bool(requires_grad))


def _spread(dtype: Any, shape: Any, stride: Any, data: Any, requires_grad: Any) -> torch.Tensor:
    _check_shape(shape, stride)
    layout = layout_of(shape, stride)
    size = _item_size(dtype)
    if layout.overlapping or layout.distinct * size != len(data):
        raise SerializationError("a tensor does not fit the memory that came with it")
    if layout.span * size > 2 * len(data) + tensors.SMALL_GAPS_BYTES:
        raise SerializationError("a tensor has larger gaps than any sender would ask for")
    return tensors.spread(dtype, shape, stride, data, bool(requires_grad))


def _on_meta(dtype: Any, shape: Any, stride: Any, requires_grad: Any) -> torch.Tensor:
    _check_shape(shape, stride)
    _item_size(dtype)
    return tensor_kinds.on_meta(dtype, shape, stride, bool(requires_grad))


def _ordered_dict() -> Any:
    return collections.OrderedDict()  # without arguments, so that keys are seen one by one


def _constructors() -> dict[tuple[str, str], Callable[..., Any]]:
    """What may be called while a pickle is read, by the name that pickles use."""
    checked: dict[Callable[..., Any], Callable[..., Any]] = {
        tensors.dense: _dense,
        tensors.placed: _placed,
        tensors.spread: _spread,
        tensors.conjugated: tensors.conjugated,
        tensors.negated: tensors.negated,
        tensor_kinds.parameter: tensor_kinds.parameter,
        tensor_kinds.sparse_coo: functools.partial(tensor_kinds.sparse_coo, check=True),
        tensor_kinds.sparse_compressed: functools.partial(tensor_kinds.sparse_compressed, check=True),
        tensor_kinds.on_meta: _on_meta,
        tensor_kinds.constant: _constant,
        carriers.arrived: carriers.arrived,
        collections.OrderedDict: _ordered_dict,
    }
    kinds: list[Any] = [torch.Size, torch.device, complex, collections.deque]
    kinds += [dt.date, dt.time, dt.datetime, dt.timedelta, dt.timezone]
    kinds += filter(_is_exception, vars(builtins).values())
    kinds += [getattr(errors, name) for name in errors.__all__]
    checked |= {kind: kind for kind in kinds}
    return {(known.__module__, known.__qualname__): made for known, made in checked.items()}


_CONSTRUCTORS: Final = _constructors()

allowed: Final = AllowList()
"""This process's allow-list."""


def allow_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Admit a function to this process's allow-list, so that it can be called in safe mode.

    Args:
        function: whatever can be called and has a name to import it by.

    Returns:
        The function, so that this is also a decorator.

    Raises:
        ValueError: it is a class, or has no such name.

    Example::

        @rpc.serialization.allow_function
        def score(batch: torch.Tensor) -> torch.Tensor: ...
    """
    allowed.function(function)
    return function


def allow_class(kind: type) -> type:
    """Admit a class to this process's allow-list: instances, and calls of it.

    Args:
        kind: the class. If it defines ``__setstate__``, that must stand hostile input.

    Returns:
        The class, so that this is also a decorator.

    Raises:
        ValueError: it has no name to import it by.
    """
    allowed.cls(kind)
    return kind
