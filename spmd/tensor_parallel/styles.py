"""How one module is parallelized: the styles of parameters and sequences.

A style changes one module in place: its parameters become ``DTensor`` parameters, and its ``forward``
computes on local shards. Modules that compute in a way of their own (subclasses of ``nn.Linear`` with another
``forward``, say) run on ``DTensor`` s instead: right, and slower.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from spmd.tensor_parallel.embedding import embedding_forward
from spmd.tensor_parallel.errors import ParallelError, ParallelTypeError, UnsupportedModuleError
from spmd.tensor_parallel.flow import PARTIAL, REPLICATE, Flow
from spmd.tensor_parallel.linear import linear_forward
from spmd.tensor_parallel.parameters import distribute_parameters, replicate_parameters
from spmd.tensor_parallel.pointwise import SequenceFlow, sequence_forward
from spmd.tensor_parallel.resharding import check_layout, same
from spmd.tensor_parallel.site import Site
from spmd.torch_internals import DISTRIBUTED

__all__ = ["ColwiseParallel", "NamedStyle", "ParallelStyle", "RowwiseParallel", "SequenceParallel"]


class NamedStyle(ParallelStyle):
    """A style that is told where in the model the module stands."""

    @abstractmethod
    def parallelize(self, module: nn.Module, site: Site, src_data_rank: int | None) -> None:
        """Change the module in place."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.parallelize(module, Site.of(module, device_mesh), self.src_data_rank)
        return module


class _Sharded(NamedStyle):
    """The common part of colwise and rowwise layers."""

    default_input: Placement
    default_output: Placement

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        name = type(self).__name__
        for what, layout in (("input_layouts", input_layouts), ("output_layouts", output_layouts)):
            if layout is None:
                continue
            if not isinstance(layout, Placement):
                raise ParallelTypeError(
                    f"{name}: expected {what} to be a Placement, got {type(layout).__name__}"
                )
            check_layout(layout, f"{name}'s {what}")
        self.input_layouts = (input_layouts or self.default_input,)
        self.output_layouts = (output_layouts or self.default_output,)
        self.use_local_output = use_local_output

    def parallelize(self, module: nn.Module, site: Site, src_data_rank: int | None) -> None:
        if isinstance(module, nn.Linear):
            flow, placements = self._linear(site)
            forward: Any = linear_forward if type(module).forward is nn.Linear.forward else None
        elif isinstance(module, nn.Embedding):
            flow, placements = self._embedding(site)
            if module.sparse:
                raise UnsupportedModuleError(site.says("sparse gradients cannot be sharded"))
            own = type(module).forward is not nn.Embedding.forward or module.max_norm is not None
            forward = None if own else embedding_forward
        else:
            raise UnsupportedModuleError(
                site.says(
                    f"{type(self).__name__} currently only support nn.Linear and nn.Embedding! "
                    f"Expected one of them, got {type(module).__name__}"
                )
            )
        if "weight" not in module._parameters:
            raise UnsupportedModuleError(
                site.says("expected a parameter named weight, got one that is computed (parametrized)")
            )
        begin(module, site)
        distribute_parameters(module, placements, site, src_data_rank)
        module._tensor_parallel = flow  # type: ignore[assignment]
        if forward is None:
            forward = functools.partial(_dtensor_forward, type(module).forward, flow)
        module.forward = MethodType(forward, module)  # type: ignore[method-assign]

    def _flow(self, site: Site, wanted: Placement, gradient: Placement, natural: Placement, w: int) -> Flow:
        (given,), (output,) = self.input_layouts, self.output_layouts
        return Flow(
            site,
            same(given),
            same(wanted),
            same(gradient),
            same(natural),
            same(output),
            self.use_local_output,
            same(Shard(w)),
        )

    @abstractmethod
    def _linear(self, site: Site) -> tuple[Flow, dict[str, Placement]]: ...

    @abstractmethod
    def _embedding(self, site: Site) -> tuple[Flow, dict[str, Placement]]: ...

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, "
            f"output_layouts={self.output_layouts}, use_local_output={self.use_local_output})"
        )


class ColwiseParallel(_Sharded):
    """Cut an ``nn.Linear`` by its output features, or an ``nn.Embedding`` by its vectors' elements.

    Linear: weight ``[out, in]`` and bias ``[out]`` become ``Shard(0)``. Embedding: weight ``Shard(1)``.
    Nothing is communicated forward; backward all-reduces the gradient of the input, while that of the weight
    is computed. Layers that share one ``DTensor`` input have its gradient reduced once for all.

    Args:
        input_layouts: how a plain input is laid out; default ``Replicate()``. A ``DTensor`` says itself.
        output_layouts: how the output shall be laid out; default ``Shard(-1)``.
        use_local_output: give a plain tensor, this rank's part, rather than a ``DTensor``; default True.

    Raises:
        ParallelTypeError: a layout is no placement.
        ParallelError: a layout is not ``Shard``, ``Replicate`` or ``Partial``.

    Example::

        mesh = init_device_mesh("cpu", (4,))
        parallelize_module(mlp, mesh, {"w1": ColwiseParallel(), "w2": RowwiseParallel()})
        mlp(x)  # x and the result are the same on all ranks: one all-reduce forward, one backward
    """

    default_input = REPLICATE
    default_output = Shard(-1)

    def _linear(self, site: Site) -> tuple[Flow, dict[str, Placement]]:
        flow = self._flow(site, REPLICATE, PARTIAL, Shard(-1), 0)
        return flow, {"weight": Shard(0), "bias": Shard(0)}

    def _embedding(self, site: Site) -> tuple[Flow, dict[str, Placement]]:
        return self._flow(site, REPLICATE, PARTIAL, Shard(-1), 1), {"weight": Shard(1)}


class RowwiseParallel(_Sharded):
    """Cut an ``nn.Linear`` by its input features, or an ``nn.Embedding`` by its vocabulary.

    Linear: weight ``[out, in]`` becomes ``Shard(1)``, bias ``Replicate()``. Embedding: weight ``Shard(0)``.
    Each rank computes a partial sum of the output; it is all-reduced (output ``Replicate()``),
    reduce-scattered (``Shard(dim)``) or left as it is (``Partial()``).

    Args:
        input_layouts: how a plain input is laid out; default ``Shard(-1)``, and for an embedding's indices
            that is what PyTorch declares too: pass ``Replicate()``.
        output_layouts: how the output shall be laid out; default ``Replicate()``.
        use_local_output: give a plain tensor, this rank's part, rather than a ``DTensor``; default True.

    Raises:
        ParallelTypeError: a layout is no placement.
        ParallelError: a layout is not ``Shard``, ``Replicate`` or ``Partial``.
    """

    default_input = Shard(-1)
    default_output = REPLICATE

    def _linear(self, site: Site) -> tuple[Flow, dict[str, Placement]]:
        flow = self._flow(site, Shard(-1), Shard(-1), PARTIAL, 1)
        return flow, {"weight": Shard(1), "bias": REPLICATE}

    def _embedding(self, site: Site) -> tuple[Flow, dict[str, Placement]]:
        return self._flow(site, REPLICATE, REPLICATE, PARTIAL, 0), {"weight": Shard(0)}


class SequenceParallel(NamedStyle):
    """Run a module on sequence shards, with replicated parameters.

    For what computes each position by itself: ``nn.LayerNorm``, ``nn.RMSNorm`` and ``nn.Dropout`` run on
    local tensors; other modules run on ``DTensor`` s. A plain input ``[batch, seq / n, ...]`` is taken to be
    sharded along the sequence; a ``DTensor`` is redistributed to that. Parameters are taken to be the same on
    all ranks and keep their ``requires_grad``; their gradients are all-reduced, those of one module at once.

    Dropout is that of one process whose generator stands where those of the ranks do (seed them alike): each
    rank draws the mask of the whole tensor and takes its slice. So it also serves dropout between a colwise
    and a rowwise layer: ``SequenceParallel(sequence_dim=-1, use_local_output=True)``.

    Args:
        sequence_dim: the dimension that is sharded; default 1.
        use_local_output: give a plain tensor rather than a ``DTensor``; default False.
        independent_dropout: draw this rank's part of a mask only, from a stream of its own: cheaper, and not
            what one process would draw. Default False.
    """

    def __init__(
        self, *, sequence_dim: int = 1, use_local_output: bool = False, independent_dropout: bool = False
    ) -> None:
        given: Any = sequence_dim
        if not isinstance(given, int):
            kind = type(given).__name__
            raise ParallelTypeError(f"SequenceParallel: expected sequence_dim to be an int, got {kind}")
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output
        self.independent_dropout = independent_dropout

    def parallelize(self, module: nn.Module, site: Site, src_data_rank: int | None) -> None:
        begin(module, site)
        flow = SequenceFlow(site, self.sequence_sharding[0], self.use_local_output, self.independent_dropout)
        replicate_parameters(module, site, buffers=not flow.is_local(module))
        module._tensor_parallel = flow  # type: ignore[assignment]
        module.forward = MethodType(functools.partial(sequence_forward, type(module).forward), module)

    def __repr__(self) -> str:
        independent = ", independent_dropout=True" if self.independent_dropout else ""
        dim = self.sequence_sharding[0].dim
        return f"SequenceParallel(sequence_dim={dim}, use_local_output={self.use_local_output}{independent})"


def begin(module: nn.Module, site: Site) -> None:
    """A style that has parameters begins with a module.

    Raises:
        ParallelError: another one has been there.
    """
    if hasattr(module, "_tensor_parallel") or getattr(module, DISTRIBUTED, False):
        raise ParallelError(
            site.says("expected a module that is not parallelized yet, got one that already is: name it once")
        )


def _dtensor_forward(
    own: Callable[..., Any], flow: Flow, self: nn.Module, /, *args: Any, **kwargs: Any
) -> Any:
    """Run a module's own forward on ``DTensor`` s."""
    given, rest = flow.site.first_input(args, kwargs)
    if not isinstance(given, DTensor):
        given = DTensor.from_local(given, flow.site.mesh, (flow.given,), run_check=False)
    given = given.redistribute(placements=(flow.wanted,))
    result = own(self, given, *rest, **kwargs)
    if not isinstance(result, DTensor):
        raise ParallelError(
            flow.site.says(f"expected its output to be a DTensor, got {type(result).__name__}")
        )
    result = result.redistribute(placements=(flow.output,))
    return result.to_local() if flow.local_output else result
