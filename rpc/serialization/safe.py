"""``deserialization="safe"``: reading messages of untrusted senders.

A pickle is a program for a small machine, and Python's own machine imports and calls whatever the program
names. So a worker in safe mode reads no pickles: its peers write to it in another codec (``neutral``), from
which it makes only what an ``AllowList`` admits:

- scalars, texts, bytes, lists, tuples, dicts, sets; dates and times; ``deque``, ``OrderedDict`` (with the
  metadata that ``Module.state_dict`` adds);
- tensors: strided and sparse ones of all types, parameters, meta tensors, sizes, dtypes, devices, layouts;
- functions passed to ``allow_function``, called or as arguments;
- instances of classes passed to ``allow_class``;
- objects that travel beside the message (remote references).

Names are looked up in a dict: nothing is imported, and no attribute is followed. Only admitted classes and
the rebuilding functions of this package are called while a message is read, never an allowed function.
Objects that existed before, such as a member of an admitted enumeration, keep their attributes.

*Failures* are rebuilt from their type, text and traceback alone: as builtin exceptions, farcall's own, or
those of admitted classes, called with the text; as a ``RemoteError`` if that is impossible.

*Methods* of objects that others refer to are called only if ``allow_methods`` names them for the object's
class or one that it derives from; if messages may make instances of that class, only the methods defined by
the class, since such an instance may have attributes that hide them. For tensors, methods are admitted that
return a copy, unless that would take more memory than the tensor does, or tell what kind of tensor it is. So
the result of an allowed function gives no more access to those that refer to it than its owner has granted.

It does not protect against: what allowed functions and classes do with hostile arguments (attributes of an
instance are set without its constructor being run; a tensor may have any shape and any values, even where the
function expects indices); the cost of printing or comparing what arrived; dictionary keys chosen to collide;
memory of some 200 times the size of a message; floods of messages.

NumPy arrays, quantized, nested and subclassed tensors, attributes of tensors, lambdas and TorchScript are
refused.
"""

from __future__ import annotations

import builtins
import collections
import datetime as dt
import math
from collections import ChainMap
from collections.abc import Callable
from typing import Any, Final, TypeGuard

import torch

from rpc import errors
from rpc.errors import SerializationError
from rpc.serialization import carriers, checked, tensor_kinds, tensors
from rpc.serialization.failures import type_name
from rpc.serialization.functions import name_of

_OF_TENSORS: Final = frozenset(
    {"clone", "item", "tolist", "size", "stride", "dim", "ndimension", "numel", "nelement", "element_size"}
    | {"storage_offset", "is_contiguous", "is_floating_point", "is_complex", "__len__"}
)
"""Methods of tensors that may be called: those that return a copy, or tell what kind of tensor it is."""

_COPIES: Final = frozenset({"clone", "tolist"})
_SMALL_BYTES: Final = 1 << 20
"""Maximum size in bytes of a copy that is larger than its tensor, such as an expanded one."""


class AllowList:
    """The names that are admitted in messages read in safe mode. Threads may share it. Everything that the
    list ``also`` admits, now or later, is admitted, too.
    """

    def __init__(self, also: AllowList | None = None) -> None:
        self._named: ChainMap[tuple[str, str], Any] = ChainMap({}, *(also._named.maps if also else ()))
        """Functions and classes by their names."""
        self._classes: ChainMap[Any, None] = ChainMap({}, *(also._classes.maps if also else ()))
        """Classes of which a message may make instances, and set their attributes."""
        self._methods: ChainMap[Any, frozenset[str]] = ChainMap(
            {}, *(also._methods.maps if also else ({torch.Tensor: _OF_TENSORS},))
        )
        """For each class, the methods that may be called through references."""

    def function(self, function: Callable[..., Any]) -> None:
        """Admit a function, or another callable, by its name; ``ValueError`` if it has none."""
        if isinstance(function, type):
            raise ValueError(f"{function!r} is a class: use cls(), which admits its instances too")
        self._named[_name(function)] = function

    def cls(self, kind: type) -> None:
        """Admit a class: its instances, and the class itself, called or as an argument; ``ValueError`` if it
        cannot be imported by name.
        """
        self._named[_name(kind)] = kind
        self._classes[kind] = None

    def methods(self, kind: type, *names: str) -> None:
        """Admit calls of these methods of a class, and of those derived from it, through references."""
        self._methods[kind] = self._methods.get(kind, frozenset()) | frozenset(names)

    def check_method(self, obj: object, name: str) -> None:
        """Raise ``SerializationError`` unless that method of an object may be called through a reference."""
        if not any(name in self._methods.get(kind, ()) for kind in type(obj).__mro__):
            raise SerializationError(
                f"the method '{name}' of objects of type '{type_name(type(obj))}' is not on this worker's "
                "allow-list (it deserializes in safe mode: see rpc.allow_methods)"
            )
        kind = type(obj)
        if kind in self._classes and (
            name in getattr(obj, "__dict__", ()) or not callable(getattr(kind, name, None))
        ):
            raise SerializationError(
                f"'{name}' of this object of type '{type_name(kind)}' is no method of its class: a message "
                "may have set it"
            )
        if name in _COPIES and (kind is torch.Tensor or kind is torch.nn.Parameter):
            _check_copy(obj, name)

    def exception(self, kind: str, text: str) -> Exception:
        """Make an exception from its description in a header; ``SerializationError`` if its type is not
        admitted.
        """
        found = _EXCEPTIONS.get(kind)
        if found is None:
            admitted = filter(_is_exception, self._classes)
            found = next((each for each in admitted if type_name(each) == kind), None)
        if found is None:
            raise SerializationError(f"'{kind}' is not on this worker's allow-list")
        return found(text)

    def find(self, module: str, name: str) -> Any:
        """Return the admitted object with a name; ``SerializationError`` if there is none."""
        key = (module, name)
        found = _CONSTRUCTORS.get(key) or self._named.get(key)
        if found is None:
            raise SerializationError(
                f"'{module}.{name}' is not on this worker's allow-list (it deserializes in safe mode: see "
                "rpc.allow_function and rpc.allow_class)"
            )
        return found

    def may_construct(self, function: Any) -> bool:
        """Whether a value may be made by this: an admitted class, or one of our rebuilding functions."""
        return function in _CALLABLE or function in self._classes

    def may_have_state(self, kind: type) -> bool:
        """Whether new instances of this class may get attributes."""
        return kind in self._classes

    def callee(self, module: Any, name: Any) -> Any:
        """Return the function of a call that has been read: by its name, or the object itself if the module
        is None; ``SerializationError`` if it is not admitted.
        """
        function = name if module is None else self.find(module, name)
        if not any(function is known for known in self._named.values()):
            name = getattr(function, "__qualname__", type(function).__name__)
            raise SerializationError(f"'{name}' is not a function on this worker's allow-list")
        return function


def _check_copy(tensor: Any, name: str) -> None:
    """Raise ``SerializationError`` if a copy would take more memory than the tensor does: a message of a few
    bytes can contain a tensor of any shape.
    """
    if tensor.layout is not torch.strided:
        tensor = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    lengths = (max(1, length) for length in tensor.shape)  # empty lists take memory, too
    size = tensor.itemsize * math.prod(lengths)
    if size > max(tensor.untyped_storage().nbytes(), _SMALL_BYTES):
        raise SerializationError(
            f"the method '{name}' of a tensor of shape {tuple(tensor.shape)}, whose elements lie on each "
            "other, is not called: its value would take more memory than the tensor does"
        )


def _name(obj: Any) -> tuple[str, str]:
    name = name_of(obj, None)
    if name is not None:
        return name
    # While a decorator runs, the module does not have the name yet.
    module, qualified = getattr(obj, "__module__", None), getattr(obj, "__qualname__", "<none>")
    if not isinstance(module, str) or "<" in qualified:
        raise ValueError(f"{obj!r} has no name under which another worker could ask for it")
    return module, qualified


def _is_exception(kind: object) -> TypeGuard[type[Exception]]:
    return isinstance(kind, type) and issubclass(kind, Exception)


def _ordered_dict() -> Any:
    return collections.OrderedDict()  # without arguments, so that keys are checked one by one


def _constructors() -> dict[tuple[str, str], Callable[..., Any]]:
    """Return the functions that may be called while a message is read, by the name that messages use."""
    named: dict[Callable[..., Any], Callable[..., Any]] = {
        tensor_kinds.sparse_coo: checked.sparse_coo,
        tensor_kinds.sparse_compressed: checked.sparse_compressed,
        tensor_kinds.on_meta: checked.on_meta,
        tensor_kinds.constant: checked.constant,
        collections.OrderedDict: _ordered_dict,
    }
    kinds: list[Any] = [tensors.conjugated, tensors.negated, tensor_kinds.parameter, carriers.arrived]
    kinds += [torch.Size, torch.device, complex, set, frozenset, collections.deque]
    kinds += [dt.date, dt.time, dt.datetime, dt.timedelta, dt.timezone]
    named |= {kind: kind for kind in kinds}
    return {(known.__module__, known.__qualname__): made for known, made in named.items()}


_CONSTRUCTORS: Final = _constructors()
_CALLABLE: Final = frozenset(_CONSTRUCTORS.values())
_EXCEPTIONS: Final[dict[str, type[Exception]]] = {
    type_name(kind): kind
    for kind in (*vars(builtins).values(), *(getattr(errors, name) for name in errors.__all__))
    if _is_exception(kind)
}
