"""Recording operations on tensors of the device: as a view, as a write, or unchanged.

The recorder knows neither views nor writes; here they become values and assignments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from spmd.engine.driver.aliases import Alias, base_of, read, refuse_repeated, steps_of_view, write
from spmd.engine.driver.current import engine
from spmd.engine.driver.generator import draw, of_device
from spmd.engine.driver.handlers import HANDLERS, resize
from spmd.engine.driver.logical_tensor import (
    LogicalTensor,
    alias_of,
    fetched,
    show_instead,
    uploaded,
    wrap,
    wrap_view,
)
from spmd.engine.driver.one_rank import collective
from spmd.engine.driver.operation import Operation
from spmd.engine.driver.recorder import Recorder
from spmd.engine.program.metas import Spec, infer
from spmd.engine.rules.catalog import decomposition
from spmd.torch_internals import (
    DataDependentOutputException,
    DispatchKey,
    DynamicOutputShapeException,
    ForceDispatchKeyGuard,
    excluded_keys,
    has_kernel,
    included_keys,
    to_copy,
)

__all__ = ["dispatch", "is_composite"]

aten: Final = torch.ops.aten
_ROUTES: Final[dict[int, Operation]] = {}


def dispatch(
    operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Record an operation on the device's tensors.

    Args:
        operator: PyTorch's overload.
        types: the types of its tensors, as PyTorch gives them to ``__torch_dispatch__``; not used.
        args, kwargs: its arguments.
    """
    operation = _ROUTES.get(id(operator)) or _first_seen(operator)
    if kwargs and operation.is_random and (own := of_device(kwargs.get("generator"))) is not None:
        common = {**kwargs, "generator": None}
        return draw(own, lambda: dispatch(operator, types, args, common))
    recorder = engine().recorder
    handler = operation.handler
    if handler is not None:
        return handler(*args, **kwargs) if kwargs else handler(*args)
    if operation.is_indexing:
        args = _with_indices_here(args)
    with recorder.lock:
        if operation.is_view:
            return _view(recorder, operation, args, kwargs)
        if operation.is_reshaping:
            return _reshape(args[0], _view(recorder, operation.pure, args, kwargs))
        if operation.mutated:
            return _mutate(recorder, operation, args, kwargs or {})
        try:
            entry, results = recorder.enter(operation, args, kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            pass
        else:
            if entry.is_flat:
                return wrap(results[0]) if entry.structure == 0 else [wrap(each) for each in results]
            return _returned(entry.structure, results)
    return _on_driver(operator, args, kwargs or {})


def _first_seen(operator: Any) -> Operation:
    """Decide how an operator is recorded, when it is first used."""
    operation = Operation.of(operator)
    operation.handler = decomposition(operator) or HANDLERS.get(operator)
    if operator.namespace == "c10d":
        operation.handler = collective(operator)
    if operation.handler is None and is_composite(operation.name):
        operation.handler = _composed_out(operation) if operation.is_out else operator.decompose
    _ROUTES[id(operator)] = operation  # which PyTorch keeps forever
    return operation


def is_composite(name: str) -> bool:
    """Whether PyTorch composes an operator of others, for tensors of any device."""
    return has_kernel(name, "CompositeImplicitAutograd")


def _with_indices_here(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Move indices that are on the CPU to the device, as other devices do."""
    first, indices, *others = args
    return first, [uploaded(each.detach().clone()) if _is_of_cpu(each) else each for each in indices], *others


def _is_of_cpu(index: Any) -> bool:
    return isinstance(index, Tensor) and not isinstance(index, LogicalTensor) and index.device.type == "cpu"


def _returned(structure: Any, results: list[Any]) -> Any:
    if type(structure) is int:
        return wrap(results[structure])
    if type(structure) is tuple:
        return [_returned(each, results) for each in structure]
    return structure


def _view(
    recorder: Recorder, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> Any:
    parent = args[0]._alias
    rest = args[1:]
    if kwargs:
        arguments = operation.overload._schema.arguments
        rest = (*rest, *(kwargs[each.name] for each in arguments[len(args) :] if each.name in kwargs))
    frozen = tuple([tuple(each) if type(each) is list else each for each in rest]) if rest else rest
    key = (operation, parent.spec, frozen)
    known = recorder.views[key]
    if known is None:
        operator = operation.overload
        specs = infer(operator, (parent.spec, *rest), {})
        steps = [(Operation.of(one), args) for one, args in steps_of_view(operator, parent, frozen)]
        known = recorder.views[key] = (
            isinstance(specs, Spec),
            list(zip((specs,) if isinstance(specs, Spec) else specs, steps, strict=True)),
        )
    one, found = known
    if one:
        ((spec, step),) = found
        return wrap_view(args[0], Alias(None, spec, parent, step))
    return [wrap_view(args[0], Alias(None, spec, parent, step)) for spec, step in found]


def _reshape(tensor: LogicalTensor, view: LogicalTensor) -> Tensor:
    """Turn a tensor into a view of its previous value, as ``transpose_`` does."""
    show_instead(tensor, view)
    return tensor


def _mutate(recorder: Recorder, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if operation.mutates_first and type(args[0]) is LogicalTensor:
        _, (result,) = recorder.enter(operation.pure, args, kwargs)
        _assign(recorder, operation, args[0]._alias, result)
        return args[0]
    targets: list[Any] = []
    returned: list[Any] = []
    for where in operation.mutated:
        arg = kwargs.get(where) if isinstance(where, str) else (args[where] if where < len(args) else None)
        if where in operation.returned:
            returned.append(arg)
        if isinstance(arg, (list, tuple)):
            targets += arg
        elif arg is not None:
            targets.append(arg)
    if operation.is_of_lists and len(targets) > 1 and _share_memory(targets, args):
        for place in range(len(targets)):  # each change is seen by those after it
            one = tuple([[each[place]] if isinstance(each, (list, tuple)) else each for each in args])
            _mutate(recorder, operation, one, kwargs)
        return None
    if operation.is_out:
        kwargs = {name: arg for name, arg in kwargs.items() if name not in operation.mutated}
    try:
        _, results = recorder.enter(operation.pure, args, kwargs)
    except (DynamicOutputShapeException, DataDependentOutputException):
        if not operation.is_out:
            raise
        made = _on_driver(operation.pure.overload, args, kwargs)
        results = [each._alias for each in (made if isinstance(made, (list, tuple)) else (made,))]
    results = [each for each in results if each is not None]
    others = results[: len(results) - len(targets)]
    for where in operation.mutated:  # of lists, autograd leaves it to kernels
        arg = kwargs.get(where) if isinstance(where, str) else (args[where] if where < len(args) else None)
        if isinstance(arg, (list, tuple)):
            increment_version(arg)
    for target, result in zip(targets, results[len(others) :], strict=True):
        if operation.is_out:
            _write_out(recorder, operation, target, result)
        else:
            _assign(recorder, operation, target._alias, result)
    if operation.returns_nothing:
        return None
    every = [*(wrap(each) for each in others), *returned]
    return every[0] if len(every) == 1 else tuple(every)


def _share_memory(changed: Sequence[Any], args: tuple[Any, ...]) -> bool:
    """Whether the change of one tensor of a list changes others in the list, or what they are changed by."""
    places: dict[Alias, int] = {}
    for place, each in enumerate(changed):
        if places.setdefault(base_of(each._alias), place) != place:
            return True
    for arg in args[1:]:
        is_list = isinstance(arg, (list, tuple))
        for place, each in enumerate(arg if is_list else (arg,)):
            if isinstance(each, LogicalTensor):
                found = places.get(base_of(each._alias))
                if found is not None and not (is_list and found == place):
                    return True
    return False


def _composed_out(operation: Operation) -> Callable[..., Any]:
    """Write the result of the functional form of an operator with ``out=`` that PyTorch composes of others.

    Its composition for ``out=`` may write through ``_unsafe_view``, which returns a separate value here, or
    leave ``out`` unchanged if a tensor is of a subclass. Factories, which have no functional form with the
    same arguments, use the composition.
    """
    try:
        pure = operation.pure.overload
    except NotImplementedError:
        composed: Callable[..., Any] = operation.overload.decompose
        return composed

    def compute(*args: Any, **kwargs: Any) -> Any:
        targets = [kwargs.pop(str(name)) for name in operation.mutated]
        made = pure(*args, **kwargs)
        results = made if isinstance(made, (list, tuple)) else (made,)
        recorder = engine().recorder
        with recorder.lock:
            for target, result in zip(targets, results, strict=True):
                _write_out(recorder, operation, target, alias_of(result))
        return targets[0] if len(targets) == 1 else tuple(targets)

    return compute


def _write_out(recorder: Recorder, operation: Operation, target: LogicalTensor, result: Alias) -> None:
    """Resize a tensor given as ``out=`` to the result's shape and strides, and write the result to it in its
    own dtype.
    """
    alias = alias_of(target)
    read(recorder, result)
    if not (operation.is_random or torch.can_cast(result.spec.dtype, alias.spec.dtype)):
        raise RuntimeError(
            f"result type {result.spec.dtype} can't be cast to the desired output type {alias.spec.dtype}"
        )
    resize(target, result.spec.shape, stride=result.spec.stride)
    _assign(recorder, operation, alias_of(target), result)


def _assign(recorder: Recorder, operation: Operation, alias: Alias, result: Alias) -> None:
    """Replace a tensor's value by the result of an operation that changes it."""
    if result.spec is alias.spec and alias.parent is None and recorder.changes is None:  # nearly always
        alias.value = result.value
        alias.version += 1
        return
    if operation.name not in _FILLS:
        refuse_repeated(alias)
    if result.spec.shape != alias.spec.shape:
        raise RuntimeError(
            f"the result has shape {list(result.spec.shape)}, and cannot be written into a tensor of "
            f"shape {list(alias.spec.shape)}"
        )
    if result.spec.dtype != alias.spec.dtype:
        (result,) = recorder.record(to_copy, (result,), {"dtype": alias.spec.dtype})
    assert result.value is not None
    write(recorder, alias, result.value)


_FILLS: Final = ("aten::fill_.Scalar", "aten::fill_.Tensor", "aten::zero_")
"""Operators that also write to elements that ``expand`` has repeated."""


def _on_driver(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Execute an operation on the driver, because the shape of its result depends on values."""

    def here(tree: Any) -> Any:
        if isinstance(tree, LogicalTensor):
            return fetched(tree._alias)
        if isinstance(tree, (list, tuple)):
            return type(tree)(here(each) for each in tree)
        return tree

    def there(tree: Any) -> Any:
        if isinstance(tree, Tensor):
            return uploaded(tree)
        if isinstance(tree, (list, tuple)):
            return type(tree)(there(each) for each in tree)
        return tree

    kwargs = {name: here(each) for name, each in kwargs.items() if name not in ("device", "pin_memory")}
    args = here(args)
    with _lazy_views():
        made = operator(*args, **kwargs)
    return there(made)


def _lazy_views() -> Any:
    """Resolve lazy conjugates and negatives in kernels inside: ``__torch_dispatch__`` runs without the
    dispatch keys that do so, and a kernel would read what is in memory.
    """
    excluded = excluded_keys()
    for key in (DispatchKey.Conjugate, DispatchKey.Negative, DispatchKey.ZeroTensor):
        excluded = excluded.remove(key)
    return ForceDispatchKeyGuard(included_keys(), excluded)
