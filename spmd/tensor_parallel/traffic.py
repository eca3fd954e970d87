"""Records the collectives of a module, for :func:`spmd.tensor_parallel.explain`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from spmd.tensor_parallel.site import Site
from spmd.torch_internals import TorchDispatchMode

__all__ = ["Transfer", "note", "recorded"]


@dataclass(frozen=True)
class Transfer:
    """One collective.

    Attributes:
        module: name of the module that needed it; None for a ``DTensor``, which does not record its module.
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``all_to_all``; for a ``DTensor``, the
            name of PyTorch's operator.
        nbytes: size of the whole tensor in bytes: the sum of an all-reduce, all parts of the others.
    """

    module: str | None
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
    """The list of what parallelized modules and ``DTensor`` s communicate inside, on this thread."""
    record: list[Transfer] = []
    token = _record.set(record)
    try:
        with _OfDTensors(record):
            yield record
    finally:
        _record.reset(token)


class _OfDTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes PyTorch's functional collectives, which is what ``DTensor`` s use."""

    def __init__(self, record: list[Transfer]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._list = record

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        namespace, _, name = function._schema.name.partition("::")
        if namespace == "_c10d_functional" and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            sizes = [each.nbytes for each in (args[0], result) if isinstance(each, torch.Tensor)]
            self._list.append(Transfer(None, name, max(sizes, default=0)))
        return result
