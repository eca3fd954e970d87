"""``"xla"`` as a name of the logical device: tensors that are made or moved there are on ``spmd:0``.

PyTorch knows the word, and has no kernels behind it without ``torch_xla``. Operators that make tensors from
nothing get ours. ``Tensor.to`` and ``torch.tensor`` ask for the current device of a kind before they come to
any kernel, so they are told the number here. The state of autocast is kept by kind of device, and ours is
read and set where a program names XLA's, so that ``torch.autocast("xla")`` is in force.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from spmd.engine.driver import device as engine
from spmd.engine.driver import saved
from spmd.engine.driver.current import DEVICE, NAME
from spmd.engine.driver.dispatch import dispatch

__all__ = ["give_back", "lend"]

_KIND: Final = "xla"
_begin: Callable[[], object] = object
_undo: Final[list[Callable[[], object]]] = []


def lend(begin: Callable[[], object]) -> None:
    """Make ``"xla"`` mean the logical device, until :func:`give_back`. Idempotent.

    Args:
        begin: called before a tensor is made there.
    """
    global _begin
    if _undo:
        return
    _begin = begin
    engine.set_up()
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    _undo.append(library._destroy)
    for name, operator in engine.operators_that_make_from_nothing():
        library.impl(name, _here(operator), "XLA")
    for owner, name in ((Tensor, "to"), (torch, "tensor"), (torch, "as_tensor")):
        _replace(owner, name, _numbered(getattr(owner, name)))
    saved.NAMES.add(_KIND)
    _undo.append(functools.partial(saved.NAMES.discard, _KIND))
    for name in ("is_autocast_enabled", "set_autocast_enabled", "set_autocast_dtype"):
        _replace(torch, name, _of_our_kind(getattr(torch, name)))
    _replace(torch, "get_autocast_dtype", _autocast_dtype(torch.get_autocast_dtype))


def give_back() -> None:
    """Undo :func:`lend`."""
    while _undo:
        _undo.pop()()


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    _undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
    setattr(owner, name, function)


def _here(operator: Any) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        _begin()
        return dispatch(operator, (), args, {**kwargs, "device": DEVICE})

    return make


def _numbered(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function whose second argument, or ``device=``, may be the name of the kind alone."""

    @functools.wraps(function)
    def call(first: Any, *args: Any, **kwargs: Any) -> Tensor:
        if args and _means_us(args[0]):
            args = (DEVICE, *args[1:])
        elif kwargs and _means_us(kwargs.get("device")):
            kwargs["device"] = DEVICE
        return function(first, *args, **kwargs)

    return call


def _means_us(said: object) -> bool:
    kind = said.type if isinstance(said, torch.device) else said
    if not isinstance(kind, str) or kind.partition(":")[0] != _KIND:
        return False
    _begin()
    return True


def _of_our_kind(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of autocast's state whose first argument, the kind of device, may be XLA's."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(NAME, *args[1:], **kwargs) if args and args[0] == _KIND else function(*args, **kwargs)

    return call


def _autocast_dtype(function: Callable[[str], torch.dtype]) -> Callable[[str], torch.dtype]:
    """XLA's default, bfloat16, is not that of devices such as ours, float16."""

    @functools.wraps(function)
    def call(kind: str) -> torch.dtype:
        return function(NAME if kind == _KIND and torch.is_autocast_enabled(NAME) else kind)

    return call
