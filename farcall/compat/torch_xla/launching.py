"""``torch_xla.distributed.xla_multiprocessing``, where there is one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["spawn"]


def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> Any:
    """Call the function here, as process 0.

    Raises:
        ValueError: several processes are asked for, which SPMD mode does not have.
    """
    if nprocs not in (None, 1):
        raise ValueError(f"nprocs is {nprocs}: in SPMD mode one process drives all workers")
    return fn(0, *args)
