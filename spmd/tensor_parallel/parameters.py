"""Replaces parameters of parallelized modules by ``DTensor`` parameters; tied ones stay tied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from spmd.tensor_parallel.errors import ParallelError
from spmd.tensor_parallel.flow import REPLICATE
from spmd.tensor_parallel.site import Site

__all__ = ["distribute_parameters", "replicate_parameters"]

_DISTRIBUTED: Final = "_tensor_parallel_as"
"""Attribute of a parameter that was distributed: its replacement, for modules that are tied to it."""


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

    def distributed(tensor: Tensor, placement: Placement) -> DTensor:
        return distribute_tensor(tensor, site.mesh, [placement], src_data_rank=src_data_rank)

    _replace(module, placements, site, distributed, buffers=True)


def replicate_parameters(module: nn.Module, site: Site, *, buffers: bool) -> None:
    """The same with everything replicated, where every rank has the same values already: nothing is sent."""

    def replicated(tensor: Tensor, placement: Placement) -> DTensor:
        return DTensor.from_local(tensor.detach(), site.mesh, [placement], run_check=False)

    _replace(module, {}, site, replicated, buffers=buffers)


def _replace(
    module: nn.Module,
    placements: Mapping[str, Placement],
    site: Site,
    distributed: Callable[[Tensor, Placement], DTensor],
    *,
    buffers: bool,
) -> None:
    for path, child in module.named_modules():
        parameters: dict[str, Any] = child._parameters
        for name, parameter in parameters.items():
            placement = placements.get(name, REPLICATE) if not path else REPLICATE
            if isinstance(parameter, DTensor):
                _check_laid_out(parameter, name, placement, site)
            elif parameter is not None:
                tied = _tied(parameter, placement, site)
                if tied is None:
                    tied = _become(parameter, distributed(parameter, placement), site)
                child.register_parameter(name, tied)
        for name, buffer in child._buffers.items() if buffers else ():
            if buffer is not None and not isinstance(buffer, DTensor):
                child._buffers[name] = distributed(buffer, REPLICATE)


def _check_laid_out(parameter: DTensor, name: str, placement: Placement, site: Site) -> None:
    if parameter.device_mesh != site.mesh or parameter.placements != (placement,):
        raise ParallelError(
            site.says(
                f"expected {name} to be plain, or {placement!r} on {site.mesh}, got a DTensor laid out as "
                f"{parameter.placements} on {parameter.device_mesh}: fully_shard comes after this"
            )
        )


def _become(parameter: nn.Parameter, data: DTensor, site: Site) -> nn.Parameter:
    became = nn.Parameter(data, requires_grad=parameter.requires_grad)
    setattr(parameter, _DISTRIBUTED, (became, site))
    return became


def _tied(parameter: nn.Parameter, placement: Placement, site: Site) -> nn.Parameter | None:
    """Return the parameter that replaced this one in another module.

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
