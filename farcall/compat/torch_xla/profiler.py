"""``torch_xla.debug.profiler``: names for parts of a program, in PyTorch's profiler."""

from __future__ import annotations

import logging
from typing import Any, Final

from torch.profiler import record_function

__all__ = ["StepTrace", "Trace", "start_server", "trace", "trace_detached"]

_log: Final = logging.getLogger(__name__)


class Trace(record_function):
    """Name the block in a trace of ``torch.profiler``."""

    def __init__(self, name: str, **kwargs: Any) -> None:
        super().__init__(name, ", ".join(f"{key}={value}" for key, value in kwargs.items()) or None)


StepTrace = Trace


def start_server(port: int, only_on_master: bool = True) -> None:
    """Nothing listens: there is no XLA profiler to ask. Use ``torch.profiler`` around the program."""


def trace(service_addr: str, logdir: str, duration_ms: int = 1000, **options: Any) -> None:
    """Raises: there is no XLA profiler to ask."""
    raise NotImplementedError(
        f"trace({service_addr!r}): workers have no XLA profiler that could be asked over the network. Use "
        "torch.profiler.profile() around the part of the program that is of interest"
    )


def trace_detached(*args: Any, **options: Any) -> None:
    """Logs what :func:`trace` raises: theirs fails on a thread of its own, and the program goes on."""
    try:
        trace(*args, **options)
    except NotImplementedError as error:
        _log.warning("torch_xla.debug.profiler: nothing is traced: %s", error)
