"""``torch_xla.debug.profiler``: names for parts of a program, in PyTorch's profiler."""

from __future__ import annotations

from typing import Any

from torch.profiler import record_function

__all__ = ["StepTrace", "Trace", "start_server"]


class Trace(record_function):
    """What is inside has this name in a trace of ``torch.profiler``."""

    def __init__(self, name: str, **kwargs: Any) -> None:
        super().__init__(name, ", ".join(f"{key}={value}" for key, value in kwargs.items()) or None)


StepTrace = Trace


def start_server(port: int, only_on_master: bool = True) -> None:
    """Nothing listens: there is no XLA profiler to ask. Use ``torch.profiler`` around the program."""
