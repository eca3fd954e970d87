"""``explain``: where the parameters of a parallelized model are, and what its modules communicate."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from rich.console import Group
from rich.table import Table
from torch import nn
from torch.distributed.tensor import DTensor

from spmd.tensor_parallel.errors import ParallelTypeError
from spmd.tensor_parallel.traffic import Transfer, recorded

__all__ = ["explain"]

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def explain(module: nn.Module, *inputs: Any, **kwargs: Any) -> Group:
    """Tables of a module's parameters and, if it is given inputs, of what it communicates.

    With inputs, the module is called with them, and ``backward`` from the sum of what it returns if that
    needs a gradient: every rank of the mesh has to take part. The parameters' ``.grad`` are left as they
    were. Bytes are those of whole tensors: the sum of an all-reduce, all parts of an all-gather. Collectives
    of ``DTensor`` s stand in lines of their own, since those do not say for which module they are.

    Args:
        module: parallelized, wholly or in parts.
        inputs: for one call.
        kwargs: likewise.

    Returns:
        What ``rich.print`` shows.

    Raises:
        ParallelTypeError: ``module`` is none.

    Example::

        rich.print(spmd.explain(model, torch.ones(4, 512)))
    """
    if not isinstance(module, nn.Module):
        raise ParallelTypeError(f"expected module to be a torch.nn.Module, got {type(module).__name__}")
    parts = [_parameters(module)]
    if inputs or kwargs:
        parts.append(_communicated(module, inputs, kwargs))
    return Group(*parts)


def _parameters(module: nn.Module) -> Table:
    table = Table("parameter", "shape", "placement", "local shape", title="parameters on this rank")
    table.add_column("bytes per rank", justify="right")
    total = 0
    for name, parameter in module.named_parameters():
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        placements = ", ".join(map(repr, parameter.placements)) if isinstance(parameter, DTensor) else "plain"
        total += local.nbytes
        table.add_row(name, _shape(parameter), placements, _shape(local), _bytes(local.nbytes))
    table.add_section()
    table.add_row("all", "", "", "", _bytes(total))
    return table


def _communicated(module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Table:
    table = Table("module", "when", "collective", title="communicated by one call")
    table.add_column("times", justify="right")
    table.add_column("bytes", justify="right")
    before = [parameter.grad for parameter in module.parameters()]
    for parameter in module.parameters():
        parameter.grad = None
    try:
        with recorded() as forward:
            result = module(*inputs, **kwargs)
        with recorded() as backward:
            if getattr(result, "requires_grad", False):
                result.sum().backward()
    finally:
        for parameter, gradient in zip(module.parameters(), before, strict=True):
            parameter.grad = gradient
    for when, transfers in (("forward", forward), ("backward", backward)):
        times = Counter((each.module, each.kind) for each in transfers)
        for (name, kind), count in times.items():
            nbytes = _sum(transfers, name, kind)
            table.add_row(
                "(DTensors)" if name is None else name or "(itself)", when, kind, str(count), _bytes(nbytes)
            )
        table.add_section()
    return table


def _sum(transfers: list[Transfer], name: str | None, kind: str) -> int:
    return sum(each.nbytes for each in transfers if (each.module, each.kind) == (name, kind))


def _shape(tensor: Any) -> str:
    return " x ".join(map(str, tensor.shape)) or "scalar"


def _bytes(number: float) -> str:
    for unit in _UNITS:
        if number < 1024 or unit == _UNITS[-1]:
            return f"{number:,.0f} {unit}" if unit == "B" else f"{number:,.1f} {unit}"
        number /= 1024
    raise AssertionError("unreachable")
