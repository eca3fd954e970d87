"""Parameters of parallelized modules become ``DTensor`` parameters, and tied ones stay tied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from spmd.tensor_parallel.errors import ParallelError
from spmd.tensor_parallel.flow import REPLICATE
from spmd.tensor_parallel.site import Site

__all__ = ["distribute_parameters", "replicate_parameters"]

_DISTRIBUTED: Final = "_tensor_parallel_as"
"""On a parameter that was distributed: what it became, and where. A module tied to it asks there."""


def distribute_parameters(
    module: nn.Module, placements: Mapping[str, Placement], site: Site, src_data_rank: int | None
) -> None:
    """Put distributed parameters in place of a module's own; those not named, and buffers, are replicated.

    Args:
        module: with parameters that are plain, or on the meta device.
        placements: by parameter's name.
        site: of the module.
        src_data_rank: the rank in the mesh whose data are taken; None: every rank takes its own.
    """
    for path, child in module.named_modules():
        for name, parameter in child._parameters.items():
            if parameter is not None and not isinstance(parameter, DTensor):
                placement = placements.get(name, REPLICATE) if not path else REPLICATE
                tied = _tied(parameter, placement, site)
                if tied is None:
                    data = distribute_tensor(parameter, site.mesh, [placement], src_data_rank=src_data_rank)
                    tied = _become(parameter, data, site)
                child.register_parameter(name, tied)
        for name, buffer in child._buffers.items():
            if buffer is not None and not isinstance(buffer, DTensor):
                child._buffers[name] = distribute_tensor(
                    buffer, site.mesh, [REPLICATE], src_data_rank=src_data_rank
                )


def replicate_parameters(module: nn.Module, site: Site, *, buffers: bool) -> None:
    """The same with everything replicated, where every rank has the same values already: nothing is sent."""

    def replicated(tensor: Tensor) -> DTensor:
        return DTensor.from_local(tensor.detach(), site.mesh, [REPLICATE], run_check=False)

    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None and not isinstance(parameter, DTensor):
                tied = _tied(parameter, REPLICATE, site)
                if tied is None:
                    tied = _become(parameter, replicated(parameter), site)
                child.register_parameter(name, tied)
        for name, buffer in child._buffers.items():
            if buffers and buffer is not None and not isinstance(buffer, DTensor):
                child._buffers[name] = replicated(buffer)


def _become(parameter: nn.Parameter, data: DTensor, site: Site) -> nn.Parameter:
    became = nn.Parameter(data, requires_grad=parameter.requires_grad)
    setattr(parameter, _DISTRIBUTED, (became, site))
    return became


def _tied(parameter: nn.Parameter, placement: Placement, site: Site) -> nn.Parameter | None:
    """What this parameter has become in another module.

    Raises:
        ParallelError: that is laid out otherwise than it is needed here.
    """
    found: tuple[Any, Site] | None = getattr(parameter, _DISTRIBUTED, None)
    if found is None:
        return None
    became, other = found
    if became.placements != (placement,) or became.device_mesh != site.mesh:
        raise ParallelError(
            site.says(
                f"a parameter is tied to one of module '{other.name}' ({other.kind}), where it is "
                f"{became.placements[0]!r}; here it would be {placement!r}: choose styles "
                "that lay out both alike"
            )
        )
    return became  # type: ignore[no-any-return]
