"""Bags of embeddings: sums and means of rows of a table.

Bags may be sharded, with their indices; and a table by its columns, or by its rows: then each worker sums the
rows that it has. Indices are small, so they are replicated. Bags that take the maximum, or weigh their rows,
are computed whole.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from spmd.engine.program.layouts import chunks, coordinates
from spmd.engine.program.program import Meta
from spmd.engine.program.redistribution import all_gather
from spmd.engine.rules.local_rules import Local, Site, local_rule
from spmd.engine.rules.lookup import check_rows
from spmd.engine.rules.placement_rules import OperatorCall, Row, placement_rule

__all__: list[str] = []

aten: Any = torch.ops.aten
_SUM, _MEAN, _MAX = range(3)
_FORWARD: Final = ("_embedding_bag", "_embedding_bag_forward_only")
_BACKWARD: Final = "_embedding_bag_backward"


def _is_plain(call: OperatorCall) -> bool:
    return call["mode"] != _MAX and call["per_sample_weights"] is None and not call["sparse"]


@placement_rule(*_FORWARD)
def _rows(call: OperatorCall) -> list[Row]:
    if not _is_plain(call):
        return []
    whole = Replicate()
    others = (whole,) * 3
    return [
        Row((whole, Shard(0), whole), (Shard(0), *others)),
        Row((Shard(1), whole, whole), (Shard(1), *others)),
        Row((Shard(0), whole, whole), (Partial(), *others)),
    ]


@placement_rule(_BACKWARD)
def _backward_rows(call: OperatorCall) -> list[Row]:
    if not _is_plain(call):
        return []
    whole = Replicate()
    others = (whole,) * 4
    rows = [Row((Shard(1), whole, *others), (Shard(1),)), Row((Partial(), whole, *others), (Partial(),))]
    if not call["scale_grad_by_freq"]:
        rows.insert(0, Row((Shard(0), Shard(0), *others), (Partial(),)))
    return rows


class _Bags:
    """The indices in the bags that a worker has.

    Args:
        site: the instruction on this worker.
        count: number of bags.
        is_cut: whether the bags are sharded as the indices are.
    """

    def __init__(self, site: Site, count: int, is_cut: bool) -> None:
        self._count = count
        indices: Meta = site.call["indices"]
        self._length = indices.shape[0]
        self._gathers: list[tuple[Any, list[int]]] = []
        self.begin, self.end = 0, count
        layout = indices.layout
        if layout.mesh is None:
            return
        mesh = site.meshes(layout.mesh)
        at = coordinates(layout.mesh, site.rank)
        length = self._length
        for axis, placement in enumerate(layout.placements):
            if not placement.is_replicate():
                size = layout.mesh.shape[axis]
                lengths = chunks(length, size)
                self._gathers.append((mesh.get_group(axis), lengths))
                length = lengths[at[axis]]
                if is_cut:
                    bags = chunks(self.end - self.begin, size)
                    self.begin += sum(bags[: at[axis]])
                    self.end = self.begin + bags[at[axis]]

    def whole(self, indices: Tensor) -> Tensor:
        """The indices of all bags."""
        for group, lengths in reversed(self._gathers):
            gathered = indices.new_empty(sum(lengths))
            all_gather(indices, list(gathered.split_with_sizes(lengths)), group)
            indices = gathered
        return indices

    def lengths(self, offsets: Tensor) -> Tensor:
        """The number of indices in each bag."""
        ends = offsets[1 : self._count + 1]
        if len(offsets) <= self._count:
            ends = torch.cat((ends, ends.new_full((1,), self._length))) if self._count else ends
        return ends - offsets[: self._count]

    def own(self, lengths: Tensor) -> slice:
        """The positions of the indices of this worker's bags."""
        ends = lengths.cumsum(0).tolist()
        return slice(*(ends[each - 1] if each else 0 for each in (self.begin, self.end)))


@local_rule(*_FORWARD)
def _bag(site: Site) -> Local | None:
    weight, indices = site.call["weight"], site.call["indices"]
    by_rows, by_bags = bool(site.groups(weight.layout, 0)), bool(site.groups(indices.layout))
    if not (by_rows or by_bags):
        # for columns that lie apart in memory PyTorch's kernel gives other results beside the sums
        dense = lambda table, *args: site.call.op(table.contiguous(), *args)  # noqa: E731
        return Local(dense, site.args, {}) if site.groups(weight.layout) else None
    bag_of = site.results[1]
    count = site.call["offsets"].shape[0] - bool(site.call["include_last_offset"])
    mean, padding = site.call["mode"] == _MEAN, site.call["padding_idx"]
    bags = _Bags(site, count, by_bags)
    first = site.offset(weight, 0)
    rows = site.local_shape(weight)[0]
    bags_known = bag_of is not None and bag_of.shape[0] > 0

    def embedding_bag(table: Tensor, indices: Tensor, offsets: Tensor, *_: Any) -> tuple[Tensor, ...]:
        indices = bags.whole(indices)
        check_rows(indices, weight.shape[0])
        lengths = bags.lengths(offsets)
        ids = torch.repeat_interleave(torch.arange(count), lengths)
        counts = torch.bincount(ids[indices != padding], minlength=count)
        here = bags.own(lengths)
        mine = indices[here] - first
        at = ids[here] - bags.begin
        present = (mine >= 0) & (mine < rows) & (indices[here] != padding)
        summed = table.new_zeros((bags.end - bags.begin, table.shape[1]))
        summed.index_add_(0, at[present], table[mine[present]])
        if mean:
            summed /= counts[bags.begin : bags.end].clamp(min=1).unsqueeze(1)
        known = ids if bags_known else ids.new_empty(0)
        sizes = counts if mean else torch.zeros_like(counts)
        return summed, known, sizes, sizes.clone()

    return Local(embedding_bag, site.args, {})


@local_rule(_BACKWARD)
def _bag_backward(site: Site) -> Local | None:
    indices = site.call["indices"]
    if not site.groups(indices.layout):
        return None
    bags = _Bags(site, site.call["grad"].shape[0], is_cut=True)
    mean, padding, rows = site.call["mode"] == _MEAN, site.call["padding_idx"], site.call["num_weights"]

    def backward(
        grad: Tensor, indices: Tensor, offsets: Tensor, _: Tensor, counts: Tensor, *__: Any
    ) -> Tensor:
        indices = bags.whole(indices)
        lengths = bags.lengths(offsets)
        here = bags.own(lengths)
        if mean:
            grad = grad / counts[bags.begin : bags.end].clamp(min=1).unsqueeze(1)
        ids = torch.repeat_interleave(torch.arange(bags.end - bags.begin), lengths[bags.begin : bags.end])
        present = indices[here] != padding
        table = grad.new_zeros((rows, grad.shape[1]))
        return table.index_add_(0, indices[here][present], grad[ids[present]])

    return Local(backward, site.args, site.kwargs)
