"""Records the collectives of a module, for :func:`spmd.tensor_parallel.explain`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spmd.tensor_parallel.site import Site
from spmd.torch_internals import TorchDispatchMode, dispatch_modes

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


def note(site: Site, kind: str, tensor: Tensor) -> None:
    """A collective begins."""
    for mode in dispatch_modes():
        if isinstance(mode, _Recording):
            mode.transfers.append(Transfer(site.name, kind, tensor.nbytes))


@contextmanager
def recorded() -> Iterator[list[Transfer]]:
    """The list of what parallelized modules and ``DTensor`` s communicate inside, on this thread and in its
    backward passes.
    """
    recording = _Recording()
    with recording:
        yield recording.transfers


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes PyTorch's functional collectives, which is what ``DTensor`` s use. A mode is in force on all
    threads of a backward pass, which a context variable is not.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.transfers: list[Transfer] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        namespace, _, name = function._schema.name.partition("::")
        if namespace == "_c10d_functional" and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            sizes = [each.nbytes for each in (args[0], result) if isinstance(each, torch.Tensor)]
            self.transfers.append(Transfer(None, name, max(sizes, default=0)))
        return result
