"""PyTorch's private names that ``rpc`` uses: the only file of this package that names them.

Those that other packages need as well are listed here, too, and nowhere else. Tested with torch 2.13, 2.14
and 2.15. ``check``, which the start of an agent calls, logs those that the installed version does not have.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch

from rpc.runtime.internals import Internals

__all__ = [
    "ASYNC_COLLECTIVE_TENSOR",
    "FSDP_FLATTENED",
    "FUNCTIONS_ENABLED",
    "INTERNALS",
    "SHARDED_TENSOR",
    "BaseFuture",
    "DisableTorchFunctionSubclass",
    "InferenceMode",
    "OpOverload",
    "OpOverloadPacket",
    "async_collective_tensor",
    "collect_all",
    "default_device_of_thread",
    "disable_legacy_profiler",
    "disable_saved_tensors_hooks",
    "dispatch_stack_length",
    "enable_legacy_profiler",
    "enable_saved_tensors_hooks",
    "find_builtin",
    "function_stack_length",
    "function_state",
    "is_any_autocast_enabled",
    "is_fake",
    "is_forward_grad_enabled",
    "is_multithreading_enabled",
    "is_profiler_enabled",
    "is_traceable_wrapper_subclass",
    "is_transformed",
    "is_view_replay_enabled",
    "make_per_channel_quantized_tensor",
    "make_per_tensor_quantized_tensor",
    "neg_view",
    "nested_view_from_buffer_copy",
    "parse_legacy_records",
    "pop_dispatch_mode",
    "pop_function_mode",
    "pop_saved_tensors_hooks",
    "push_dispatch_mode",
    "push_function_mode",
    "push_saved_tensors_hooks",
    "pytree",
    "qualified_name",
    "release_ipc_counter",
    "saved_tensors_hooks_disabled",
    "set_collect_all",
    "set_forward_grad_enabled",
    "set_function_state",
    "set_grad_enabled",
    "set_multithreading_enabled",
    "set_view_replay_enabled",
    "top_saved_tensors_hooks",
]

INTERNALS: Final = Internals()
_find: Final = INTERNALS.find


def _false(*_: object) -> bool:
    return False


def _none(*_: object, **__: object) -> None: ...


def _zero() -> int:
    return 0


# ---- the modes of threads

_KEPT: Final = "modes of PyTorch that a function leaves set stay set on its thread"

set_grad_enabled: Final[Callable[[bool], object]] = _find(
    "torch._C:_set_grad_enabled", _KEPT, instead=torch.set_grad_enabled
)
is_forward_grad_enabled: Final[Callable[[], bool]] = _find(
    "torch._C:_is_fwd_grad_enabled", _KEPT, instead=lambda: True
)
set_forward_grad_enabled: Final[Callable[[bool], object]] = _find(
    "torch._C:_set_fwd_grad_enabled", _KEPT, instead=_none
)
is_multithreading_enabled: Final[Callable[[], bool]] = _find(
    "torch._C:_is_multithreading_enabled", _KEPT, instead=lambda: True
)
set_multithreading_enabled: Final[Callable[[bool], object]] = _find(
    "torch._C:_set_multithreading_enabled", _KEPT, instead=_none
)
is_view_replay_enabled: Final[Callable[[], bool]] = _find(
    "torch._C:_is_view_replay_enabled", _KEPT, instead=_false
)
set_view_replay_enabled: Final[Callable[[bool], object]] = _find(
    "torch._C:_set_view_replay_enabled", _KEPT, instead=_none
)

is_any_autocast_enabled: Final[Callable[[], bool]] = _find(
    "torch._C:_is_any_autocast_enabled", _KEPT, instead=torch.is_autocast_enabled
)
InferenceMode: Final[Callable[[bool], Any]] = _find(
    "torch._C:_InferenceMode",
    "calls in inference mode, and collectives, take a few microseconds longer",
    instead=torch.inference_mode,
)

function_stack_length: Final[Callable[[], int]] = _find(
    "torch._C:_len_torch_function_stack", _KEPT, instead=_zero
)
pop_function_mode: Final[Callable[[], Any]] = _find("torch._C:_pop_torch_function_stack", _KEPT)
push_function_mode: Final[Callable[[Any], object]] = _find("torch._C:_push_on_torch_function_stack", _KEPT)
function_state: Final[Callable[[], Any]] = _find("torch._C:_get_torch_function_state", _KEPT, instead=_none)
FUNCTIONS_ENABLED: Final[Any] = _find("torch._C:_TorchFunctionState.ENABLED", _KEPT, instead=None)
_set_function_state: Final[Callable[[Any], object]] = _find(
    "torch._C:_set_torch_function_state", _KEPT, instead=_none
)
set_function_state: Final = (
    _none if FUNCTIONS_ENABLED is None or function_state is _none else _set_function_state
)

dispatch_stack_length: Final[Callable[[], int]] = _find(
    "torch._C:_len_torch_dispatch_stack", _KEPT, instead=_zero
)
pop_dispatch_mode: Final[Callable[[None], Any]] = _find("torch._C:_pop_torch_dispatch_stack", _KEPT)
push_dispatch_mode: Final[Callable[[Any], object]] = _find("torch._C:_push_on_torch_dispatch_stack", _KEPT)

top_saved_tensors_hooks: Final[Callable[[bool], Any]] = _find(
    "torch._C:_autograd._top_saved_tensors_default_hooks", _KEPT, instead=_none
)
push_saved_tensors_hooks: Final[Callable[..., object]] = _find(
    "torch._C:_autograd._push_saved_tensors_default_hooks", _KEPT
)
pop_saved_tensors_hooks: Final[Callable[[], object]] = _find(
    "torch._C:_autograd._pop_saved_tensors_default_hooks", _KEPT
)
saved_tensors_hooks_disabled: Final[Callable[[], str | None]] = _find(
    "torch._C:_autograd._saved_tensors_hooks_get_disabled_error_message", _KEPT, instead=_none
)
disable_saved_tensors_hooks: Final[Callable[[str, bool], object]] = _find(
    "torch._C:_autograd._saved_tensors_hooks_disable", _KEPT, instead=_none
)
enable_saved_tensors_hooks: Final[Callable[[], object]] = _find(
    "torch._C:_autograd._saved_tensors_hooks_enable", _KEPT, instead=_none
)

default_device_of_thread: Final[Any] = _find(
    "torch:_GLOBAL_DEVICE_CONTEXT",
    "a default device that a function sets stays set on its thread",
    instead=None,
)

# ---- calls

_SLOWER: Final = "calls take a few microseconds longer"

BaseFuture: Final[Any] = _find("torch._C:Future", _SLOWER, instead=torch.futures.Future)
"""The C++ base class of ``torch.futures.Future``, which has its methods."""

# ---- functions and tensors in messages

_OPERATORS: Final = "operators of torch.ops cannot be sent to other workers, and SPMD mode does not work"
_SUBCLASSES: Final = "tensors of subclasses that wrap other tensors cannot be sent to other workers"
_NESTED: Final = "nested tensors cannot be sent to other workers"
_QUANTIZED: Final = "quantized tensors cannot be received from other workers"
_SCRIPTED: Final = "functions and interfaces of TorchScript cannot be sent to other workers"

if TYPE_CHECKING:
    from torch._ops import OpOverload, OpOverloadPacket
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass
else:
    OpOverload = _find("torch._ops:OpOverload", _OPERATORS)
    OpOverloadPacket = _find("torch._ops:OpOverloadPacket", _OPERATORS)
    pytree = _find(
        "torch.utils._pytree", "RemoteModule, ShardedModule, SPMD mode and batches of calls do not work"
    )
    is_traceable_wrapper_subclass = _find(
        "torch.utils._python_dispatch:is_traceable_wrapper_subclass", _SUBCLASSES, instead=_false
    )

INTERNALS.expect(
    "torch:ops.aten.add._qualified_op_name",
    "torch:ops.aten.add.Tensor._overloadname",
    "torch:ops.aten.add.Tensor._schema",
    without=_OPERATORS,
)
qualified_name: Final[Callable[[Any], str]] = _find("torch._jit_internal:_qualified_name", _SCRIPTED)
is_transformed: Final[Callable[[torch.Tensor], bool]] = _find(
    "torch._C:_functorch.is_functorch_wrapped_tensor",
    "tensors inside a transform of torch.func are not refused with a clear error",
    instead=_false,
)
DisableTorchFunctionSubclass: Final[Any] = _find(
    "torch._C:DisableTorchFunctionSubclass", "tensors of subclasses cannot be sent to other workers"
)
_fake_tensor: Final = INTERNALS.later(
    "torch._subclasses.fake_tensor:FakeTensor",
    "fake tensors are not refused with a clear error",
    instead=(),
)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether this is a fake tensor. Does not import slow modules."""
    return "torch._subclasses.fake_tensor" in sys.modules and isinstance(tensor, _fake_tensor())


_OF_ONE_PROCESS: Final = "shards, and results of collectives under way, are sent as if they were whole"

ASYNC_COLLECTIVE_TENSOR: Final = "torch.distributed._functional_collectives:AsyncCollectiveTensor"
SHARDED_TENSOR: Final = "torch.distributed._shard.sharded_tensor:ShardedTensor"
async_collective_tensor: Final = INTERNALS.later(ASYNC_COLLECTIVE_TENSOR, _OF_ONE_PROCESS)
INTERNALS.later(SHARDED_TENSOR, _OF_ONE_PROCESS)

FSDP_FLATTENED: Final = "_fsdp_flattened"
"""Attribute of the parameters that FSDP1 has sharded."""
INTERNALS.later("torch.distributed.fsdp._common_utils:FSDP_FLATTENED", _OF_ONE_PROCESS)

neg_view: Final[Callable[[torch.Tensor], torch.Tensor]] = _find(
    "torch:_neg_view", "tensors whose negative bit is set cannot be sent to other workers"
)
nested_view_from_buffer_copy: Final[Callable[..., torch.Tensor]] = _find(
    "torch:_nested_view_from_buffer_copy", "nested tensors cannot be received from other workers"
)
make_per_tensor_quantized_tensor: Final[Callable[..., torch.Tensor]] = _find(
    "torch:_make_per_tensor_quantized_tensor", _QUANTIZED
)
make_per_channel_quantized_tensor: Final[Callable[..., torch.Tensor]] = _find(
    "torch:_make_per_channel_quantized_tensor", _QUANTIZED
)

INTERNALS.expect(
    "torch:Tensor._nested_tensor_size",
    "torch:Tensor._nested_tensor_strides",
    "torch:Tensor._nested_tensor_storage_offsets",
    without=_NESTED,
)
for _name in ("_maybe_min_seqlen", "_maybe_max_seqlen", "_ragged_idx"):
    INTERNALS.later(f"torch.nested._internal.nested_tensor:NestedTensor.{_name}", _NESTED)
INTERNALS.expect(
    "torch:Tensor._indices",
    "torch:Tensor._values",
    without="sparse tensors cannot be sent to other workers",
)
INTERNALS.expect("torch:Tensor._is_zerotensor", without="tensors cannot be sent to other workers")

release_ipc_counter: Final[Callable[..., object]] = _find(
    "torch:UntypedStorage._release_ipc_counter",
    "memory of CUDA devices that was shared with a process that does not open it is kept",
    instead=_none,
)

collect_all: Final[Callable[[Any], Any] | None] = _find(
    "torch._C:_collect_all",
    "torch.futures.wait_all and collect_all fail only after all calls, and make no streams wait",
    instead=None,
)


def set_collect_all(function: Callable[[Any], Any]) -> None:
    """Replace the function that ``torch.futures.collect_all`` and ``wait_all`` call."""
    torch._C._collect_all = function  # type: ignore[assignment]


# ---- profiling

_UNPROFILED: Final = "PyTorch's profiler does not show calls, gradients between workers and collectives"

is_profiler_enabled: Final[Callable[[], bool]] = _find(
    "torch._C:_autograd._profiler_enabled", _UNPROFILED, instead=_false
)
enable_legacy_profiler: Final[Callable[[Any], object]] = _find(
    "torch._C:_autograd._enable_profiler_legacy", _UNPROFILED
)
disable_legacy_profiler: Final[Callable[[], Any]] = _find(
    "torch._C:_autograd._disable_profiler_legacy", _UNPROFILED
)
parse_legacy_records: Final[Callable[[Any], Any]] = _find(
    "torch.autograd.profiler_legacy:_parse_legacy_records", _UNPROFILED
)
find_builtin: Final[Callable[[Any], str | None]] = _find(
    "torch.jit._builtins:_find_builtin",
    "PyTorch's profiler shows calls of operators under their names in Python",
    instead=_none,
)
INTERNALS.expect(
    "torch.autograd.profiler_util:EventList._build_tree",
    "torch.autograd.profiler:profile._start_trace",
    "torch.autograd.profiler:profile._parse_kineto_results",
    "torch.autograd.profiler_legacy:profile._start_trace",
    without=_UNPROFILED,
)
