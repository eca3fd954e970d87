"""What is communicated, for whoever wants to know: :func:`spmd.tensor_parallel.explain`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from spmd.tensor_parallel.site import Site

__all__ = ["Transfer", "note", "recorded"]


@dataclass(frozen=True)
class Transfer:
    """One collective.

    Attributes:
        module: the name of the module for which it was.
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``all_to_all``.
        nbytes: of the whole tensor: the sum of an all-reduce, all parts of the others.
    """

    module: str
    kind: str
    nbytes: int


_record: Final[ContextVar[list[Transfer] | None]] = ContextVar("record", default=None)


def note(site: Site, kind: str, tensor: Tensor) -> None:
    """A collective begins."""
    record = _record.get()
    if record is not None:
        record.append(Transfer(site.name, kind, tensor.nbytes))


@contextmanager
def recorded() -> Iterator[list[Transfer]]:
    """The list of what this thread communicates inside."""
    record: list[Transfer] = []
    token = _record.set(record)
    try:
        yield record
    finally:
        _record.reset(token)
