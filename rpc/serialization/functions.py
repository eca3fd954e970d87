"""Serialization of functions and classes: by name if the other side can import them, otherwise by value.

*By name*: the pickle contains module and qualified name, and the receiver imports them. This is used for
everything that its module has under its own name, except in ``__main__``.

*By value*: code, defaults, closure and the globals that it uses are pickled (cloudpickle does this), and the
receiver makes a new function or class of them. This is used for lambdas, for objects defined inside
functions, for objects that their module does not have under their name (the function under a decorator), and
for those in modules passed to ``cloudpickle.register_pickle_by_value``. Objects that they refer to go through
our pickler again, so that tensors and remote references in a closure travel as always.

Functions and classes of ``__main__`` are sent by name to a worker whose own ``__main__`` has one of that
name: the callee's own is meant, as for all other modules, even if the two run different scripts. Each worker
tells the others which script it runs and which names that defines (``main_identity``). Other names are sent
by value, and everything is sent by value to a notebook or an interactive session, where names change their
meaning; except from a process to itself. A child that ``multiprocessing`` spawned runs its parent's script
under the name ``__mp_main__``; it counts as ``__main__``, without the names that the script defines only ``if
__name__ == "__main__"``.

A function sent by value contains copies of the globals that it uses, each time. That is rarely intended if
they are large or change, so the log names such a function, once.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import io
import logging
import os
import symtable
import sys
import uuid
from collections.abc import Iterable
from importlib.util import decode_source
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final, Protocol

import cloudpickle
import torch

from rpc.errors import FunctionNotFoundError
from rpc.runtime.torch_internals import OpOverload, qualified_name
from rpc.serialization.payload import Destination

ScriptFunction = Any
"""A ``torch.jit.ScriptFunction``; PyTorch's stubs do not define the type."""

logger = logging.getLogger(__name__)

_modules = sys.modules

MAIN_NAMES: Final = frozenset(("__main__", "__mp_main__"))
"""The names of the script that a process runs."""


class ByValue(Protocol):
    """The interface of the pickler that reducers use."""

    to: Destination | None
    trial: bool

    @property
    def by_value(self) -> Any: ...

    def measure(self, obj: Any) -> int: ...


_identity: tuple[int, str] = (0, "")


def main_identity() -> str:
    """Return what this process runs as ``__main__``, and the names that it defines, as one text: ``script:``
    with the script's file name and a hash of its content; without a script, a text that no other process has.
    """
    global _identity
    process = os.getpid()
    if _identity[0] != process:
        known = _identity[1]
        _identity = process, known if known.startswith("script:") else _read_main_identity()
    return _identity[1]


def _read_main_identity() -> str:
    main = sys.modules.get("__main__")
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return f"process:{os.getpid()}:{uuid.uuid4().hex}"
    path: str = getattr(main, "__file__", None) or ""
    try:
        with open(path, "rb") as script:
            source = script.read()
    except OSError:  # `python -c`, standard input
        return f"process:{os.getpid()}:{uuid.uuid4().hex}\n{_separated(vars(main))}"
    names = vars(main) if getattr(main, "__name__", "") == "__mp_main__" else _defined_in(source, path)
    return f"script:{os.path.basename(path)}:{hashlib.sha256(source).hexdigest()[:32]}\n{_separated(names)}"


def _defined_in(source: bytes, path: str) -> Iterable[str]:
    """Return the names that a script assigns, including those that it has not reached yet."""
    try:
        table = symtable.symtable(decode_source(source), path, "exec")
    except (SyntaxError, ValueError):  # such as a zip file: use the names that are defined by now
        return vars(sys.modules["__main__"])
    return {each.get_name() for each in table.get_symbols() if each.is_assigned() or each.is_imported()}


def _separated(names: Iterable[str]) -> str:
    return " ".join(sorted(name for name in names if not name.startswith("__")))


@functools.lru_cache(maxsize=1024)
def _names_in(identity: str) -> frozenset[str]:
    return frozenset(identity.partition("\n")[2].split())


builtin_names: Final[dict[BuiltinFunctionType, tuple[str, str]]] = {}
"""Module and name of builtin functions that were found: their own names often differ."""


def name_of(obj: Any, to: Destination | None) -> tuple[str, str] | None:
    """Return the module and qualified name by which the other side finds ``obj``; None if it is sent by
    value.
    """
    if cloudpickle.list_registry_pickle_by_value():
        return None
    try:  # the usual case: its module has it under its own name
        if type(obj) is BuiltinFunctionType:
            module, name = builtin_names[obj]
        else:
            module, name = obj.__module__, obj.__qualname__
        if _modules[module].__dict__.get(name) is obj:
            if module not in MAIN_NAMES:
                return module, name
            if to is not None and to.main and to.main == _identity[1]:  # as both read when they joined
                return "__main__", name
    except Exception:  # an object may do anything when its name is read
        pass
    found = getattr(obj, "__module__", None)
    owner = getattr(obj, "__objclass__", None)  # of a method of a builtin class, such as torch.Tensor.add
    if found is None and owner is not None:
        found = owner.__module__
    if not isinstance(found, str):
        return None
    module = found
    for candidate in (getattr(obj, "__qualname__", None), getattr(obj, "__name__", None)):
        if not isinstance(candidate, str) or _find(module, candidate) is not obj:
            continue
        name = candidate
        if module in MAIN_NAMES:
            return ("__main__", name) if _has_main(to, name) else None
        if type(obj) is BuiltinFunctionType:
            builtin_names[obj] = module, name
        return module, name
    return None


def _has_main(to: Destination | None, name: str) -> bool:
    """Whether the other side's ``__main__`` has an object with this qualified name from ours."""
    if to is None or not to.main:
        return False
    return to.main == main_identity() or name.partition(".")[0] in _names_in(to.main)


def _find(module: str, name: str) -> Any:
    """Return what an imported module has under a qualified name; None if there is nothing."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        if found is None:
            return None
        found = getattr(found, part, None)
    return found


def resolve(module: str, name: str) -> Any:
    """Import the object with a name here, or raise ``FunctionNotFoundError``. Named in pickles."""
    try:
        return _modules[module].__dict__[name]
    except (KeyError, AttributeError):
        pass
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise not_found(module, name, f"there is no module named '{error.name}'") from error
    except AttributeError as error:
        raise not_found(module, name, str(error)) from error
    return found


def not_found(module: str, name: str, why: str) -> FunctionNotFoundError:
    """Return the error for an object that the sender can import and the receiver cannot."""
    hint = (
        "The script of that worker has not defined it: the definition is below the call of init_rpc, or "
        "under an `if` that is false there, such as `if rank == 0:` or "
        '`if __name__ == "__main__":`. Move it to the top level of the script, above init_rpc'
        if module == "__main__"
        else "The RPC pickler does not serialize the code of what can be imported: install the same module "
        "on both workers, or name it to cloudpickle.register_pickle_by_value() on the sender"
    )
    what = f"{module}.{name}" if name else module
    return FunctionNotFoundError(f"cannot find '{what}' on the receiving worker: {why}. {hint}")


def reduce_importable(obj: FunctionType | type, pickler: ByValue) -> Any:
    """Reduce a Python function or a class."""
    name = name_of(obj, pickler.to)
    if name is None:
        # For classes such as NoneType, which no module has, this is the builtin reduction too.
        reduced = pickler.by_value.reducer_override(obj)
        if type(obj) is FunctionType and reduced is not NotImplemented and not pickler.trial:
            _tell_of_copies(obj, reduced, pickler)
        return reduced
    if obj.__module__ == "__mp_main__":
        return resolve, name
    return NotImplemented  # pickle's default, which saves the name


_told: Final[set[CodeType]] = set()
"""Functions that the log has named, or for which there is nothing to report."""

_MAX_TOLD: Final = 4096
_LARGE: Final = 1 << 20


def _tell_of_copies(function: FunctionType, reduced: tuple[Any, ...], pickler: ByValue) -> None:
    """Log, once for each function, that it is sent by value with copies of globals, or of much data."""
    code = function.__code__
    if code in _told:
        return
    if len(_told) >= _MAX_TOLD:
        _told.clear()
    _told.add(code)
    of_globals = {
        name: value for name, value in reduced[2][1]["__globals__"].items() if _is_copied(value, pickler.to)
    }
    of_closure = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    size = pickler.measure((of_globals, [_content(cell) for cell in of_closure.values()]))
    if not of_globals and size < _LARGE:
        return
    shown = f"{size / 1e6:,.1f} MB" if size >= 100_000 else f"{size:,} bytes"
    logger.warning(
        "%s.%s (%s, line %d) is sent to worker '%s' "
        "by value, since that worker has no function of this name: "
        "each call carries copies of %s (%s), and changes only the copies. A function that both have at the "
        "top level of a module or script uses the worker's own globals.",
        function.__module__,
        function.__qualname__,
        os.path.basename(code.co_filename),
        code.co_firstlineno,
        pickler.to.name if pickler.to else "",
        ", ".join([*of_globals, *of_closure]),
        shown,
    )


def _is_copied(value: Any, to: Destination | None) -> bool:
    """Whether a global's value is copied: modules and code are not."""
    if isinstance(value, ModuleType | FunctionType | type | logging.Logger):
        return False
    return name_of(value, to) is None


def _content(cell: Any) -> Any:
    try:
        content = cell.cell_contents
    except ValueError:  # not assigned yet
        return None
    return None if isinstance(content, FunctionType | type) else content


def reduce_method(method: MethodType, _: ByValue) -> Any:
    """Reduce a bound method: by its name on the object, if the object has it under that name."""
    function = method.__func__
    name = getattr(function, "__name__", "")
    if getattr(method.__self__, name, None) == method:
        return getattr, (method.__self__, name)
    return MethodType, (function, method.__self__)


def reduce_operator(op: Any, _: ByValue) -> Any:
    """Reduce an operator of ``torch.ops``."""
    if isinstance(op, OpOverload):
        return operator, (op.overloadpacket._qualified_op_name, op._overloadname)
    return operator, (op._qualified_op_name, None)


def operator(qualified_name: str, overload: str | None) -> Any:
    """Return the operator of ``torch.ops`` with a name such as ``"aten::add"``."""
    namespace, _, name = qualified_name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name)
    return packet if overload is None else getattr(packet, overload)


def reduce_script_function(function: ScriptFunction, pickler: ByValue) -> Any:
    """Reduce a ``ScriptFunction``: by name if its module has it, otherwise its code, saved as TorchScript."""
    name = script_name_of(function, pickler.to)
    if name is not None:
        return resolve, name
    return load_script, (_saved(function),)


def script_name_of(function: ScriptFunction, to: Destination | None) -> tuple[str, str] | None:
    """Return ``name_of`` for a ``ScriptFunction``, whose module is only a part of another name."""
    qualified: str = qualified_name(function)
    module, _, name = qualified.removeprefix("__torch__.").rpartition(".")
    module = module or "__main__"
    for candidate in MAIN_NAMES if module == "__main__" else (module,):
        if _find(candidate, name) is function:
            return None if module == "__main__" and not _has_main(to, name) else (module, name)
    return None


def reduce_script_module(module: torch.jit.ScriptModule, _: ByValue) -> Any:
    """Reduce a ``ScriptModule``: code and parameters, saved as TorchScript."""
    return load_script, (_saved(module),)


def _saved(script: Any) -> bytes:
    stream = io.BytesIO()
    torch.jit.save(script, stream)
    return stream.getvalue()


def load_script(saved: bytes) -> torch.jit.ScriptModule:
    """Rebuild what was saved as TorchScript; a function becomes a module that is called in the same way."""
    loaded: torch.jit.ScriptModule = torch.jit.load(io.BytesIO(saved))  # type: ignore[no-untyped-call]  # untyped in torch
    return loaded
