"""``torch.compile(backend="openxla")``, which returns its argument.

Their backend makes one compiled program of what their device records operation by operation. Here what is
recorded is a program that workers are sent once, so there is nothing left to do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

__all__ = ["give_back", "lend"]

_BACKENDS: Final = ("openxla", "openxla_eval")
_undo: Final[list[Callable[[], object]]] = []


def lend() -> None:
    """Register their backends of ``torch.compile``, until :func:`give_back`. Idempotent."""
    if _undo:
        return
    before: Any = torch.compile
    _undo.append(functools.partial(setattr, torch, "compile", before))

    @functools.wraps(before)
    def compile(model: Any = None, **options: Any) -> Any:  # noqa: A001  theirs
        if options.get("backend") not in _BACKENDS:
            return before(model, **options)
        return model if model is not None else lambda function: function

    torch.compile = compile


def give_back() -> None:
    """Undo :func:`lend`."""
    while _undo:
        _undo.pop()()
