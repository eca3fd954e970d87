"""The layouts of a parallelized layer: of its input, of the computation, and of its output.

A layer computes on local shards; collectives before and after convert the layouts, in the same autograd
function. The rules for ``y = x @ W.T + b``, where the features of a ``ColwiseParallel`` layer are sharded by
outputs, those of a ``RowwiseParallel`` one by inputs:

=========== =============== ===================== ================== ============================
style       ``x`` wanted    ``y`` comes as        gradient of ``x``  gradients of ``W`` and ``b``
=========== =============== ===================== ================== ============================
colwise     ``Replicate``   ``Shard(-1)``         ``Partial``        local
rowwise     ``Shard(-1)``   ``Partial``           ``Shard(-1)``      local, and the same everywhere
=========== =============== ===================== ================== ============================

Plain tensors are assumed to be laid out as the style declares. A ``DTensor`` has its own layout, and gets its
gradient as a ``DTensor``: still ``Partial`` below a colwise layer, so that several layers that share an input
have it reduced once.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from spmd.tensor_parallel.errors import ParallelError
from spmd.tensor_parallel.resharding import (
    Finish,
    begin_reshard,
    check_dim,
    chunk,
    global_shape,
    gradient_layout,
    normalized,
    reshard,
    same,
)
from spmd.tensor_parallel.site import Site
from spmd.torch_internals import AsyncCollectiveTensor, DTensorSpec, TensorMeta

__all__ = ["PARTIAL", "REPLICATE", "Flow", "distributed", "gradient_of", "plain"]

REPLICATE: Final = same(Replicate())
PARTIAL: Final = same(Partial())


@dataclass(frozen=True, eq=False)
class Flow:
    """The layouts of a layer's input and output.

    Attributes:
        site: site of the layer.
        given: layout of a plain input.
        wanted: layout that the layer computes with.
        gradient: layout in which the computation returns the gradient of its input.
        natural: layout in which the computation returns the output.
        output: layout in which the layer returns the output.
        local_output: whether it is returned as a plain tensor, otherwise as a ``DTensor``.
        weight: placement of the weight.
        checked: not empty once the parts of an input were found to have the same size.
    """

    site: Site
    given: Placement
    wanted: Placement
    gradient: Placement
    natural: Placement
    output: Placement
    local_output: bool
    weight: Placement
    checked: list[int] = field(default_factory=list)

    def __deepcopy__(self, memo: dict[int, Any]) -> Flow:
        return self

    def wanted_in(self, dims: int) -> Placement:
        """Return the layout for an input with this number of dimensions."""
        return normalized(self.wanted, dims)

    @functools.cached_property
    def back(self) -> tuple[Placement, Placement, Placement]:
        """The layouts of the gradients of a plain input, of the result, and of the output."""
        return gradient_layout(self.given), gradient_layout(self.natural), gradient_layout(self.output)

    @functools.cached_property
    def takes_shards(self) -> bool:
        """Whether a plain input is sharded."""
        return isinstance(self.given, Shard)

    @functools.cached_property
    def holds_bias(self) -> bool:
        """Whether this rank adds the bias: to a partial sum only one may."""
        return not isinstance(self.natural, Partial) or self.site.rank == 0

    def parameter(self, parameter: Any, name: str, placement: Placement) -> DTensor:
        """A parameter of the layer, laid out as it should be.

        It is looked up at each call: others put another one in its place, FSDP at each.
        """
        if not isinstance(parameter, DTensor):
            raise ParallelError(
                self.site.says(f"expected {name} to be a DTensor, got {type(parameter).__name__}")
            )
        placements = parameter._spec.placements
        if len(placements) != 1:  # cut further, as FSDP does while the module is not running
            raise ParallelError(
                self.site.says(
                    f"expected {name} on the mesh {self.site.mesh}, got it on {parameter.device_mesh}"
                )
            )
        if placements[0] == placement:
            return parameter
        return parameter.redistribute(placements=(placement,))

    def check_place(self, given: Tensor, weight: Tensor) -> None:
        """Check that an input is on the parameters' device. Either may be on the meta device, both or
        neither.

        Raises:
            ParallelError: it is not.
        """
        if given.is_meta is not weight.is_meta:
            raise ParallelError(
                self.site.says(
                    f"expected the input where the weight is, on {weight.device}, got {given.device}"
                )
            )

    def take_in(self, given: Tensor, features: int | None) -> tuple[Tensor, tuple[int, ...], bool]:
        """Return the local part of an input, in the layout of the computation.

        Args:
            given: a plain tensor, or a ``DTensor`` in that layout.
            features: size of the whole input's last dimension, if that is checked.

        Returns:
            The part, the shape of the whole, and whether it came as a ``DTensor``.
        """
        if isinstance(given, DTensor):
            shape: tuple[int, ...] = tuple(given.shape)
            if features is not None and (not shape or shape[-1] != features):
                raise ParallelError(self._wrong_width(given, features, features, self.wanted))
            return plain(given), shape, True
        shape, expected = tuple(given.shape), features
        if self.takes_shards:
            check_dim(self.given, given.ndim, "the input", self.site)
            shape = global_shape(shape, self.given, self.site.size)
            if features is not None and normalized(self.given, len(shape)) == Shard(len(shape) - 1):
                expected, _ = chunk(features, self.site.size, self.site.rank)
            else:
                self._check_equal_parts(given)
        if features is not None and expected is not None:
            if not shape or given.shape[-1] != expected:
                raise ParallelError(self._wrong_width(given, expected, features, self.given))
            shape = (*shape[:-1], features)
        return reshard(given, self.given, self.wanted, shape, self.site), shape, False

    def _check_equal_parts(self, given: Tensor) -> None:
        """Check that all ranks' parts have the same length; backends fail badly, or not at all, if they
        differ.

        The first call asks the other ranks. Later ones do not: it would cost a small collective each time.
        """
        if self.checked:
            return
        size = given.shape[cast("Shard", self.given).dim]
        mine = torch.tensor([size], device=given.device)
        sizes = [torch.empty_like(mine) for _ in range(self.site.size)]
        dist.all_gather(sizes, mine, group=self.site.group)
        if any(int(each) != size for each in sizes):
            raise ParallelError(
                self.site.says(
                    f"expected plain parts of one length on all ranks, {self.given!r}, got the lengths "
                    f"{[int(each) for each in sizes]}: pad them, or pass a DTensor, whose parts may differ"
                )
            )
        self.checked.append(size)

    def _wrong_width(self, given: Tensor, expected: int, features: int, layout: Placement) -> str:
        return self.site.says(
            f"expected an input whose last dimension is {expected} ({features} features, {layout!r} over "
            f"{self.site.size} ranks), got {given.shape[-1] if given.ndim else 'none'}: "
            f"shape {[*given.shape]}"
        )

    def give_out(self, result: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the output in its layout, from the result; ``shape`` is that of the whole."""
        moved = reshard(result, self.natural, self.output, shape, self.site, owned=True)
        return moved if self.local_output else distributed(moved, self.output, shape, self.site)

    def gradient_in(self, gradient: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the gradient of the result, from that of the output."""
        _, natural, layout = self.back
        if isinstance(gradient, DTensor):
            layout = normalized(layout, len(shape))
            if gradient.placements != (layout,):
                gradient = gradient.redistribute(placements=(layout,))
            gradient = plain(gradient)
        return reshard(gradient, layout, natural, shape, self.site)

    def begin_gradient_out(self, gradient: Tensor, shape: Sequence[int], was_distributed: bool) -> Finish:
        """Start converting the gradient of the local part to the layout of the input; the collective is under
        way.
        """
        if was_distributed:
            wrapped = distributed(gradient, self.gradient, shape, self.site)
            return lambda: wrapped
        return begin_reshard(gradient, self.gradient, self.back[0], shape, self.site, owned=True)


def plain(tensor: DTensor) -> Tensor:
    """The local tensor, without a view or a node: for use inside of autograd functions."""
    local = tensor._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def distributed(local: Tensor, layout: Placement, shape: Sequence[int], site: Site) -> DTensor:
    """A local tensor as a ``DTensor``, without a node: for use inside of autograd functions."""
    shape = torch.Size(shape)
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * max(shape[dim], 1)
    meta = TensorMeta(shape, tuple(strides), local.dtype)
    return _wrapped(local, DTensorSpec(site.mesh, (normalized(layout, len(shape)),), tensor_meta=meta))


def gradient_of(parameter: DTensorSpec, local: Tensor) -> DTensor:
    """The gradient of a parameter, laid out as it is, from this rank's part."""
    return _wrapped(local, copy.copy(parameter))


def _wrapped(local: Tensor, spec: DTensorSpec) -> DTensor:
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
