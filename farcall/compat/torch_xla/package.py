"""``torch_xla``: the names of the package itself."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from farcall.compat.torch_xla import process_group
from farcall.compat.torch_xla.mode import begin_alone, lend_names
from farcall.compat.torch_xla.model import mark_step
from spmd.engine.driver import start

__all__ = [
    "__version__",
    "compile",
    "device",
    "device_count",
    "devices",
    "launch",
    "manual_seed",
    "real_devices",
    "step",
    "sync",
]

__version__: Final = "2.9.0"
"""The release whose names are lent: libraries ask for it."""


os.environ.setdefault("PJRT_DEVICE", "CPU")
lend_names()
process_group.register()


def device(index: int | None = None) -> torch.device:
    """The logical device; one of one worker, unless ``use_spmd`` was called before."""
    begin_alone()
    return start.device()


def devices() -> list[torch.device]:
    """The logical device, in a list."""
    return [device()]


def real_devices() -> list[str]:
    """Return the hardware behind each logical device."""
    return ["CPU:0"]


def device_count() -> int:
    """How many logical devices: one."""
    return 1


def sync(wait: bool = False, reset_scope: bool = True) -> None:
    """Run what is recorded."""
    mark_step()


@contextlib.contextmanager
def step() -> Iterator[None]:
    """Run the block as a separate step."""
    sync()
    try:
        yield
    finally:
        sync()


def compile(  # noqa: A001  theirs
    f: Callable[..., Any] | None = None,
    full_graph: bool | None = False,
    name: str | None = None,
    num_different_graphs_allowed: int | None = None,
) -> Any:
    """A function whose every call runs as a step of its own; without one, a context."""
    if f is None:
        return step()

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        with step():
            return f(*args, **kwargs)

    return call


def manual_seed(seed: int, device: object = None) -> None:
    """Seed the generators."""
    torch.manual_seed(seed)


def launch(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    start_method: str = "spawn",
    debug_single_process: bool = False,
) -> Any:
    """Call a function as the one process that there is in SPMD mode."""
    return fn(0, *args)
