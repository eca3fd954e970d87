"""Runs a Python program in this process, as ``python`` itself would, if asked with ``farcall.compat``.

The program becomes ``__main__`` and stays it: its functions pickle as ``__main__.name``, and threads that are
left when it ends, and exit handlers, still find its names. (``runpy`` would take the module away.) Child
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

from farcall import compat
from farcall_guard import namesakes

__all__ = ["run_module", "run_script"]

OnError = Callable[[Exception], object]
"""Gets what the program has raised."""


def run_script(
    path: str, arguments: Sequence[str], *, lend_names: bool = True, on_error: OnError | None = None
) -> int:
    """Run a file, or a folder or zip file that has a ``__main__.py``: ``python PATH ARGUMENTS``.

    Args:
        path: of the program.
        arguments: what it finds in ``sys.argv`` after its path.
        lend_names: install ``farcall.compat`` before it runs.
        on_error: gets what it raises, before that is printed.

    Returns:
        The exit status: 0, or 1 after an error, which has been printed.

    Raises:
        SystemExit: the program's own, or 2 because there is no such program.
    """
    if not os.path.exists(path):
        _give_up(f"can't open file {os.path.abspath(path)!r}: no such file")
    if os.path.isdir(path) or zipfile.is_zipfile(path):
        _prepare(path, path, lend_names)
        spec = PathFinder.find_spec("__main__", [path])
        if spec is None:
            _give_up(f"can't find '__main__' module in {path!r}")
        return _run_spec(spec, [path, *arguments], on_error)
    _prepare(os.path.dirname(os.path.realpath(path)), path, lend_names)
    loader = SourceFileLoader("__main__", path)
    main = _new_main(path, None, loader)
    return _run(
        lambda: loader.source_to_code(loader.get_data(path), path), main, [path, *arguments], on_error
    )


def run_module(
    name: str, arguments: Sequence[str], *, lend_names: bool = True, on_error: OnError | None = None
) -> int:
    """Run a module, or a package's ``__main__``: ``python -m NAME ARGUMENTS``.

    Args:
        name: as it would be imported.
        arguments: what it finds in ``sys.argv`` after its path.
        lend_names, on_error: as for ``run_script``.

    Returns:
        The exit status: 0, or 1 after an error, which has been printed.

    Raises:
        SystemExit: the program's own, or 2 because there is no such program.
    """
    _prepare(os.getcwd(), name, lend_names)
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


def _prepare(folder: str, program: str, lend_names: bool) -> None:
    """What must be done before the first line of a program's code, also that of its packages, is run."""
    if lend_names:
        compat.install()
        _install_in_children()
    if not sys.flags.safe_path:
        sys.path[0] = folder  # as Python does, which had put the folder of this command there
    for name, path in namesakes(folder).items():
        if path != Path(program).resolve():
            print(
                f"farcall: warning: {path} has the name of one of farcall's packages: `import {name}` in "
                "this program gets farcall's. If the program means its own, rename it.",
                file=sys.stderr,
            )


def _run_spec(spec: ModuleSpec, argv: list[str], on_error: OnError | None) -> int:
    loader: Any = spec.loader
    if not hasattr(loader, "get_code"):
        _give_up(f"no code object available for {spec.name}")
    main = _new_main(spec.origin or argv[0], spec, loader)
    return _run(lambda: loader.get_code(spec.name), main, argv, on_error)


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
    get_code: Callable[[], CodeType], main: ModuleType, argv: list[str], on_error: OnError | None
) -> int:
    sys.argv[:] = argv
    sys.modules["__main__"] = main
    try:
        exec(get_code(), main.__dict__)
    except Exception as error:
        error.__traceback__ = _without_ours(error.__traceback__)
        if on_error is not None:
            on_error(error)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)  # as the interpreter does
        return 1
    return 0


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """A traceback from the program's first line on; none, if it does not compile."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((__file__, "<frozen importlib")):
        trace = trace.tb_next
    return trace


def _give_up(message: str) -> NoReturn:
    print(f"farcall: {message}", file=sys.stderr)
    raise SystemExit(2)


class _InstallOnArrival:
    """Unpickles as a call of ``compat.install``."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return compat.install, ()


_get_preparation_data: Final = spawn.get_preparation_data


def _install_in_children() -> None:
    """Make what ``multiprocessing`` sends to a new child, and the child unpickles first, install compat."""

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {"farcall_compat": _InstallOnArrival(), **_get_preparation_data(name)}

    spawn.get_preparation_data = get_preparation_data
