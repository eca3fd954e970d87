"""How functions and classes travel: by name if the other side can import them, by value if not.

*By name*: the pickle holds module and qualified name, and the receiver imports them. So travels all that its
module holds under its own name, except in ``__main__``.

*By value*: code, defaults, closure and the globals that it uses are pickled (cloudpickle does this), and the
receiver makes a new function or class of them. So travel lambdas, what is defined inside functions, what its
module does not hold under its name (the function under a decorator), and what is in modules named to
``cloudpickle.register_pickle_by_value``. What they refer to goes through our pickler again, so that tensors
and remote references in a closure travel as always.

What ``__main__`` defines goes by name if the other side runs the same ``__main__``: a script of the same file
name and the same content (``main_identity``). Otherwise, and always in a notebook, an interactive session,
``python -c`` or on standard input, it goes by value, except from a process to itself. A child that
``multiprocessing`` spawned runs its parent's script under the name ``__mp_main__``; it counts as
``__main__``. (So what a script defines only ``if __name__ == "__main__"`` is not found in such a child.)
"""

from __future__ import annotations

import hashlib
import importlib
import io
import os
import sys
import uuid
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final, Protocol

import cloudpickle
import torch
from torch._jit_internal import _qualified_name
from torch._ops import OpOverload

from rpc.errors import FunctionNotFoundError
from rpc.serialization.payload import Destination

ScriptFunction = Any
"""A ``torch.jit.ScriptFunction``; the stubs do not know how to write it."""

_modules = sys.modules

MAIN_NAMES: Final = frozenset(("__main__", "__mp_main__"))
"""The names under which a process knows the script that it runs."""


class ByValue(Protocol):
    """What reducing needs of the pickler that runs."""

    to: Destination | None

    @property
    def by_value(self) -> Any: ...


_identity: tuple[int, str] = (0, "")


def main_identity() -> str:
    """What this process runs as ``__main__``: the script's file name and a hash of its content; without a
    script, a text that no other process has.
    """
    global _identity
    process = os.getpid()
    if _identity[0] != process:
        known = _identity[1]
        _identity = process, known if known.startswith("script:") else _read_main_identity()
    return _identity[1]


def _read_main_identity() -> str:
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if path and not hasattr(sys, "ps1") and not sys.flags.interactive:
        try:
            with open(path, "rb") as script:
                digest = hashlib.sha256(script.read()).hexdigest()[:32]
        except OSError:
            pass
        else:
            return f"script:{os.path.basename(path)}:{digest}"
    return f"process:{os.getpid()}:{uuid.uuid4().hex}"


builtin_names: Final[dict[BuiltinFunctionType, tuple[str, str]]] = {}
"""Where builtin functions have been found: their own names often say something else."""


def name_of(obj: Any, to: Destination | None) -> tuple[str, str] | None:
    """Module and qualified name under which the other side finds ``obj``; None if it must go by value."""
    if cloudpickle.list_registry_pickle_by_value():
        return None
    try:  # the usual case: its module holds it under its own name
        if type(obj) is BuiltinFunctionType:
            module, name = builtin_names[obj]
        else:
            module, name = obj.__module__, obj.__qualname__
        if _modules[module].__dict__.get(name) is obj and module not in MAIN_NAMES:
            return module, name
    except Exception:  # an object may do anything when it is asked for its name
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
            return ("__main__", name) if _shares_main(to) else None
        if type(obj) is BuiltinFunctionType:
            builtin_names[obj] = module, name
        return module, name
    return None


def _shares_main(to: Destination | None) -> bool:
    return to is not None and bool(to.main) and to.main == main_identity()


def _find(module: str, name: str) -> Any:
    """What an imported module holds under a qualified name; None if nothing."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        if found is None:
            return None
        found = getattr(found, part, None)
    return found


def resolve(module: str, name: str) -> Any:
    """Import what a name means here, or raise ``FunctionNotFoundError``. Named in pickles."""
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
        raise not_found(module, name, f"module '{module}' has no '{name}'") from error
    return found


def not_found(module: str, name: str, why: str) -> FunctionNotFoundError:
    """The error for something that the sender can import and the receiver cannot."""
    hint = (
        "The sender runs the same script, but this process does not have the name (is it defined only "
        'if __name__ == "__main__"?)'
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
        # For classes such as NoneType, which no module holds, this is the builtin reduction too.
        return pickler.by_value.reducer_override(obj)
    if obj.__module__ == "__mp_main__":
        return resolve, name
    return NotImplemented  # what pickle always does, which is to save the name


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
    """The operator of ``torch.ops`` with that name, ``"aten::add"``."""
    namespace, _, name = qualified_name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name)
    return packet if overload is None else getattr(packet, overload)


def reduce_script_function(function: ScriptFunction, pickler: ByValue) -> Any:
    """Reduce a ``ScriptFunction``: by name if its module holds it, else its code, saved as TorchScript."""
    name = script_name_of(function, pickler.to)
    if name is not None:
        return resolve, name
    return load_script, (_saved(function),)


def script_name_of(function: ScriptFunction, to: Destination | None) -> tuple[str, str] | None:
    """``name_of`` for a ``ScriptFunction``, which knows its module only as part of another name."""
    qualified: str = _qualified_name(function)
    module, _, name = qualified.removeprefix("__torch__.").rpartition(".")
    module = module or "__main__"
    for candidate in MAIN_NAMES if module == "__main__" else (module,):
        if _find(candidate, name) is function:
            return None if module == "__main__" and not _shares_main(to) else (module, name)
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
