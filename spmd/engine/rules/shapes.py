"""Operators with a shape among their arguments: it is that of the whole tensor, and is replaced by that of a
worker's shard.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.distributed.tensor.placement_types import Partial, Shard

from spmd.engine.rules.local_rules import Local, Site, local_rule
from spmd.engine.rules.placement_rules import OperatorCall, Row, placement_rule
from spmd.engine.rules.uneven_views import rebalanced

__all__ = ["is_view"]

aten: Any = torch.ops.aten

_SHAPES: Final = {
    "view": "size",
    "_unsafe_view": "size",
    "reshape": "shape",
    "_reshape_alias": "size",
    "view_copy": "size",
    "expand": "size",
    "expand_copy": "size",
    "new_empty": "size",
    "new_full": "size",
    "new_ones": "size",
    "new_zeros": "size",
    "slice_backward": "input_sizes",
    "select_backward": "input_sizes",
    "upsample_nearest1d_backward": "input_size",
    "upsample_nearest2d_backward": "input_size",
    "upsample_nearest3d_backward": "input_size",
    "upsample_linear1d_backward": "input_size",
    "upsample_bilinear2d_backward": "input_size",
    "upsample_bicubic2d_backward": "input_size",
    "upsample_trilinear3d_backward": "input_size",
}

_VIEWS: Final = ("view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy")


def is_view(op: Any) -> bool:
    """Whether an operator returns the same elements in another shape."""
    return op._schema.name.removeprefix("aten::") in _VIEWS and op._schema.overload_name != "dtype"


@placement_rule("view.dtype")
def _retyped_rows(call: OperatorCall) -> list[Row]:
    """Rows, except along a last dimension whose length changes; and the bits of terms are not those of their
    sum.
    """
    (meta,) = call.tensors
    rank = len(meta.shape)
    dims = range(rank if meta.dtype.itemsize == call["dtype"].itemsize else rank - 1)
    return [Row((Shard(dim),), (Shard(dim),)) for dim in dims]


@placement_rule("slice_backward", "select_backward")
def _backward_rows(call: OperatorCall) -> list[Row]:
    """Rows along all dimensions except the one that was sliced, also if that is counted from the last."""
    rank = len(call["input_sizes"])
    cut = call["dim"] % rank
    is_gone = "select" in call.op.name()
    others = [dim for dim in range(rank) if dim != cut]
    rows = [Row((Shard(dim - (is_gone and dim > cut)),), (Shard(dim),)) for dim in others]
    return [*rows, Row((Partial(),), (Partial(),))]


@local_rule(*_SHAPES)
def _shape_of_part(site: Site) -> Local:
    name = site.call.op.name().removeprefix("aten::")
    (result,) = site.results
    assert result is not None
    shape = site.local_shape(result)
    if name in _VIEWS and (moved := rebalanced(site)) is not None:
        return Local(moved, (site.args[0],), {})
    if name in _VIEWS:  # the strides of a shard may not allow a view where those of the whole do
        return Local(aten.reshape.default, (site.args[0], shape), {})
    return site.runs(site.call.op, **{_SHAPES[name]: shape})


@local_rule("new_empty_strided")
def _new_empty_strided(site: Site) -> Local:
    (result,) = site.results
    assert result is not None
    kwargs = {name: value for name, value in site.kwargs.items() if name == "dtype"}
    return Local(aten.new_empty.default, (site.args[0], site.local_shape(result)), kwargs)


@local_rule(
    *("squeeze", "squeeze.dim", "squeeze.dims"), *("squeeze_copy", "squeeze_copy.dim", "squeeze_copy.dims")
)
def _squeeze(site: Site) -> Local:
    """Remove only dimensions that are 1 in the whole tensor."""
    shape = site.call.tensors[0].shape
    dims = list(range(len(shape)))
    if "dim" in site.call.op._schema.overload_name:
        given = site.call["dim"]
        dims = [each % len(shape) for each in ([given] if isinstance(given, int) else given)] if shape else []
    return Local(aten.squeeze.dims, (site.args[0], [each for each in dims if shape[each] == 1]), {})


@local_rule("as_strided")
def _as_strided(site: Site) -> Local:
    """``as_strided`` of the memory as it would be on one device."""
    meta = site.call.tensors[0]

    def as_strided(local: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if local.stride() != meta.stride or local.storage_offset() or not _is_alone(local):
            local = local.new_empty_strided(meta.shape, meta.stride).copy_(local)
        return local.as_strided(*args, **kwargs)

    return Local(as_strided, site.args, site.kwargs, is_view=True)


def _is_alone(local: torch.Tensor) -> bool:
    """Whether the memory is this tensor's only, from beginning to end."""
    return local.untyped_storage().nbytes() == local.nbytes


@local_rule("native_group_norm", "native_group_norm_backward")
def _group_norm(site: Site) -> Local:
    """Its number of samples is an argument."""
    return site.runs(site.call.op, N=site.local_shape(site.call["input"])[0])
