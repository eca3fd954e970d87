"""Private names of PyTorch: how packages list those that they use, and what happens if one is missing.

The file ``torch_internals.py`` of a package is the only file there that names them, each once. It has an
``Internals``, with a call of ``find`` for each name, which says what does not work if the installed version
of PyTorch does not have it. A missing name is no error on import: it is replaced by ``instead``, or by a
class whose use raises ``MissingInternalError``, and ``check`` logs it when the package is first used.
``tests/unit/test_private_names.py`` finds uses in other files.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch

from rpc.errors import MissingInternalError

__all__ = ["Internal", "Internals"]

logger = logging.getLogger(__name__)

_RAISES: Final = object()
_MISSING: Final = object()
_DECLARED: Final = object()


@dataclass(frozen=True)
class Internal:
    """A private name of PyTorch.

    Attributes:
        name: the module and the attribute in it, as ``"torch._C:Future.done"``; or a module.
        without: what does not work if it is missing, as a clause.
        since, until: the versions that need it, as (major, minor), both included; None for no limit.
    """

    name: str
    without: str
    since: tuple[int, int] | None = None
    until: tuple[int, int] | None = None

    def __str__(self) -> str:
        return self.name.replace(":", ".")

    def is_needed(self, version: tuple[int, int]) -> bool:
        """Whether this version of PyTorch needs it."""
        return (self.since is None or version >= self.since) and (self.until is None or version <= self.until)

    def look_up(self, otherwise: Any) -> Any:
        """Import its module and return the object of that name, or ``otherwise``."""
        module, _, attributes = self.name.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for each in attributes.split(".") if attributes else ():
                found = _DECLARED if _is_declared(found, each) else getattr(found, each)
        except (ImportError, AttributeError):
            return otherwise
        return found


def _is_declared(place: Any, name: str) -> bool:
    """Whether this is a class whose instances have the attribute, as an annotation says."""
    return isinstance(place, type) and name in inspect.get_annotations(place) and not hasattr(place, name)


class Internals:
    """The private names of PyTorch that one package uses.

    Attributes:
        names: all of them.
        missing: those that the installed version needs and does not have, among those looked for so far.
    """

    def __init__(self) -> None:
        self.names: list[Internal] = []
        self.missing: list[Internal] = []
        self._reported = 0

    def find(
        self,
        name: str,
        without: str,
        *,
        instead: Any = _RAISES,
        since: tuple[int, int] | None = None,
        until: tuple[int, int] | None = None,
    ) -> Any:
        """Return the object with a name.

        Args:
            name: as in ``Internal``.
            without: what does not work if it is missing, as a clause.
            instead: what is returned if it is missing, or if this version does not need it. By default a
                class that raises ``MissingInternalError`` when it is used.
            since, until: the versions that need it; others may lack it without a line in the log.
        """
        return self.later(name, without, instead=instead, since=since, until=until)()

    def later(
        self,
        name: str,
        without: str,
        *,
        instead: Any = _RAISES,
        since: tuple[int, int] | None = None,
        until: tuple[int, int] | None = None,
    ) -> Callable[[], Any]:
        """Return a function that does what ``find`` does, for a name in a module that is slow to import."""
        internal = Internal(name, without, since, until)
        self.names.append(internal)
        return functools.partial(self._look_up, internal, instead)

    def _look_up(self, internal: Internal, instead: Any) -> Any:
        needed = internal.is_needed(_version())
        found = internal.look_up(_MISSING) if needed else _MISSING
        if found is not _MISSING:
            return found
        if needed and internal not in self.missing:
            self.missing.append(internal)
        return _substitute(internal) if instead is _RAISES else instead

    def expect(self, *names: str, without: str) -> None:
        """Name attributes that are used on instances, such as methods of ``Tensor``."""
        for name in names:
            self.find(name, without)

    def check(self) -> None:
        """Log the names that are missing, once. Called when the package is first used."""
        new, self._reported = self.missing[self._reported :], len(self.missing)
        for without in dict.fromkeys(each.without for each in new):
            names = ", ".join(str(each) for each in new if each.without == without)
            logger.warning("PyTorch %s does not have %s: %s", torch.__version__, names, without)

    def is_missing(self, without: str) -> bool:
        """Whether a name is missing without which this does not work."""
        return any(each.without == without for each in self.missing)

    def require(self, without: str) -> None:
        """Raise ``MissingInternalError`` if a name is missing without which this does not work."""
        for each in self.missing:
            if each.without == without:
                raise _error(each)


def _version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _error(internal: Internal) -> MissingInternalError:
    return MissingInternalError(
        f"PyTorch {torch.__version__} does not have {internal}: {internal.without}. "
        "Install a version of PyTorch that farcall was tested with: 2.13, 2.14 or 2.15."
    )


class _Substitute(type):
    """The metaclass of substitutes for missing names. They are classes, since some names are base classes."""

    internal: Internal

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise _error(cls.internal)

    def __getattr__(cls, name: str) -> NoReturn:
        raise _error(cls.internal)


def _substitute(internal: Internal) -> _Substitute:
    return _Substitute(internal.name.rpartition(".")[2], (), {"internal": internal})
