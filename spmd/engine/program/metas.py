"""Metadata of tensors, and inference of the metadata of results."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from spmd.engine.program.program import REPLICATED, Layout, Meta
from spmd.torch_internals import FakeTensorMode

__all__ = ["Spec", "contiguous_stride", "infer", "spec_of"]


class Spec:
    """A tensor's shape, strides, offset, dtype and layout. Equal ones are one object: compare with ``is``.

    It lives as long as it is referenced.

    Attributes:
        geometry: shape, strides and offset as PyTorch takes them for a tensor without data: those of a
            contiguous tensor, which it makes faster, are None.
        repeats: whether elements are shown several times along a dimension, as by ``expand``.
    """

    __slots__ = (
        "__weakref__",
        "dtype",
        "geometry",
        "layout",
        "meta",
        "offset",
        "repeats",
        "shape",
        "stride",
    )

    _known: Final[weakref.WeakValueDictionary[tuple[Any, ...], Spec]] = weakref.WeakValueDictionary()

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    layout: Layout
    meta: Meta
    geometry: tuple[tuple[int, ...], tuple[int, ...] | None, int | None]
    repeats: bool

    @staticmethod
    def of(
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: torch.dtype,
        layout: Layout = REPLICATED,
        offset: int = 0,
    ) -> Spec:
        """The one with these attributes."""
        key = (shape, stride, dtype, layout, offset)
        found = Spec._known.get(key)
        if found is None:
            found = Spec()
            found.shape, found.stride, found.dtype, found.layout, found.offset = key
            found.meta = Meta(shape, stride, dtype, layout)
            is_plain = not offset and stride == contiguous_stride(shape)
            found.geometry = (shape, None, None) if is_plain else (shape, stride, offset)
            found.repeats = any(step == 0 and size > 1 for size, step in zip(shape, stride, strict=True))
            found = Spec._known.setdefault(key, found)
        return found

    def laid_out(self, layout: Layout) -> Spec:
        """The same tensor with another layout."""
        if layout is self.layout:
            return self
        return Spec.of(self.shape, self.stride, self.dtype, layout, self.offset)

    def dense(self) -> Spec:
        """The same tensor, contiguous."""
        if self.geometry[1] is None:
            return self
        return Spec.of(self.shape, contiguous_stride(self.shape), self.dtype, self.layout)

    @property
    def nbytes(self) -> int:
        """The metadata of the whole tensor."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def spec_of(tensor: Tensor, layout: Layout = REPLICATED) -> Spec:
    """A tensor's spec.

    Raises:
        NotImplementedError: it is sparse, or of another layout that the device has not.
    """
    if tensor.layout is not torch.strided:
        raise NotImplementedError(
            f"tensors on spmd:0 are dense, and this one would have the layout {tensor.layout}: use a dense "
            "one (.to_dense(), or an embedding without sparse=True), or compute this part on the CPU"
        )
    return Spec.of(
        tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, layout, int(tensor.storage_offset())
    )


_NORMS: Final = (
    "aten::native_layer_norm",
    "aten::native_group_norm",
    "aten::native_batch_norm",
    "aten::_native_batch_norm_legit",
    "aten::_native_batch_norm_legit_functional",
    "aten::_native_batch_norm_legit_no_training",
)
"""Operators that return a normalized tensor and two statistics of the tensor."""

_fake_mode: FakeTensorMode | None = None


def _mode() -> FakeTensorMode:
    global _fake_mode
    if _fake_mode is None:
        _fake_mode = FakeTensorMode()
        _fake_mode.cache_enabled = False  # which has no limit; what is inferred is remembered by our callers
    return _fake_mode


def _fakes(tree: Any) -> Any:
    """Inside of the mode: a tree with a tensor without data for each spec."""
    if isinstance(tree, Spec):
        base = torch.empty_strided(tree.shape, tree.stride, dtype=tree.dtype, device="cpu")
        return base.as_strided(tree.shape, tree.stride, tree.offset) if tree.offset else base
    if isinstance(tree, (list, tuple)):
        return type(tree)(_fakes(each) for each in tree)
    return tree


def infer(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation, with specs in place of tensors in its arguments and its result.

    Raises:
        DynamicOutputShapeException, DataDependentOutputException: that depends on values.
        Exception: what the operation raises for such arguments.
    """
    with torch.no_grad(), _quietly(), _mode():
        found = _specs(operator(*_fakes(args), **{name: _fakes(each) for name, each in kwargs.items()}))
    return _statistics_as_computed(found, args) if operator._schema.name in _NORMS else found


def _statistics_as_computed(found: tuple[Spec, ...], args: tuple[Any, ...]) -> tuple[Spec, ...]:
    """Return the result of a norm, with the dtypes that kernels of the CPU give its statistics.

    They have the dtype of the parameters where that is wider than the input's, and running statistics keep
    theirs.
    """
    tensor, *others = (each for each in args if isinstance(each, Spec))
    wide = max((each.dtype for each in (tensor, *others)), key=lambda dtype: dtype.itemsize)
    normed, mean, deviation, *running = found
    dtypes = (wide, wide, *(each.dtype for each in others[-2:]))
    statistics = zip((mean, deviation, *running), dtypes, strict=False)
    return normed, *(Spec.of(each.shape, each.stride, dtype) for each, dtype in statistics)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """What an operation raises for wrong arguments goes to the user; PyTorch would log it as well."""
    log = logging.getLogger(FakeTensorMode.__module__)
    log.addFilter(_nothing)
    try:
        yield
    finally:
        log.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False


def _specs(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return spec_of(tree)
    if isinstance(tree, (list, tuple)):
        return tuple(_specs(each) for each in tree)
    return tree
