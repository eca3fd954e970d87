"""The device ``spmd:0``: tensors without data, whose operations are recorded.

PyTorch's one slot for a device of others (``PrivateUse1``) is set up from Python. Tensors on it are of a
wrapper subclass, so that what C++ copies stays ours; operators that make tensors from nothing are registered
for the device. Autograd works as on any device. Its backward runs on a thread of PyTorch's, so nothing here
is local to threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.autograd.graph import increment_version
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from spmd.engine import autocast, operators
from spmd.engine.aliases import Alias, Value, as_strided_steps, read, steps_of_view, write
from spmd.engine.errors import NotInSpmdModeError
from spmd.engine.metas import Spec, infer, spec_of
from spmd.engine.operation import Operation
from spmd.engine.recorder import Recorder

__all__ = [
    "DEVICE",
    "Engine",
    "LogicalTensor",
    "alias_of",
    "engine",
    "fetched",
    "set_engine",
    "set_up",
    "uploaded",
    "wrap",
]

aten: Final = torch.ops.aten
NAME: Final = "spmd"


class Engine(Protocol):
    """What tensors are on: a recorder, and workers behind it."""

    recorder: Recorder

    @property
    def workers(self) -> int:
        """How many workers there are."""
        ...

    def fetch(self, value: Value) -> Tensor:
        """A value, whole, from the workers."""
        ...

    def fetch_parts(self, value: Value, workers: Sequence[int]) -> dict[int, Tensor]:
        """What these workers have of a value, by worker."""
        ...


_engine: Engine | None = None


def set_engine(current: Engine | None) -> None:
    """Say what the device is from now on; None: nothing."""
    global _engine
    _engine = current


def engine() -> Engine:
    """What the device is.

    Raises:
        NotInSpmdModeError: nothing.
    """
    if _engine is None:
        raise NotInSpmdModeError(
            "there are no workers behind the device 'spmd:0': call spmd.use_spmd() first. Tensors that were "
            "made before spmd.shutdown() are lost with the workers"
        )
    return _engine


class LogicalTensor(torch.Tensor):
    """A tensor on ``spmd:0``. Its data, if it is computed at all, is on the workers."""

    __slots__ = ("_alias",)
    _alias: Alias
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return dispatch(func, args, kwargs)

    @property
    def data(self) -> Tensor:
        """As of any tensor; assigning it makes this tensor show the other one's memory."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, LogicalTensor):
            raise RuntimeError(
                "incompatible tensor type: .data of a tensor on spmd:0 can only be one on spmd:0; use "
                ".data.copy_(value), or .data = value.to(spmd.device())"
            )
        _TENSOR_DATA.__set__(self, value)
        self._alias = value._alias

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if not self.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol")
        if id(self) in memo:
            found: Tensor = memo[id(self)]
            return found
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        copied.__dict__.update(
            {name: _deepcopied(each, memo) for name, each in self.__dict__.items() if name != "_alias"}
        )
        if self.grad is not None:
            copied.grad = _deepcopied(self.grad, memo)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _restored, (self.detach().cpu(), self.requires_grad)

    def __format__(self, spec: str) -> str:
        return format(self.item() if self.dim() == 0 else repr(self), spec)

    def tolist(self) -> Any:
        """As of any tensor; waits for the workers."""
        return self.detach().cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Raises, as for any tensor that is not on the CPU, unless ``force``."""
        if not force:
            raise TypeError(
                "can't convert spmd:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
                "host memory first."
            )
        return self.detach().cpu().numpy()

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shown = repr(self.detach().cpu())
        more = f", device='{NAME}:0'"
        if self.grad_fn is not None:
            more += f", grad_fn=<{type(self.grad_fn).__name__}>"
        elif self.requires_grad:
            more += ", requires_grad=True"
        return f"{shown[:-1]}{more})"


_make: Final[Any] = torch.Tensor._make_wrapper_subclass
_TENSOR_DATA: Final[Any] = torch._C.TensorBase.__dict__["data"]


def _deepcopied(each: Any, memo: dict[int, Any]) -> Any:
    from copy import deepcopy

    return deepcopy(each, memo)


def _restored(data: Tensor, requires_grad: bool) -> Tensor:
    """A tensor that was saved: on the device again, where there is one; else on the CPU."""
    return (data if _engine is None else data.to(DEVICE)).requires_grad_(requires_grad)


def wrap(alias: Alias) -> LogicalTensor:
    """A tensor that shows this."""
    spec = alias.spec
    made: LogicalTensor = _make(
        LogicalTensor, spec.shape, spec.stride, spec.offset, None, spec.dtype, torch.strided, DEVICE
    )
    made._alias = alias
    return made


def alias_of(tensor: Tensor) -> Alias:
    """What a tensor shows.

    Raises:
        TypeError: it is not on the device.
    """
    if not isinstance(tensor, LogicalTensor):
        where = getattr(tensor, "device", type(tensor).__name__)
        raise TypeError(f"expected a tensor on spmd:0, got one on {where}: move it with .to(spmd.device())")
    return tensor._alias


def uploaded(data: Tensor) -> LogicalTensor:
    """A tensor with this content, which goes to the workers when it is first used there.

    Args:
        data: on the CPU; taken over.
    """
    spec = spec_of(data)
    return wrap(Alias(Value(spec, data=data), spec))


def fetched(alias: Alias) -> Tensor:
    """The content, on the CPU."""
    current = engine()
    with current.recorder.lock:
        value = read(current.recorder, alias)
        spec = alias.spec
    content = current.fetch(value)
    if content.stride() != spec.stride and not spec.offset and content.numel():
        laid_out = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)
        if torch._prims_common.is_non_overlapping_and_dense_or_false(laid_out):
            return laid_out.copy_(content)
    return content


# ---- operations

Handler = Callable[..., Any]
_HANDLERS: Final[dict[Any, Handler]] = {}
_ROUTES: Final[dict[int, Operation]] = {}


def dispatch(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Record an operation on the device's tensors."""
    recorder = engine().recorder
    operation = _ROUTES.get(id(operator)) or _first_seen(operator)
    handler = operation.handler
    if handler is not None:
        return handler(*args, **(kwargs or {}))
    with recorder.lock:
        if operation.is_view:
            return _view(recorder, operator, args, kwargs)
        if operation.is_reshaping:
            return _reshape(args[0], _view(recorder, operation.pure.overload, args, kwargs))
        if operation.mutated:
            return _mutate(recorder, operation, args, kwargs or {})
        try:
            entry, results = recorder.enter(operation, args, kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            pass
        else:
            structure = entry.structure
            return (
                wrap(results[0])
                if structure == 0 and type(structure) is int
                else _returned(structure, results)
            )
    return _on_driver(operator, args, kwargs or {})


def _first_seen(operator: Any) -> Operation:
    """How an operator is recorded, settled when it is first met."""
    operation = Operation.of(operator)
    operation.handler = operators.decompose(operator) or _HANDLERS.get(operator)
    if operation.handler is None and _is_composite(operation.name):
        operation.handler = operator.decompose
    _ROUTES[id(operator)] = operation  # which PyTorch keeps for good
    return operation


def _is_composite(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


def _returned(structure: Any, results: list[Any]) -> Any:
    if type(structure) is int:
        return wrap(results[structure])
    if type(structure) is tuple:
        return [_returned(each, results) for each in structure]
    return structure


def _view(recorder: Recorder, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    parent = args[0]._alias
    rest = args[1:]
    if kwargs:
        rest = (
            *rest,
            *(kwargs[each.name] for each in operator._schema.arguments[len(args) :] if each.name in kwargs),
        )
    frozen = tuple([tuple(each) if type(each) is list else each for each in rest])
    key = (operator, parent.spec, frozen)
    known = _VIEWS.get(key)
    if known is None:
        specs = infer(operator, (parent.spec, *rest), {})
        steps = [(Operation.of(one), args) for one, args in steps_of_view(operator, parent, frozen)]
        known = _VIEWS[key] = (
            isinstance(specs, Spec),
            list(zip((specs,) if isinstance(specs, Spec) else specs, steps, strict=True)),
        )
    one, found = known
    made = [wrap(Alias.of_view(parent, step, spec)) for spec, step in found]
    return made[0] if one else made


_VIEWS: Final[dict[tuple[Any, ...], tuple[bool, list[tuple[Spec, Any]]]]] = {}


def _reshape(tensor: LogicalTensor, view: LogicalTensor) -> Tensor:
    """A tensor becomes a view of what it was, as by ``transpose_``."""
    _TENSOR_DATA.__set__(tensor, view)
    tensor._alias = view._alias
    return tensor


def _mutate(recorder: Recorder, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    targets: list[Any] = []
    returned: list[Any] = []
    for where in operation.mutated:
        arg = kwargs.get(where) if isinstance(where, str) else (args[where] if where < len(args) else None)
        returned.append(arg)
        if isinstance(arg, (list, tuple)):
            targets += arg
            increment_version(arg)  # of lists, autograd leaves it to kernels
        elif arg is not None:
            targets.append(arg)
    if operation.is_of_lists and len({id(each._alias) for each in targets}) < len(targets):
        for place in range(len(targets)):  # a tensor that is in a list twice is changed twice
            one = tuple([[each[place]] if isinstance(each, (list, tuple)) else each for each in args])
            _mutate(recorder, operation, one, kwargs)
        return None
    if operation.is_out:
        kwargs = {name: arg for name, arg in kwargs.items() if name not in operation.mutated}
    _, results = recorder.enter(operation.pure, args, kwargs)
    results = [each for each in results if each is not None]
    others = results[: len(results) - len(targets)]
    for target, result in zip(targets, results[len(others) :], strict=True):
        alias = target._alias
        if result.spec.shape != alias.spec.shape:
            raise RuntimeError(
                f"the result has shape {list(result.spec.shape)}, and cannot be written into a tensor of "
                f"shape {list(alias.spec.shape)}"
            )
        new = result
        if new.spec.dtype != alias.spec.dtype:
            (new,) = recorder.record(aten._to_copy.default, (new,), {"dtype": alias.spec.dtype})
        write(recorder, alias, new.value)
    if operation.returns_nothing:
        return None
    every = [*(wrap(each) for each in others), *returned]
    return every[0] if len(every) == 1 else tuple(every)


def _on_driver(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do an operation here, because nobody knows the shape of its result before."""

    def here(tree: Any) -> Any:
        if isinstance(tree, LogicalTensor):
            return fetched(tree._alias)
        if isinstance(tree, (list, tuple)):
            return type(tree)(here(each) for each in tree)
        return tree

    def there(tree: Any) -> Any:
        if isinstance(tree, Tensor):
            return uploaded(tree.contiguous())
        if isinstance(tree, (list, tuple)):
            return type(tree)(there(each) for each in tree)
        return tree

    kwargs = {name: here(each) for name, each in kwargs.items() if name not in ("device", "pin_memory")}
    return there(operator(*here(args), **kwargs))


def _handles(*overloads: Any) -> Callable[[Handler], Handler]:
    def note(handler: Handler) -> Handler:
        for each in overloads:
            _HANDLERS[each] = handler
        return handler

    return note


@_handles(aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift.default)
def _same(tensor: LogicalTensor) -> Tensor:
    spec = tensor._alias.spec
    if tensor.stride() != spec.stride or tensor.shape != spec.shape:  # its data was assigned
        raise AssertionError("a tensor and its alias differ")
    return wrap(tensor._alias)


@_handles(aten._local_scalar_dense.default)
def _item(tensor: LogicalTensor) -> Any:
    return fetched(tensor._alias).item()


@_handles(aten._to_copy.default)
def _to_copy(tensor: LogicalTensor, **kwargs: Any) -> Tensor:
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != NAME:
        if torch.device(device).type == "meta":
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=kwargs.get("dtype") or tensor.dtype, device="meta"
            )
        content = fetched(tensor._alias)
        if kwargs.get("dtype") or kwargs.get("memory_format"):
            return content.to(
                device=device, dtype=kwargs.get("dtype"), memory_format=kwargs.get("memory_format")
            )
        return content.to(device)
    recorder = engine().recorder
    with recorder.lock:
        (copied,) = recorder.record(aten._to_copy.default, (tensor,), kwargs)
    return wrap(copied)


@_handles(aten._copy_from.default)
def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _copy(target, source)
    return target


@_handles(aten.copy_.default)
def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(target, LogicalTensor):
        assert isinstance(source, LogicalTensor)
        return target.copy_(fetched(source._alias))
    recorder = engine().recorder
    alias = target._alias
    shape, dtype = alias.spec.shape, alias.spec.dtype
    with recorder.lock:
        if isinstance(source, LogicalTensor):
            new = source._alias
            read(recorder, new)
            if new.spec.dtype != dtype:
                (new,) = recorder.record(aten._to_copy.default, (new,), {"dtype": dtype})
            if new.spec.shape != shape:
                (new,) = recorder.record(aten.expand.default, (new, list(shape)))
            assert new.value is not None
            write(recorder, alias, new.value)
        else:
            data = torch.empty(shape, dtype=dtype, device="cpu").copy_(source.detach())
            write(recorder, alias, Value(spec_of(data), data=data))
    return target


@_handles(aten.as_strided.default)
def _as_strided(tensor: LogicalTensor, size: Any, stride: Any, offset: int | None = None) -> Tensor:
    recorder = engine().recorder
    alias = tensor._alias
    offset = int(tensor.storage_offset()) if offset is None else offset
    spec = Spec.of(tuple(size), tuple(stride), tensor.dtype, offset=offset)
    if (spec.shape, spec.stride, spec.offset) == (alias.spec.shape, alias.spec.stride, alias.spec.offset):
        return wrap(alias)
    base = alias if alias.base is None else alias.base
    with recorder.lock:
        steps = as_strided_steps(base.spec, size, stride, offset)
        if steps is None:
            steps = [(aten.as_strided.default, (tuple(size), tuple(stride), offset))]
        for place, (operator, args) in enumerate(steps, start=1):
            known = spec if place == len(steps) else infer(operator, (base.spec, *args), {})
            base = Alias.of_view(base, (Operation.of(operator), args), known)
        return wrap(base)


@_handles(aten.detach_.default)
def _detach(tensor: LogicalTensor) -> Tensor:
    return tensor


@_handles(aten.set_.source_Tensor)
def _set(target: LogicalTensor, source: LogicalTensor) -> Tensor:
    target._alias = source._alias
    return target


@_handles(aten.resize_.default)
def _resize(target: LogicalTensor, size: Any, *, memory_format: Any = None) -> Tensor:
    if tuple(size) != tuple(target.shape):
        raise NotImplementedError("a tensor on spmd:0 cannot be resized: make a new one")
    return target


@_handles(aten.native_batch_norm.default)
def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> Any:
    recorder = engine().recorder
    args = (x, weight, bias, mean, var, training, momentum, eps)
    with recorder.lock:
        if not training:
            results = recorder.record(aten.native_batch_norm.default, args)
        elif mean is None:
            results = recorder.record(
                aten._native_batch_norm_legit.no_stats, (x, weight, bias, True, momentum, eps)
            )
        else:
            results = recorder.record(aten._native_batch_norm_legit_functional.default, args)
            write(recorder, mean._alias, results[3].value)
            write(recorder, var._alias, results[4].value)
    return tuple(wrap(each) for each in results[:3])


@_handles(aten.is_pinned.default)
def _is_pinned(tensor: Tensor, device: Any = None) -> bool:
    return False


@_handles(aten._fused_sdp_choice.default)
def _fused_sdp_choice(*args: Any, **kwargs: Any) -> int:
    return 0  # composed of matrix products


# ---- setting the device up


class _Stream:
    """The device's one stream: everything is in order, and nobody has to wait for it."""

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass


class _Module:
    """What ``torch.spmd`` is: PyTorch asks it about the device."""

    _stream = _Stream()

    _initialized = True  # activation checkpointing looks at it

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def set_device(self, device: Any) -> None:
        pass

    def device(self, device: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def synchronize(self, device: Any = None) -> None:
        pass

    def current_stream(self, device: Any = None) -> _Stream:
        return self._stream

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def manual_seed_all(self, seed: int) -> None:
        if _engine is not None:
            _engine.recorder.seed(int(seed))

    manual_seed = manual_seed_all

    def get_rng_state(self, device: Any = None) -> Tensor:
        return wrap(engine().recorder.random_state())

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        if not isinstance(state, LogicalTensor):
            state = uploaded(state.clone())
        engine().recorder.set_random_state(state._alias)


DEVICE: torch.device = torch.device("cpu")  # until the device is set up
_library: Any = None


def set_up() -> torch.device:
    """Give PyTorch the device; once in a process, for good.

    Raises:
        RuntimeError: the process has another device in this slot.
    """
    global DEVICE, _library
    if _library is not None:
        return DEVICE
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    DEVICE = torch.device(f"{NAME}:0")
    _library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and not _is_composite(name):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            operator = getattr(getattr(aten, packet), overload or "default", None)
            if operator is not None and _makes_from_nothing(operator):
                _library.impl(name.removeprefix("aten::"), _kernel(operator), "PrivateUse1")
    _library.impl("_fused_sdp_choice", _fused_sdp_choice, "PrivateUse1")
    _library.impl("_copy_from", _copy_from, "PrivateUse1")
    autocast.install(_library)
    _let_optimizers_take_lists()
    return DEVICE


def _makes_from_nothing(operator: Any) -> bool:
    arguments = operator._schema.arguments
    return any(each.name == "device" for each in arguments) and not any(
        "Tensor" in str(each.type) for each in arguments
    )


def _kernel(operator: Any) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        return dispatch(operator, args, kwargs)

    return make


def _let_optimizers_take_lists() -> None:
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for module in (optimizer, _foreach_utils):
        module._foreach_supported_types.append(LogicalTensor)
