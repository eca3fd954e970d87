"""A version that a reader keeps, and uses where it lies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from farcall.weights.errors import WeightsError
from farcall.weights.handle import Handle, Wanted
from farcall.weights.layout import Layout
from farcall.weights.memory import Access
from farcall.weights.transfer import Held, wholes

__all__ = ["Lease"]


class Lease(Mapping[str, Tensor]):
    """A version that stays, and its tensors by name; see ``Store.lease``.

    Attributes:
        version: its number.
    """

    version: int

    def __init__(self, read: Callable[[Callable[[Handle, Wanted], Held]], int]) -> None:
        self._read = read
        self._stack = contextlib.ExitStack()
        self._layout: Layout | None = None
        self._data: list[Tensor] = []
        self._memory: list[Any] = []
        self._tensors: dict[str, Tensor] = {}

    def __enter__(self) -> Self:
        if self._layout is not None:
            raise WeightsError("a lease is entered once at a time: call lease() again")
        self.version = self._read(self._begin)
        return self

    def _begin(self, handle: Handle, wanted: Wanted) -> Held:
        with contextlib.ExitStack() as stack:
            memory = self._memory  # and not ``self``, which has the stack that would have ``self``

            def used() -> bool:
                return any(each() is not None for each in memory)

            held = stack.enter_context(handle.leased(wanted, used, reads=True))
            view = handle.view(held, Access.COPY, stack, used)
            if view is None:
                layout = held.layout
                self._data = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in layout.sizes]
                tensors = {name: layout.tensor(self._data, name) for name in layout.entries}
                for _, local, data in handle.arriving(held.ticket, wholes(tensors)):
                    local.copy_(data)
            else:
                layout, mapped = view
                self._data = [each.data for each in mapped]
                memory[:] = [each.memory for each in mapped]
            self._layout = layout
            self._stack = stack.pop_all()
            return held

    def __exit__(self, *_: object) -> None:
        self._tensors.clear()
        self._data.clear()
        self._layout = None
        self._stack.close()
        self._memory.clear()

    def __getitem__(self, name: str) -> Tensor:
        layout = self._entered()
        if name not in self._tensors:
            if name not in layout.entries:
                raise KeyError(name)
            self._tensors[name] = layout.tensor(self._data, name)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entered().entries)

    def __len__(self) -> int:
        return len(self._entered().entries)

    def _entered(self) -> Layout:
        if self._layout is None:
            raise WeightsError("a lease has tensors inside its with statement only")
        return self._layout
