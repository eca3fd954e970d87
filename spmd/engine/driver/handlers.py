"""Operators that are not recorded as they are: copies between devices, and operators with a meaning of their
own here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from spmd.engine.driver.aliases import (
    Value,
    enlarge,
    read,
    refuse_repeated,
    same_elements,
    strided,
    write,
)
from spmd.engine.driver.current import NAME, engine
from spmd.engine.driver.lazy import leave_uninitialized
from spmd.engine.driver.logical_tensor import (
    LogicalTensor,
    fetched,
    parameter_of,
    show_instead,
    wrap,
    wrap_view,
)
from spmd.engine.driver.recorder import Recorder
from spmd.engine.program.metas import Spec, spec_of
from spmd.engine.program.program import REPLICATED
from spmd.torch_internals import (
    DispatchKey,
    batch_norm,
    batch_norm_functional,
    copy_from,
    flash_attention_for_cpu,
    foreach_norm,
    local_scalar,
    pack_padded_sequence,
    pin_memory,
    to_copy,
)

__all__ = ["HANDLERS", "Handler", "resize"]

aten: Final = torch.ops.aten
in_inference_mode: Final = torch.is_inference_mode_enabled
Handler = Callable[..., Any]
H = TypeVar("H", bound=Handler)
HANDLERS: Final[dict[Any, Handler]] = {}
"""Functions by operator, with its arguments and results."""


def _handles(*overloads: Any) -> Callable[[H], H]:
    def note(handler: H) -> H:
        for each in overloads:
            HANDLERS[each] = handler
        return handler

    return note


@_handles(aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift.default)
def _same(tensor: LogicalTensor) -> Tensor:
    """Show the same memory, as an inference tensor only in inference mode, and not if this one is none."""
    if in_inference_mode() and not tensor.is_inference():
        return wrap_view(tensor, tensor._alias)
    return wrap(tensor._alias)


@_handles(local_scalar)
def _item(tensor: LogicalTensor) -> Any:
    return fetched(tensor._alias).item()


@_handles(to_copy)
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
        (copied,) = recorder.record(to_copy, (tensor,), kwargs)
    return wrap(copied)


@_handles(copy_from)
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
    refuse_repeated(alias)
    shape, dtype = alias.spec.shape, alias.spec.dtype
    with recorder.lock:
        if isinstance(source, LogicalTensor):
            new = source._alias
            read(recorder, new)
            if new.spec.dtype != dtype:
                (new,) = recorder.record(to_copy, (new,), {"dtype": dtype})
            if new.spec.shape != shape:
                (new,) = recorder.record(aten.expand.default, (new, list(shape)))
            assert new.value is not None
            write(recorder, alias, new.value)
        elif is_lazy(source) and shape == (0,):
            leave_uninitialized(target, source)
        else:
            data = torch.empty(shape, dtype=dtype, device="cpu").copy_(source.detach())
            layout = recorder.cuts.get((shape, dtype), REPLICATED)
            write(recorder, alias, Value(spec_of(data, layout), data=data))
    return target


@_handles(aten.as_strided.default)
def _as_strided(tensor: LogicalTensor, size: Any, stride: Any, offset: int | None = None) -> LogicalTensor:
    recorder = engine().recorder
    alias = tensor._alias
    offset = int(tensor.storage_offset()) if offset is None else offset
    spec = Spec.of(tuple(size), tuple(stride), tensor.dtype, offset=offset)
    if (spec.shape, spec.stride, spec.offset) == (alias.spec.shape, alias.spec.stride, alias.spec.offset):
        return wrap_view(tensor, alias)
    with recorder.lock:
        return wrap_view(tensor, strided(same_elements(alias), spec))


@_handles(aten.as_strided_.default)
def _as_strided_in_place(tensor: LogicalTensor, *args: Any) -> Tensor:
    show_instead(tensor, _as_strided(tensor, *args))
    return tensor


@_handles(aten.as_strided_copy.default)
def _as_strided_copy(tensor: LogicalTensor, *args: Any) -> Tensor:
    return _as_strided(tensor, *args).clone()


@_handles(aten.detach_.default)
def _detach(tensor: LogicalTensor) -> Tensor:
    return tensor


@_handles(aten.set_.source_Tensor)
def _set(target: LogicalTensor, source: Any) -> Tensor:
    show_instead(target, source)
    return target


@_handles(aten.set_.default)
def _set_to_nothing(target: LogicalTensor) -> Tensor:
    return _set(target, target.new_empty(0))


@_handles(aten.resize_.default)
def resize(
    target: LogicalTensor,
    size: Sequence[int],
    *,
    memory_format: Any = None,
    stride: tuple[int, ...] | None = None,
) -> Tensor:
    """Let a tensor show its memory in another shape. The memory, which other tensors may show, is enlarged if
    necessary.

    Args:
        stride: strides, if neither those of ``memory_format`` nor contiguous ones.
    """
    alias, shape = target._alias, tuple(size)
    if shape == alias.spec.shape and memory_format is None:
        return target
    if stride is None:
        memory_format = memory_format or torch.contiguous_format
        stride = torch.empty(shape, device="meta", memory_format=memory_format).stride()
    base = same_elements(alias)
    if base.parent is not None:
        raise NotImplementedError(
            "a view of a tensor on spmd:0 in another dtype, or of its conjugate or negative, cannot be "
            "resized: resize a clone() of it"
        )
    recorder = engine().recorder
    with recorder.lock:
        enlarge(recorder, base, Spec.of(shape, stride, alias.spec.dtype, offset=alias.spec.offset))
        show_instead(target, _as_strided(target, shape, stride))
    return target


@_handles(aten.resize_as_.default)
def _resize_as(target: LogicalTensor, template: Tensor, *, memory_format: Any = None) -> Tensor:
    resize(target, template.shape)
    if memory_format is torch.preserve_format:
        formats = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
        kept = (each for each in formats if template.is_contiguous(memory_format=each))
        memory_format = next(kept, torch.contiguous_format)
    return resize(target, template.shape, memory_format=memory_format)


@_handles(aten.bernoulli_.float)
def _bernoulli(target: LogicalTensor, p: float = 0.5, *, generator: Any = None) -> Tensor:
    """Its functional form has no default for ``p``."""
    _copy(target, aten.bernoulli.p(target, p, generator=generator))
    return target


@_handles(aten.polygamma_.default)
def _polygamma(target: LogicalTensor, n: int) -> Tensor:
    """Its functional form takes its arguments in another order."""
    _copy(target, aten.polygamma.default(n, target))
    return target


@_handles(aten.rrelu_with_noise.default)
def _rrelu(x: LogicalTensor, noise: LogicalTensor, *args: Any, **kwargs: Any) -> Tensor:
    result: Tensor
    result, drawn = aten.rrelu_with_noise_functional.default(x, noise, *args, **kwargs)
    _copy(noise, drawn)
    return result


@_handles(aten.rrelu_with_noise_.default)
def _rrelu_in_place(x: LogicalTensor, noise: LogicalTensor, *args: Any, **kwargs: Any) -> Tensor:
    _copy(x, _rrelu(x, noise, *args, **kwargs))
    return x


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
            results = recorder.record(batch_norm, (x, weight, bias, True, momentum, eps))
        else:
            results = recorder.record(batch_norm_functional, args)
            write(recorder, mean._alias, results[3].value)
            write(recorder, var._alias, results[4].value)
    return tuple(wrap(each) for each in results[:3])


def _with_classes(op: Any, place: int) -> None:
    """Make a loss accept classes of any dtype, as XLA's device does; the CPU's operators accept only two."""

    def lose(*args: Any) -> Any:
        recorder = engine().recorder
        classes = args[place]
        if classes.dtype is not torch.int64:
            args = (*args[:place], classes.long(), *args[place + 1 :])
        with recorder.lock:
            results = [wrap(each) for each in recorder.record(op, args)]
        return results[0] if len(results) == 1 else tuple(results)

    HANDLERS[op] = lose


for _operator, _place in (
    (aten.nll_loss_forward.default, 1),
    (aten.nll_loss2d_forward.default, 1),
    (aten.nll_loss_backward.default, 2),
    (aten.nll_loss2d_backward.default, 2),
):
    _with_classes(_operator, _place)


@_handles(foreach_norm)
def _norms(tensors: list[LogicalTensor], *args: Any, **kwargs: Any) -> list[Tensor]:
    recorder = engine().recorder
    with recorder.lock:
        for each in tensors:
            _sum_as_its_parameter_lies(recorder, each)
        return [wrap(each) for each in recorder.record(foreach_norm, (tensors, *args), kwargs)]


@_handles(aten.linalg_vector_norm.default)
def _norm(tensor: LogicalTensor, *args: Any, **kwargs: Any) -> Tensor:
    recorder = engine().recorder
    with recorder.lock:
        _sum_as_its_parameter_lies(recorder, tensor)
        (found,) = recorder.record(aten.linalg_vector_norm.default, (tensor, *args), kwargs)
    return wrap(found)


def _sum_as_its_parameter_lies(recorder: Recorder, gradient: Tensor) -> None:
    """Sum a gradient that is partial on the workers into the layout of its parameter, and not whole
    everywhere.
    """
    parameter = parameter_of(gradient)
    if parameter is None or not isinstance(gradient, LogicalTensor):
        return
    alias = gradient._alias
    value = read(recorder, alias)
    if value.spec.layout.is_partial():
        layout = read(recorder, parameter._alias).spec.layout
        alias.value, alias.spec = recorder.moved(value, layout), alias.spec.laid_out(layout)


@_handles(aten.is_same_size.default)
def _is_same_size(tensor: Tensor, other: Tensor) -> bool:
    return tensor.shape == other.shape


@_handles(pack_padded_sequence)
def _pack(padded: LogicalTensor, lengths: Tensor, batch_first: bool) -> Any:
    """Compose the operator like PyTorch: lengths are on the CPU, whatever device sequences are on."""
    composed: Any = pack_padded_sequence._op_dk
    return composed(DispatchKey.CompositeExplicitAutograd, padded, lengths, batch_first)


@_handles(aten.ctc_loss.Tensor)
def _ctc(scores: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Compose the operator like PyTorch; targets and lengths may be on the CPU, as for other devices."""
    there = [each.to(scores.device) for each in args[:3]]
    return aten.ctc_loss.Tensor.decompose(scores, *there, *args[3:], **kwargs)


@_handles(aten.is_pinned.default)
def _is_pinned(tensor: Tensor, device: Any = None) -> bool:
    return False


@_handles(pin_memory)
def _pin(tensor: Tensor, device: Any = None) -> Tensor:
    raise RuntimeError(
        "a tensor on spmd:0 cannot be pinned: leave out pin_memory, which is for tensors on the CPU"
    )


_TAKES_ONE_SAMPLE: Final = torch.__version__ >= "2.14"
"""Whether the CPU's fused operator is also chosen for ``(heads, length, width)``."""
_TAKES_ONE_MASK: Final = torch.__version__ >= "2.14"
"""Whether an explicit mask with ``is_causal`` is also an error if the fused operator is chosen."""


@_handles(aten.scaled_dot_product_attention.default)
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention: the CPU's fused operator if CPUs compute and would choose it; otherwise products and
    softmax.
    """
    if _TAKES_ONE_SAMPLE and query.dim() == key.dim() == value.dim() == 3:
        q, k, v = (each.unsqueeze(0) for each in (query, key, value))
        while attn_mask is not None and attn_mask.dim() < 4:
            attn_mask = attn_mask.unsqueeze(0)
        of_one = _attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return of_one.squeeze(0)
    fused = (
        dropout_p == 0.0
        and not engine().on_accelerators
        and _attends(query, key, value, enable_gqa=enable_gqa)
    )
    if _TAKES_ONE_MASK and attn_mask is not None and is_causal:
        fused = False  # which raises
    if fused and attn_mask is not None:
        fused = _masks(attn_mask, query, key)
        if fused and attn_mask.dtype == torch.bool:
            kept = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = kept.masked_fill_(attn_mask.logical_not(), -math.inf)
    if fused:
        fused_operator = flash_attention_for_cpu
        return fused_operator(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return aten.scaled_dot_product_attention.default.decompose(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _attends(query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool) -> bool:
    """Whether the fused operator accepts these: ``(batch, heads, length, width)``, of one width and dtype."""
    every = (query, key, value)
    if any(each.dim() != 4 or each.dtype != query.dtype or each.stride(-1) != 1 for each in every):
        return False
    flash_enabled: Any = torch.backends.cuda.flash_sdp_enabled  # which the CPU's operator requires, too
    heads = key.shape[1]
    return (
        flash_enabled()
        and query.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        and len({(each.shape[0], each.shape[3]) for each in every}) == 1
        and key.shape[:3] == value.shape[:3]
        and (query.shape[1] == heads or (enable_gqa and heads > 0 and query.shape[1] % heads == 0))
        and 0 not in (query.shape[2], key.shape[2])
    )


def _masks(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    """Whether the fused operator accepts this mask: ``(length, length)`` or with batch and heads, or ones."""
    wanted = (*query.shape[:-1], key.shape[-2])[-mask.dim() :]
    return (
        mask.dim() in (2, 4)
        and mask.dtype in (torch.bool, query.dtype)
        and not mask.requires_grad
        and all(size in (1, full) for size, full in zip(mask.shape, wanted, strict=True))
    )
