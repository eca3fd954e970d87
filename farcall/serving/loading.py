"""Loads what ``farcall serve`` serves: ``module.py:make_model``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from torch import nn

from farcall.serving.endpoint import Endpoint
from farcall.serving.errors import beyond_the_server

__all__ = ["load"]

_MAKE_NOTHING: Final = (
    inspect.iscoroutinefunction,
    inspect.isgeneratorfunction,
    inspect.isasyncgenfunction,
)


def load(target: str) -> dict[str, Endpoint]:
    """Load what a command line names.

    Args:
        target: ``FILE.py:NAME`` or ``MODULE:NAME``. The object with that name is served: a module of
            PyTorch's, an ``Endpoint``, or a dict of these and functions by name. A function or class is
            called, without arguments, and its result is served.

    Returns:
        The endpoints, by name; ``make_model`` is served as ``model``.

    Raises:
        ValueError: it does not exist, fails, or cannot be served; the text says why.

    Example::

        load("digits.py:make_model")
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise ValueError(f"{target!r} is not FILE.py:NAME or MODULE:NAME, such as digits.py:make_model")
    module = _module(place)
    if not hasattr(module, name):
        known = ", ".join(each for each in vars(module) if not each.startswith("_")) or "nothing"
        raise ValueError(f"{place} has no {name!r}; it has {known}")
    found = getattr(module, name)
    if inspect.isroutine(found) or inspect.isclass(found):
        try:
            inspect.signature(found).bind()
            if any(kind(found) for kind in _MAKE_NOTHING):
                raise TypeError("it is an async function or a generator")
        except TypeError as error:
            raise ValueError(
                f"{target} is called without arguments to make what is served, but {error}; to serve the "
                f"function itself, have a dict of functions by name: SERVED = {{{name!r}: {name}}}"
            ) from None
        with _told(target):
            found = found()
    served = found if isinstance(found, Mapping) else {name.removeprefix("make_"): found}
    if not served:
        raise ValueError(f"{target} has nothing to serve: it is empty")
    return {str(each): _endpoint(target, what) for each, what in served.items()}


def _endpoint(target: str, what: Any) -> Endpoint:
    if isinstance(what, nn.Module):
        what.eval()
    try:
        return what if isinstance(what, Endpoint) else Endpoint(what)
    except TypeError as error:
        raise ValueError(f"{target}: {error}") from None


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        sys.path.insert(0, "")
        with _told(place):
            try:
                return importlib.import_module(place)
            except ModuleNotFoundError as error:
                if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                    raise  # it exists, and one of its imports does not
        raise ValueError(f"there is no module {place!r} to import")
    path = Path(place).resolve()
    if not path.is_file():
        raise ValueError(f"there is no file {place}")
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    with _told(place):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Add the position to errors that the user's code raises.

    Raises:
        ValueError: it raised something.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        lines = traceback.format_exception(type(error), error, beyond_the_server(error.__traceback__))
        raise ValueError(f"{what} cannot be loaded. It raised:\n\n{''.join(lines).rstrip()}") from error
