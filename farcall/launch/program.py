"""Runs a Python program in this process, like ``python`` itself, on request with ``farcall.compat``.

The program becomes ``__main__`` and remains it: its functions pickle as ``__main__.name``, and threads that
are left when it ends, and exit handlers, still find its names. (``runpy`` would remove the module.) Child
processes that it starts with ``multiprocessing``'s spawn or forkserver get ``farcall.compat`` as well.
"""

from __future__ import annotations

import builtins
import os
import sys
import zipfile
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from multiprocessing import spawn
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, Final, NoReturn

import farcall_guard

farcall_guard.prefer()

from farcall import compat
from farcall.compat import lending
from farcall.compat.own_source import imports_at_the_top
from rpc.runtime.preemption import end_at_sigterm
from rpc.runtime.tracebacks import fold_uncaught, folded, show_as

__all__ = ["run_module", "run_script"]

OnError = Callable[[Exception], str | None]
"""Receives the exception that the program has raised; returns a line to print in place of its traceback, or
None.
"""


def run_script(
    path: str,
    arguments: Sequence[str],
    *,
    lend_names: bool = True,
    xla: bool = False,
    on_error: OnError | None = None,
) -> int:
    """Run a file, or a folder or zip file that has a ``__main__.py``: ``python PATH ARGUMENTS``.

    Args:
        path: path of the program.
        arguments: content of ``sys.argv`` after its path.
        lend_names: whether to install ``farcall.compat`` before it runs.
        xla: whether to lend ``torch_xla`` from the beginning, as if the program imported it at its top.
        on_error: receives the exception that it raises, before that is printed.

    Returns:
        The exit status: 0, or 1 after an error, which has been printed.

    Raises:
        SystemExit: raised by the program, or 2 because there is no such program.
    """
    if not os.path.exists(path):
        _give_up(f"can't open file {os.path.abspath(path)!r}: no such file")
    if os.path.isdir(path) or zipfile.is_zipfile(path):
        _prepare(path, path, lend_names, xla)
        spec = PathFinder.find_spec("__main__", [path])
        if spec is None:
            _give_up(f"can't find '__main__' module in {path!r}")
        return _run_spec(spec, [path, *arguments], on_error)
    _prepare(os.path.dirname(os.path.realpath(path)), path, lend_names, xla)
    loader = SourceFileLoader("__main__", path)
    main = _new_main(path, None, loader)
    source = loader.get_data(path)
    return _run(lambda: loader.source_to_code(source, path), source, main, [path, *arguments], on_error)


def run_module(
    name: str,
    arguments: Sequence[str],
    *,
    lend_names: bool = True,
    xla: bool = False,
    on_error: OnError | None = None,
) -> int:
    """Run a module, or a package's ``__main__``: ``python -m NAME ARGUMENTS``.

    Args:
        name: name of the module, as it would be imported.
        arguments: content of ``sys.argv`` after its path.
        lend_names, xla, on_error: as for ``run_script``.

    Returns:
        The exit status: 0, or 1 after an error, which has been printed.

    Raises:
        SystemExit: raised by the program, or 2 because there is no such program.
    """
    _prepare(os.getcwd(), name, lend_names, xla)
    sys.argv[:] = ["-m", *arguments]  # what packages see that are imported on the way
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = find_spec(name)
    except ModuleNotFoundError as error:
        _give_up(f"cannot find module {name!r}: {error}")
    if spec is None:
        _give_up(f"no module named {name}")
    return _run_spec(spec, [spec.origin or name, *arguments], on_error)


def _prepare(folder: str, program: str, lend_names: bool, xla: bool) -> None:
    """Prepare this process before the first line of a program's code, or of its packages, is run."""
    end_at_sigterm()
    fold_uncaught()  # before PyTorch puts a hook of its own around the one that is there
    if lend_names:
        compat.install(xla)
        _install_in_children()
    if not sys.flags.safe_path:
        sys.path[0] = folder  # as Python does, which had put the folder of this command there
    hidden = farcall_guard.namesakes()
    hidden = {name: path for name, path in hidden.items() if path != Path(program).resolve()}
    if hidden:
        print(f"farcall: warning: {farcall_guard.explain(hidden)}", file=sys.stderr)


def _run_spec(spec: ModuleSpec, argv: list[str], on_error: OnError | None) -> int:
    loader: Any = spec.loader
    if not hasattr(loader, "get_code"):
        _give_up(f"no code object available for {spec.name}")
    main = _new_main(spec.origin or argv[0], spec, loader)
    text = loader.get_source(spec.name) if hasattr(loader, "get_source") else None
    return _run(lambda: loader.get_code(spec.name), (text or "").encode(), main, argv, on_error)


def _new_main(path: str, spec: ModuleSpec | None, loader: Any) -> ModuleType:
    main = ModuleType("__main__")
    main.__dict__.update(
        __file__=path,
        __cached__=spec.cached if spec else None,
        __loader__=loader,
        __package__=spec.parent if spec else None,
        __spec__=spec,
        __builtins__=builtins,
        __annotations__={},
    )
    return main


def _run(
    get_code: Callable[[], CodeType],
    source: bytes,
    main: ModuleType,
    argv: list[str],
    on_error: OnError | None,
) -> int:
    if compat.is_installed() and imports_at_the_top(source, "torch_xla"):
        compat.install(xla=True)  # also for libraries that the program imports before
    sys.argv[:] = argv
    sys.modules["__main__"] = main
    try:
        exec(get_code(), main.__dict__)
    except Exception as error:
        error.__traceback__ = _without_ours(error.__traceback__)
        line = None if on_error is None else on_error(error)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        show_as(error, line or folded(error))  # in one piece: other workers write to the same terminal
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the program's first line on; none, if it does not compile."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((__file__, "<frozen importlib")):
        trace = trace.tb_next
    return trace


def _give_up(message: str) -> NoReturn:
    print(f"farcall: {message}", file=sys.stderr)
    raise SystemExit(2)


class _InstallOnArrival:
    """Unpickles as a call of ``compat.install``."""

    def __reduce__(self) -> tuple[Any, tuple[bool]]:
        return _install, (lending.is_lent(),)


def _install(xla: bool) -> None:
    """Install in a child what its parent has. A function of this module, since its import does not warn of
    modules that our packages hide: the parent has done so.
    """
    compat.install(xla)


_get_preparation_data: Final = spawn.get_preparation_data


def _install_in_children() -> None:
    """Make ``multiprocessing`` send an object to new children that installs compat when they unpickle it,
    first.
    """

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {"farcall_compat": _InstallOnArrival(), **_get_preparation_data(name)}

    spawn.get_preparation_data = get_preparation_data
