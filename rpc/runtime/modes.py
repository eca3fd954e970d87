"""The modes that PyTorch keeps for each thread, so that no function leaves its modes in force for the next.

A mode changes the results of PyTorch's functions on one thread: grad mode and inference mode; autocast, its
dtypes and its cache; the default device and other function modes; dispatch modes; hooks of saved tensors. A
new thread has PyTorch's defaults. Threads that run user functions one after another run each with the
defaults, and undo the changes that it leaves (``reset_modes``).

Most functions leave none, so ``modes_changed`` is called after each one and costs about half a microsecond,
of which the dtype of autocast is 0.2. It checks what changes results without an error, not the other modes
that ``SavedModes`` saves as well, such as the dtypes of autocast on other devices.

Inference mode has no setter. PyTorch's guard of it remembers the state of the thread that enters it, and
gives that state to the thread that leaves it: so a guard is entered where inference mode is saved, and left
where it is restored.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

import torch
from torch import (
    get_autocast_dtype,
    is_autocast_cache_enabled,
    is_grad_enabled,
    is_inference_mode_enabled,
    set_autocast_dtype,
    set_autocast_enabled,
)

from rpc.runtime.interrupts import interruptible, protected
from rpc.runtime.torch_internals import (
    FUNCTIONS_ENABLED,
    InferenceMode,
    default_device_of_thread,
    disable_saved_tensors_hooks,
    dispatch_stack_length,
    enable_saved_tensors_hooks,
    function_stack_length,
    function_state,
    is_any_autocast_enabled,
    is_forward_grad_enabled,
    is_multithreading_enabled,
    is_view_replay_enabled,
    pop_dispatch_mode,
    pop_function_mode,
    pop_saved_tensors_hooks,
    push_dispatch_mode,
    push_function_mode,
    push_saved_tensors_hooks,
    saved_tensors_hooks_disabled,
    set_forward_grad_enabled,
    set_function_state,
    set_grad_enabled,
    set_multithreading_enabled,
    set_view_replay_enabled,
    top_saved_tensors_hooks,
)

__all__ = ["SavedModes", "copy_of_modes", "modes_changed", "reset_modes", "with_default_modes"]

T = TypeVar("T")

_CPU_AUTOCAST_DTYPE: Final = torch.bfloat16
"""PyTorch's default on every thread."""

_is_block_open = False
"""Whether an open autocast block was saved. A generator that holds it may end it on any thread, which then
counts one block too few, and would never clear its cache of cast weights again.
"""

_AUTOCAST_DEVICES: Final = (
    *("cpu", "cuda", "xla", "mps", "xpu", "hpu", "ipu", "mtia", "maia", "privateuseone"),
)

_AUTOGRAD_MODES: Final[list[tuple[Callable[[], bool], Callable[[bool], object], bool]]] = [
    (is_grad_enabled, set_grad_enabled, True),
    (is_forward_grad_enabled, set_forward_grad_enabled, True),
    (is_multithreading_enabled, set_multithreading_enabled, True),
    (is_view_replay_enabled, set_view_replay_enabled, False),
]
"""Modes of autograd that have setters: how each is read and set, and its default."""


def modes_changed() -> bool:
    """Whether this thread's modes differ from the defaults of a new thread."""
    return (
        function_stack_length() > 0  # first: a function mode may intercept the other queries
        or not is_grad_enabled()
        or is_inference_mode_enabled()
        or is_any_autocast_enabled()
        or not is_autocast_cache_enabled()
        or dispatch_stack_length() > 0
        or top_saved_tensors_hooks(False) is not None
        or get_autocast_dtype("cpu") is not _CPU_AUTOCAST_DTYPE
        or (_is_block_open and _autocast_nesting() != 0)
    )


def reset_modes() -> None:
    """Give this thread the defaults of a new thread."""
    SavedModes().drop()


@protected
def with_default_modes(function: Callable[..., T], *args: object) -> T:
    """Call a function with the default modes; this thread's own modes are restored afterwards."""
    own = SavedModes() if modes_changed() else None
    try:
        return _call(function, *args)
    finally:
        if own is not None:
            own.restore()
        elif modes_changed():
            reset_modes()


@interruptible
def _call(function: Callable[..., T], *args: object) -> T:
    return function(*args)


def copy_of_modes() -> SavedModes | None:
    """Return a copy of this thread's modes, for later use; None if they are the defaults."""
    if not modes_changed():
        return None
    again = None
    if is_inference_mode_enabled():
        again = InferenceMode(True)
        again.__enter__()
    copied = SavedModes()
    copied._apply()
    if again is not None:
        again.__exit__(None, None, None)
    return copied


class SavedModes:
    """The saved modes of a thread: making one gives the current thread the defaults.

    Either ``restore`` or ``drop`` is called once, on any thread.
    """

    __slots__ = (
        *(
            "_autocast",
            "_autograd",
            "_cache",
            "_default_device",
            "_dispatch",
            "_functions",
            "_function_state",
        ),
        *("_hooks", "_hooks_disabled", "_inference", "_nesting"),
    )

    def __init__(self) -> None:
        global _is_block_open
        self._inference: Any = None
        self._functions = [pop_function_mode() for _ in range(function_stack_length())]
        self._dispatch = [pop_dispatch_mode(None) for _ in range(dispatch_stack_length())]
        self._hooks = _popped_hooks()
        self._hooks_disabled = saved_tensors_hooks_disabled()
        self._function_state = function_state()
        self._default_device = _exchange_default_device(None)
        self._autograd = [is_enabled() for is_enabled, _, _ in _AUTOGRAD_MODES]
        if is_inference_mode_enabled():
            self._inference = InferenceMode(False)
            self._inference.__enter__()
        any_enabled = is_any_autocast_enabled()
        self._autocast = [
            (name, (any_enabled and torch.is_autocast_enabled(name), get_autocast_dtype(name)))
            for name in _autocast_defaults()
        ]
        self._cache = is_autocast_cache_enabled()
        self._nesting = _autocast_nesting()
        if self._nesting:
            _is_block_open = True
        self._set_defaults()

    def _set_defaults(self) -> None:
        """Reset what is not default yet when the modes that form stacks have been removed."""
        if self._hooks_disabled is not None:
            enable_saved_tensors_hooks()
        set_function_state(FUNCTIONS_ENABLED)
        _set_autograd_modes([default for _, _, default in _AUTOGRAD_MODES])
        for (name, found), default in zip(self._autocast, _autocast_defaults().values(), strict=True):
            if found != (False, default):
                _set_autocast(name, False, default)
        torch.set_autocast_cache_enabled(True)
        _set_nesting(0)
        if self._nesting:
            torch.clear_autocast_cache()  # of weights, which may change before these modes are restored

    def restore(self) -> None:
        """Give the current thread these modes in place of its own."""
        if modes_changed():
            reset_modes()
        inference, self._inference = self._inference, None
        if inference is not None:
            inference.__exit__(None, None, None)
        self._apply()

    def _apply(self) -> None:
        """Give a thread that has the defaults all of these modes except inference mode."""
        if not is_inference_mode_enabled():
            _set_autograd_modes(self._autograd)
        _set_nesting(self._nesting)
        torch.set_autocast_cache_enabled(self._cache)
        for name, (enabled, dtype) in self._autocast:
            if enabled or dtype is not _autocast_defaults()[name]:
                _set_autocast(name, enabled, dtype)
        for hooks in reversed(self._hooks):
            push_saved_tensors_hooks(*hooks)
        if self._hooks_disabled is not None:
            disable_saved_tensors_hooks(self._hooks_disabled, False)
        for mode in reversed(self._dispatch):
            push_dispatch_mode(mode)
        for mode in reversed(self._functions):
            push_function_mode(mode)
        _exchange_default_device(self._default_device)
        set_function_state(self._function_state)

    def drop(self) -> None:
        """Discard these modes. The current thread keeps its own."""
        inference, self._inference = self._inference, None
        if inference is not None:
            own = InferenceMode(False)
            own.__enter__()
            inference.__exit__(None, None, None)
            own.__exit__(None, None, None)

    def __del__(self) -> None:
        self.drop()  # otherwise PyTorch's guard would change the thread that collects it


@functools.cache
def _autocast_defaults() -> dict[str, torch.dtype]:
    """Return the dtypes of autocast on a new thread, by type of device."""
    found: dict[str, torch.dtype] = {}

    def look() -> None:
        for name in _AUTOCAST_DEVICES:
            with suppress(RuntimeError):  # another version of PyTorch may not have it
                found[name] = get_autocast_dtype(name)

    thread = threading.Thread(target=look, name="farcall-default-modes")
    thread.start()
    thread.join()
    return found


def _set_autocast(device: str, enabled: bool, dtype: torch.dtype) -> None:
    set_autocast_enabled(device, enabled)
    set_autocast_dtype(device, dtype)


def _autocast_nesting() -> int:
    """Return the number of autocast blocks that this thread is in."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _set_nesting(count: int) -> None:
    """Set how many blocks of autocast this thread is in."""
    now = torch.autocast_increment_nesting()
    while now < count:
        now = torch.autocast_increment_nesting()
    while now > count:
        now = torch.autocast_decrement_nesting()


def _set_autograd_modes(values: list[bool]) -> None:
    for (is_enabled, enable, _), value in zip(_AUTOGRAD_MODES, values, strict=True):
        if is_enabled() != value:
            enable(value)


def _popped_hooks() -> list[tuple[Any, Any]]:
    """Remove the hooks of saved tensors, and return them from the top."""
    popped: list[tuple[Any, Any]] = []
    while (hooks := top_saved_tensors_hooks(False)) is not None:
        popped.append(hooks)
        pop_saved_tensors_hooks()
    return popped


def _exchange_default_device(context: Any) -> Any:
    """Set the context that ``torch.set_default_device`` leaves next on this thread; returns the
    previous one.
    """
    of_thread = default_device_of_thread
    before = getattr(of_thread, "device_context", None)
    if before is not context and of_thread is not None:
        of_thread.device_context = context
    return before
