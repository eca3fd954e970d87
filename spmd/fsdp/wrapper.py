"""FSDPv2: every parameter sharded over one axis of a mesh, and the batch sharded over the same axis.

The wrapper shards the parameters when it is made. In forward, each layer computes with whole parameters,
which are gathered for it, on its part of the batch; gradients take the reverse path, and arrive at the
parameters summed and sharded. Outputs are sharded along the batch, so that the next layer computes in the
same way.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from spmd.fsdp.checkpointing import GATHERED
from spmd.fsdp.gathering import gathered, keep_changes, saving_shards
from spmd.fsdp.wrap import Policy, recursive_wrap
from spmd.sharding.marks import is_marked, mark_sharding
from spmd.sharding.mesh import Mesh, get_global_mesh
from spmd.sharding.partition_spec import PartitionSpec
from spmd.sharding.placing import place

__all__ = ["AXIS", "FSDPv2", "ShardOutput", "SpmdFullyShardedDataParallel"]

AXIS = "fsdp"
"""Name of the axis that shards parameters."""

ShardOutput: TypeAlias = Callable[[Any, Mesh], None]
"""Marks what a module returned: ``shard_output(output, mesh)``."""


class SpmdFullyShardedDataParallel(nn.Module):
    """A module whose parameters are sharded over the axis ``fsdp`` of a mesh.

    Each parameter that is not marked yet is sharded along its largest dimension. The module is moved to the
    logical device; tensors on the meta device are made there shard by shard, with ``reset_parameters``. Wrap
    layers separately, or give a policy, so that parameters are gathered layer by layer.

    Args:
        module: an ordinary module.
        mesh: mesh with an axis ``fsdp``; None for the global mesh.
        shard_output: marks the output of ``module``. By default the first dimension of a tensor, or of the
            first element of a tuple, is sharded over ``(extra_data_axis, "fsdp")``.
        auto_wrap_policy: decides which submodules are wrapped separately, see :mod:`spmd.fsdp.wrap`.
        auto_wrapper_callable: wraps these in place of this class, called with the same options.
        extra_data_axis: a second axis that shards the batch, and not the parameters.

    Raises:
        ValueError: there is no mesh, or the mesh lacks an axis, or a submodule is wrapped while there is a
            policy.
        RuntimeError: ``module`` is wrapped, or has no ``forward``; in forward, its output needs a
            ``shard_output``.

    Example::

        mesh = spmd.Mesh(range(n), (n, 1), ("fsdp", "model"))
        model = FSDPv2(model, mesh=mesh, auto_wrap_policy=policy)
        spmd.mark_sharding(batch, mesh, ("fsdp", None))
        model(batch).sum().backward()
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh | None = None,
        shard_output: ShardOutput | None = None,
        auto_wrap_policy: Policy | None = None,
        auto_wrapper_callable: Callable[..., nn.Module] | None = None,
        extra_data_axis: str | None = None,
    ) -> None:
        if isinstance(module, SpmdFullyShardedDataParallel):
            raise RuntimeError(
                "Cannot wrap a module that is already wrapped with FSDP. Wrap inner modules before outer "
                "ones, and each of them once"
            )
        if getattr(type(module), "forward", None) in (None, nn.Module.forward):
            raise RuntimeError(
                "The module wrapped by FSDP *must define a `forward` method: "
                f"{type(module).__name__} has none. Wrap its elements instead, or the module that calls them"
            )
        mesh = get_global_mesh() if mesh is None else mesh
        if mesh is None:
            raise ValueError("No mesh is provided and no global mesh is set. Please provide a mesh.")
        if mesh.get_axis_name_idx(AXIS) is None:
            raise ValueError("The mesh must have an axis named 'fsdp'.")
        if extra_data_axis is not None and mesh.get_axis_name_idx(extra_data_axis) is None:
            raise ValueError(f"The provided {extra_data_axis} axis is not in the mesh.")
        super().__init__()
        bare = place(module)  # all at once: what modules share stays shared
        if auto_wrap_policy is not None:
            wrapper = auto_wrapper_callable or SpmdFullyShardedDataParallel
            options: dict[str, Any] = {
                "mesh": mesh,
                "shard_output": shard_output,
                "extra_data_axis": extra_data_axis,
            }
            recursive_wrap(module, auto_wrap_policy, wrapper, only_wrap_children=True, **options)
        self._cut: set[Tensor] = set()
        self._mesh = mesh
        for each in module.modules():
            self._cut_parameters(each)
        _give_values(bare)
        self._orig_module = module
        vars(module)[GATHERED] = self._gathered
        self._extra_data_axis = extra_data_axis
        self._shard_output = shard_output or self._cut_batch

    @property
    def module(self) -> nn.Module:
        """The module."""
        return self._orig_module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._gathered():
            output = self._orig_module(*args, **kwargs)
        self._shard_output(output, self._mesh)
        return output

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_orig_module"), name)

    def __getitem__(self, key: Any) -> Any:
        return self._orig_module[key]  # type: ignore[index]

    def _cut_parameters(self, module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            if not is_marked(parameter):
                mark_sharding(parameter, self._mesh, _spec(parameter, AXIS, largest=True))
                self._cut.add(parameter)

    @contextlib.contextmanager
    def _gathered(self) -> Iterator[None]:
        """The parameters that this wrapper has cut are whole meanwhile."""
        whole: dict[Tensor, Tensor] = {}
        replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        try:
            for module in self._orig_module.modules():
                for name, parameter in module._parameters.items():
                    if parameter is not None and parameter in self._cut:
                        if parameter not in whole:
                            whole[parameter] = gathered(parameter)
                        replaced.append((module, name, parameter))
                        module._parameters[name] = whole[parameter]  # type: ignore[assignment]
            whole.clear()
            with saving_shards():
                yield
        finally:
            for module, name, parameter in replaced:
                keep_changes(parameter, module._parameters[name])
                module._parameters[name] = parameter

    def _cut_batch(self, output: Any, mesh: Mesh) -> None:
        if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
            warnings.warn(
                "The output is a tuple, and only its first element is sharded. If the others should be, too, "
                "give FSDPv2 a shard_output of your own.",
                stacklevel=3,
            )
            output = output[0]
        if not isinstance(output, Tensor):
            raise RuntimeError(
                f"The output type is not supported: {type(output)}. Please provide your own shard_output "
                "callable."
            )
        extra = self._extra_data_axis
        mark_sharding(output, mesh, _spec(output, AXIS if extra is None else (extra, AXIS)))


FSDPv2 = SpmdFullyShardedDataParallel
"""Its short name."""


def _give_values(bare: Sequence[nn.Module]) -> None:
    """To modules that were on the meta device."""
    for each in bare:
        reset = getattr(each, "reset_parameters", None)
        if reset is None:
            raise RuntimeError(
                f"{type(each).__name__} has parameters on the meta device and no reset_parameters() to "
                "give them values: define it, or make the module on the CPU"
            )
        reset()


def _spec(t: Tensor, axis: str | tuple[str, str], *, largest: bool = False) -> PartitionSpec:
    """That which cuts the first dimension, or the largest."""
    spec: list[Any] = [None] * t.dim()
    if spec:
        spec[max(range(t.dim()), key=lambda dim: t.shape[dim]) if largest else 0] = axis
    return tuple(spec)
