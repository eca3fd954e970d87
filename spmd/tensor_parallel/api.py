"""``parallelize_module``: assigns styles to modules, and checks them before anything changes."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, overload

from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from spmd.tensor_parallel.errors import ParallelError, ParallelTypeError
from spmd.tensor_parallel.prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from spmd.tensor_parallel.random_numbers import draw_as_one_process, warn_if_seeded_differently
from spmd.tensor_parallel.served import ShardedModule, build
from spmd.tensor_parallel.site import Site, check_mesh
from spmd.tensor_parallel.styles import NamedStyle, ParallelStyle
from spmd.torch_internals import current_mesh

__all__ = ["parallelize_module"]

_ONLY_LAYOUTS = (PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput)


Plan = ParallelStyle | Mapping[str, Any] | None


@overload
def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: Plan = None,
    *,
    src_data_rank: int | None = 0,
    strict: bool = False,
) -> nn.Module: ...


@overload
def parallelize_module(
    module: Callable[[], nn.Module],
    *,
    workers: Sequence[str],
    parallelize_plan: ParallelStyle | Mapping[str, Any],
    strict: bool = False,
    initialize: Callable[[nn.Module], object] | None = None,
    max_batch_size: int = 1,
    timeout: float = 300.0,
) -> ShardedModule: ...


def parallelize_module(
    module: nn.Module | Callable[[], nn.Module],
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: Plan = None,
    *,
    src_data_rank: int | None = 0,
    strict: bool = False,
    workers: Sequence[str] | None = None,
    initialize: Callable[[nn.Module], object] | None = None,
    max_batch_size: int = 1,
    timeout: float = 300.0,
) -> nn.Module | ShardedModule:
    """Parallelize a module, or submodules of it, over a one-dimensional mesh, whose ranks must all call it in
    the same way; or, with ``workers``, over workers of the RPC group, in which case one process calls it
    alone.

    With ``workers``, each of them builds the module on the meta device and allocates memory for its parts
    only. One model at a time is made on the same workers. If they have no default process group, one is made,
    which is kept.

    Args:
        module: the module, changed in place. With ``workers`` a function that returns it, which is sent to
            them.
        device_mesh: a one-dimensional mesh; default: the one whose ``with`` block this is in. Of a mesh with
            more dimensions, pass a slice: ``mesh["tp"]``.
        parallelize_plan: a style for the module itself, or styles by the names of submodules:
            ``"layers.0.w1"``. Each part of a name may have wildcards, ``"layers.*.w1"``; ``""`` is the module
            itself. Default None does nothing, with a warning.
        src_data_rank: rank of the mesh whose parameters are used; None: each rank uses its own, and nothing
            is communicated.
        strict: whether names that match no module are an error, rather than a warning.
        workers: names of the workers; the first is rank 0 in the model. ``"worker1/cuda:0"`` puts that
            worker's part on a device; device maps say where tensors go, also from the first worker to the
            others, and CPU inputs are copied to the device.
        initialize: with ``workers``, initializes the module, whose parameters are ``DTensor`` s, on each;
            random numbers are not those of one process. Default: ``reset_parameters`` of each submodule.
        max_batch_size: with ``workers``, maximum number of rows of waiting calls that are executed together,
            if each has one positional tensor, ``[rows, ...]``, and no gradient. Default 1: each separately.
        timeout: with ``workers``, timeout in seconds for making the model, and for each collective.

    Returns:
        The module, or the object that represents it.

    Raises:
        ParallelTypeError: the plan, or an entry of it, has another type.
        ParallelError: the mesh is unsuitable; a module is parallelized already; a parameter is tied to one of
            a module that the plan omits; in strict mode, a name matches nothing; a parameter on the workers
            cannot be initialized.
        NotInMeshError: this process is not in the mesh.
        UnsupportedModuleError: a style does not support a module.
        UnknownWorkerError: there is no such worker.

    Example::

        mesh = init_device_mesh("cpu", (4,))
        parallelize_module(model, mesh, {"layers.*.w1": ColwiseParallel(), "layers.*.w2": RowwiseParallel()})

        served = parallelize_module(partial(Net, 512), workers=["w1", "w2"], parallelize_plan=plan)
        served(x)
    """
    if workers is not None:
        if device_mesh is not None:
            raise ParallelTypeError("expected a mesh or workers, got both")
        if parallelize_plan is None:
            raise ParallelTypeError("expected a plan for the workers, got none")
        cut = partial(_parallelized, parallelize_plan=parallelize_plan, src_data_rank=None, strict=strict)
        return build(module, workers, cut, initialize, max_batch_size, timeout)
    return _parallelized(module, device_mesh, parallelize_plan, src_data_rank, strict)


def _parallelized(
    module: Any,
    device_mesh: DeviceMesh | None,
    parallelize_plan: Plan,
    src_data_rank: int | None,
    strict: bool,
) -> nn.Module:
    mesh = current_mesh() if device_mesh is None else device_mesh
    if parallelize_plan is None:
        warnings.warn(
            "No parallelize_plan is provided and auto-parallel is not supported at the moment, so this "
            "parallelize_module call will do nothing.",
            stacklevel=3,
        )
        unchanged: nn.Module = module
        return unchanged
    if not isinstance(module, nn.Module):
        raise ParallelTypeError(f"expected module to be a torch.nn.Module, got {type(module).__name__}")
    check_mesh(mesh, type(module).__name__)
    if src_data_rank is not None and src_data_rank not in range(mesh.size()):
        raise ParallelError(
            f"rank {dist.get_rank()}, module {type(module).__name__}: expected src_data_rank to be None or a "
            f"rank of the mesh, 0 to {mesh.size() - 1}, got {src_data_rank!r}"
        )
    unmatched: list[str] = []
    steps = list(_resolve(module, "", parallelize_plan, "", unmatched))
    if unmatched:
        complaints = [_unmatched(key, module) for key in unmatched]
        if strict:
            raise ParallelError(f"rank {dist.get_rank()}: {'; '.join(complaints)}")
        for complaint in complaints:
            warnings.warn(f"{complaint}, skipping this plan entry.", stacklevel=3)
    _check_ties(module, steps)
    draw_as_one_process()
    if src_data_rank is not None:
        warn_if_seeded_differently(module, mesh)
    result = module
    for step in steps:
        site = Site.of(step.module, mesh, step.name)
        if isinstance(step.style, NamedStyle):
            step.style.parallelize(step.module, site, src_data_rank)
        else:
            step.style.src_data_rank = src_data_rank
            applied = step.style._apply(step.module, mesh)
            result = applied if step.module is module and step.style is parallelize_plan else result
    return result


@dataclass(frozen=True)
class _Step:
    name: str
    module: nn.Module
    style: ParallelStyle


def _resolve(module: nn.Module, name: str, plan: Any, key: str, unmatched: list[str]) -> Iterator[_Step]:
    """The steps of a plan for a module of this name; ``key`` is that of the plan in the whole one."""
    if isinstance(plan, ParallelStyle):
        yield _Step(name, module, plan)
    elif isinstance(plan, Mapping):
        for path, inner in plan.items():
            if not isinstance(path, str):
                raise ParallelTypeError(
                    f"rank {dist.get_rank()}: expected keys of a plan to be names of modules, got {path!r}"
                )
            whole = ".".join(part for part in (key, path) if part)
            matched = list(_matching(module, name, path.split("."))) if path else [(name, module)]
            if not matched:
                unmatched.append(whole)
            for found, child in matched:
                yield from _resolve(child, found, inner, whole, unmatched)
    else:
        raise ParallelTypeError(
            f"rank {dist.get_rank()}, plan for module '{name}': Expect Union[ParallelStyle, Dict[str, "
            f"ParallelStyle]] for parallelize_plan, {type(plan)} found!"
        )


def _matching(module: nn.Module, name: str, tokens: list[str]) -> Iterator[tuple[str, nn.Module]]:
    if not tokens:
        yield name, module
        return
    for child_name, child in module.named_children():
        if fnmatchcase(child_name, tokens[0]):
            yield from _matching(child, f"{name}.{child_name}" if name else child_name, tokens[1:])


def _unmatched(key: str, module: nn.Module) -> str:
    names = [name for name, _ in module.named_modules() if name]
    near = difflib.get_close_matches(key, names, n=3)
    hint = f"; near it there are {', '.join(repr(name) for name in near)}" if near else ""
    return (
        f"Parallelize plan key '{key}' could not be resolved: no submodule matching it in module "
        f"{type(module).__name__}{hint}"
    )


def _check_ties(module: nn.Module, steps: list[_Step]) -> None:
    """A parameter that modules share is laid out anew in all of them, or the tie would be cut."""
    sharded = {id(step.module) for step in steps if not isinstance(step.style, _ONLY_LAYOUTS)}
    if any(id(module) == each for each in sharded):
        return
    covered = {id(inner) for step in steps if id(step.module) in sharded for inner in step.module.modules()}
    holders: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for name, each in module.named_modules():
        for key, parameter in each._parameters.items():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append((name, each, key))
    for shared in holders.values():
        inside = [entry for entry in shared if id(entry[1]) in covered]
        outside = [entry for entry in shared if id(entry[1]) not in covered]
        if inside and outside:
            (name, _, key), (other, _, other_key) = inside[0], outside[0]
            raise ParallelError(
                f"rank {dist.get_rank()}, module '{name}': its {key} is tied to {other_key} of module "
                f"'{other}', which the plan leaves out: name both, with styles that lay it out alike"
            )
