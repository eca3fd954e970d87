"""Planners with which ``torch.distributed.checkpoint`` saves and loads tensors on the logical device.

A tensor that is cut is saved and loaded shard by shard: each distinct shard once, with its place in the whole
tensor, so another mesh, or another number of workers, or a program without any, can load it. The driver has
one shard in memory while it is written, and the shards of one tensor until all are read, and then go to the
workers.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from rpc.runtime.torch_internals import pytree
from spmd.checkpoint.reading import load_data
from spmd.engine import api as engine
from spmd.sharding.marks import op_sharding
from spmd.sharding.op_sharding import OpSharding

__all__ = ["CpuShards", "SPMDLoadPlanner", "SPMDSavePlanner", "sharded_cpu_state_dict"]


@dataclasses.dataclass(frozen=True, eq=False)
class CpuShards:
    """A snapshot of a tensor that is cut: its distinct parts, by the first worker that has each."""

    parts: Mapping[int, Tensor]
    global_shape: torch.Size
    sharding: OpSharding


def sharded_cpu_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a state dict with all tensors on the CPU: ``CpuShards`` where they are cut."""

    def snapshot(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return copy.deepcopy(t)
        if _is_cut(t):
            sharding = op_sharding(t)
            holders = [worker for worker, _ in _distinct(sharding, t.shape)]
            parts = engine.local_parts(t, holders)
            return CpuShards(dict(zip(holders, parts, strict=True)), t.shape, sharding)
        return t.detach().cpu().clone() if not engine.is_logical(t) else t.detach().cpu()

    copied: dict[str, Any] = pytree.tree_map(snapshot, dict(state_dict))
    return copied


class SPMDSavePlanner(DefaultSavePlanner):
    """Saves tensors on the logical device; other things as PyTorch's default planner does.

    Attributes:
        sharded_state_dict: by their keys, the tensors that are cut.
        unsharded_state_dict: everything else.

    Example::

        dist_cp.save(state_dict, storage_writer=FileSystemWriter(path), planner=SPMDSavePlanner())
    """

    sharded_state_dict: dict[str, Any]
    unsharded_state_dict: dict[str, Any]

    def __init__(self) -> None:
        super().__init__()
        self._holders: dict[tuple[str, Any], int] = {}  # an index does not stay what it was planned with

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | bool | None = None,
        is_coordinator: bool = False,
    ) -> None:
        if isinstance(storage_meta, bool):  # PyTorch's earlier order of arguments, which XLA's tests have
            is_coordinator, storage_meta = storage_meta, None
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.sharded_state_dict = {
            key: value
            for key, value in self.state_dict.items()
            if isinstance(value, CpuShards) or _is_cut(value)
        }
        self.unsharded_state_dict = {
            key: value for key, value in self.state_dict.items() if key not in self.sharded_state_dict
        }
        self.state_dict = self.unsharded_state_dict

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = list(plan.items)
        for key, value in self.sharded_state_dict.items():
            found = _write_items(key, value)
            self._holders |= {(key, item.index.offset): item.index.index or 0 for item in found}
            items += found
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        cut = self.sharded_state_dict.get(index.fqn)
        if cut is None:
            found = super().lookup_object(index)
            return found.detach().cpu() if isinstance(found, Tensor) else found
        holder = self._holders[index.fqn, index.offset]
        return cut.parts[holder] if isinstance(cut, CpuShards) else engine.local_parts(cut, [holder])[0]

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002  PyTorch's name
        if write_item.type is not WriteItemType.BYTE_IO:
            return object
        data = io.BytesIO()
        torch.save(object, data)
        return data


class SPMDLoadPlanner(DefaultLoadPlanner):
    """Loads into tensors on the logical device, in place, whatever mesh they were saved from.

    Args:
        weights_only: load entries other than tensors as ``torch.load(weights_only=True)`` does. PyTorch's own
            planner, and its readers, load pickles: whoever wrote the checkpoint can run code.

    Attributes:
        sharded_state_dict: by their keys, the tensors that are cut.
        unsharded_state_dict: everything else.

    Example::

        state = {"model": model.state_dict()}
        dist_cp.load(state, storage_reader=FileSystemReader(path), planner=SPMDLoadPlanner())
    """

    sharded_state_dict: dict[str, Tensor]
    unsharded_state_dict: dict[str, Any]

    def __init__(self, *, weights_only: bool = False) -> None:
        super().__init__()
        self._weights_only = weights_only
        self._arriving: dict[str, _Arriving] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.sharded_state_dict = {key: value for key, value in self.state_dict.items() if _is_cut(value)}
        self.unsharded_state_dict = {
            key: value for key, value in self.state_dict.items() if key not in self.sharded_state_dict
        }

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        plan = create_default_local_load_plan(self.unsharded_state_dict, self.metadata)
        items = list(plan.items)
        for key, t in self.sharded_state_dict.items():
            saved = self.metadata.state_dict_metadata.get(key)
            if not isinstance(saved, TensorStorageMetadata):
                fault = "Missing key in" if saved is None else "Not a tensor in"
                raise RuntimeError(f"{fault} checkpoint state_dict: {key}.")
            if saved.size != t.shape:
                raise ValueError(f"Size mismatch between saved {saved.size} and current: {t.shape} for {key}")
            items += [
                dataclasses.replace(item, dest_index=dataclasses.replace(item.dest_index, index=worker))
                for worker, chunk in _distinct(op_sharding(t), t.shape)
                for item in create_read_items_for_chunk_list(key, saved, [chunk])
            ]
        return LoadPlan(items, plan.storage_data, plan.planner_data)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        if not self._weights_only:
            super().load_bytes(read_item, value)
            return
        entry = read_item.dest_index.fqn
        loaded = load_data(entry, value)
        # PyTorch's planner would load the pickle without ``weights_only``: it only makes the place ready.
        super().load_bytes(read_item, _nothing())
        container: Any = self.original_state_dict if self.flatten_state_dict else self.state_dict
        *path, last = self.mappings[entry] if self.flatten_state_dict else (entry,)
        for key in path:
            container = container[key]
        container[last] = loaded

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        key = read_item.dest_index.fqn
        found = self.state_dict[key]
        if not engine.is_logical(found):
            return cast("Tensor", super().resolve_tensor(read_item))
        if key not in self._arriving:
            self._arriving[key] = _Arriving(found)
        return self._arriving[key].part(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        key = read_item.dest_index.fqn
        if key in self._arriving and self._arriving[key].has_come(read_item):
            self._arriving.pop(key).load()


class _Arriving:
    """A tensor of which some parts have been read."""

    def __init__(self, t: Tensor) -> None:
        self._t = t
        self._sharding = op_sharding(t)
        self._chunks = dict(_distinct(self._sharding, t.shape))
        self._parts = {
            worker: torch.zeros(chunk.sizes, dtype=t.dtype, device="cpu")
            for worker, chunk in self._chunks.items()
        }
        self._missing = sum(part.numel() for part in self._parts.values())

    def part(self, item: ReadItem) -> Tensor:
        part = self._parts[item.dest_index.index or 0]
        for dim, (begin, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            part = part.narrow(dim, begin, length)
        return part

    def has_come(self, item: ReadItem) -> bool:
        """Whether that was the last part."""
        self._missing -= math.prod(item.lengths)
        return self._missing == 0

    def load(self) -> None:
        if not self._sharding.tiles:
            with torch.no_grad():
                self._t.copy_(self._parts[0])
            engine.upload(self._t)
            return
        holder = {chunk.offsets: worker for worker, chunk in self._chunks.items()}
        parts = []
        for worker in range(len(self._sharding.devices)):
            indices = self._sharding.indices(self._t.shape, worker)
            where = torch.Size(each.start for each in indices)
            empty = any(each.start == each.stop for each in indices)
            sizes = [each.stop - each.start for each in indices]
            part = None if empty else self._parts[holder[where]]
            parts.append(torch.empty(sizes, dtype=self._t.dtype, device="cpu") if part is None else part)
        engine.load_local_parts(self._t, parts)
        engine.upload(self._t)


def _is_cut(value: Any) -> bool:
    return isinstance(value, Tensor) and engine.is_logical(value) and bool(op_sharding(value).tiles)


def _distinct(sharding: OpSharding, shape: Sequence[int]) -> list[tuple[int, ChunkStorageMetadata]]:
    """Return the parts of a tensor, each with the first worker that has it. Empty ones are left out, except
    one of a tensor without elements: without any, its key would not be saved.
    """
    found: list[tuple[int, ChunkStorageMetadata]] = []
    if not sharding.tiles:
        return [(0, ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape)))]
    for worker in range(len(sharding.devices)):
        indices = sharding.indices(shape, worker)
        sizes = torch.Size(each.stop - each.start for each in indices)
        if sharding.replica_id(worker) == 0 and (sizes.numel() or (0 in shape and not found)):
            found.append((worker, ChunkStorageMetadata(torch.Size(each.start for each in indices), sizes)))
    return found


def _write_items(key: str, cut: Tensor | CpuShards) -> list[WriteItem]:
    if isinstance(cut, CpuShards):
        shape, sharding = cut.global_shape, cut.sharding
        properties = TensorProperties(dtype=next(iter(cut.parts.values())).dtype)
    else:
        shape, sharding = cut.shape, op_sharding(cut)
        properties = TensorProperties(dtype=cut.dtype)
    return [
        WriteItem(
            index=MetadataIndex(key, chunk.offsets, worker),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=shape),
        )
        for worker, chunk in _distinct(sharding, shape)
    ]


def _nothing() -> io.BytesIO:
    """None, as ``torch.save`` writes it."""
    saved = io.BytesIO()
    torch.save(None, saved)
    saved.seek(0)
    return saved
