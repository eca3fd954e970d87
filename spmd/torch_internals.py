"""The private names of PyTorch that ``spmd`` needs: their gate, as ``rpc/runtime/internals.py`` describes.

Collectives have one of their own, ``spmd/collectives/torch_internals.py``, as they must not import DTensor,
and so have checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor
from torch.amp import GradScaler

from rpc.runtime.internals import Internals
from rpc.runtime.torch_internals import async_collective_tensor

__all__ = [
    "DISTRIBUTED",
    "INTERNALS",
    "NO_SPMD_MODE",
    "NO_TENSOR_PARALLELISM",
    "AsyncCollectiveTensor",
    "AutoDispatchBelowAutograd",
    "BaseDeviceGuard",
    "BaseGenerator",
    "BaseTensor",
    "DTensorSpec",
    "DataDependentOutputException",
    "DeviceType",
    "DisableAutocast",
    "DispatchKey",
    "DispatchKeySet",
    "DropoutNd",
    "DynamicOutputShapeException",
    "ExcludeDispatchKeyGuard",
    "FakeTensorMode",
    "ForceDispatchKeyGuard",
    "FrameAction",
    "FrameExecStrategy",
    "OpSchema",
    "StridedShard",
    "TensorMeta",
    "TorchDispatchMode",
    "allowed_while_uninitialized",
    "backward_engine",
    "batch_norm",
    "batch_norm_functional",
    "c10d_library",
    "conj",
    "conj_physical",
    "copy_from",
    "current_mesh",
    "default_store",
    "disabled_torch_function",
    "dispatch_modes",
    "dtensor_operators",
    "excluded_keys",
    "flash_attention_for_cpu",
    "foreach_norm",
    "foreach_types",
    "forget_backward",
    "forget_unscaled",
    "has_kernel",
    "included_keys",
    "is_dense",
    "local_scalar",
    "make_wrapper",
    "names_of_operators",
    "neg_view_operator",
    "pack_padded_sequence",
    "pin_memory",
    "rebuild_on_device",
    "rebuild_parameter",
    "reduction_name",
    "register_group",
    "reshape_alias",
    "set_code_exec_strategy",
    "set_up_device",
    "to_copy",
    "work_of_future",
    "world",
]

INTERNALS: Final = Internals()
_find: Final = INTERNALS.find

NO_TENSOR_PARALLELISM: Final = "tensor parallelism and ShardedModule do not work"
NO_SPMD_MODE: Final = "SPMD mode does not work"

# ---- DTensor

_NO_DTENSOR: Final = "tensor parallelism, ShardedModule and SPMD mode do not work"

if TYPE_CHECKING:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._op_schema import OpSchema
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
    from torch.nn.modules.dropout import _DropoutNd as DropoutNd
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    AsyncCollectiveTensor = async_collective_tensor()
    DTensorSpec = _find("torch.distributed.tensor._dtensor_spec:DTensorSpec", _NO_DTENSOR)
    TensorMeta = _find("torch.distributed.tensor._dtensor_spec:TensorMeta", _NO_DTENSOR)
    OpSchema = _find("torch.distributed.tensor._op_schema:OpSchema", NO_SPMD_MODE)
    StridedShard = _find("torch.distributed.tensor.placement_types:_StridedShard", NO_SPMD_MODE)
    DropoutNd = _find("torch.nn.modules.dropout:_DropoutNd", NO_TENSOR_PARALLELISM)
    TorchDispatchMode = _find("torch.utils._python_dispatch:TorchDispatchMode", NO_TENSOR_PARALLELISM)

dispatch_modes: Final[Callable[[], list[Any]]] = _find(
    "torch.utils._python_dispatch:_get_current_dispatch_mode_stack",
    "spmd.explain does not show collectives",
    instead=list,
)
"""Returns the modes that operators of this thread are dispatched through, the same on all threads of
a backward pass.
"""
dtensor_operators: Final[Any] = _find("torch.distributed.tensor:DTensor._op_dispatcher", _NO_DTENSOR)
"""The rules by which DTensor runs operators."""
INTERNALS.expect("torch.distributed.tensor:DTensor._local_tensor", without=NO_TENSOR_PARALLELISM)
INTERNALS.expect(
    "torch.distributed.tensor:DTensor._op_dispatcher._custom_op_handlers",
    without="random numbers of a sharded model differ from those of one process",
)

# ---- tensor parallelism

default_store: Final[Callable[[], Any]] = _find(
    "torch.distributed.distributed_c10d:_get_default_store", "ShardedModule does not work"
)
register_group: Final[Callable[..., object]] = _find(
    "torch.distributed.distributed_c10d:_register_pg_in_world", "ShardedModule does not work"
)
current_mesh: Final[Callable[[], Any]] = _find(
    "torch.distributed.device_mesh:_mesh_resources.get_current_mesh",
    "parallelize_module needs its device_mesh",
)
reduction_name: Final[Callable[..., str]] = _find(
    "torch.nn._reduction:legacy_get_string", "size_average and reduce of cross_entropy do not work"
)
DISTRIBUTED: Final = "_distribute_module_applied"
"""The attribute that PyTorch gives to modules whose parameters it has distributed."""
INTERNALS.expect(
    "torch.nn:MultiheadAttention._reset_parameters", without="MultiheadAttention cannot be made by parts"
)

# ---- elastic jobs


def forget_unscaled(scaler: GradScaler) -> None:
    """Make a gradient scaler forget which optimizers' gradients it has unscaled, as its ``update`` does."""
    scaler._per_optimizer_states.clear()


_NO_FSDP: Final = "elastic jobs with fully sharded modules do not work"
_fully_sharded_state: Final = INTERNALS.later("torch.distributed.fsdp:FSDPModule._get_fsdp_state", _NO_FSDP)
_unsharded_parameter: Final = INTERNALS.later(
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._unsharded_param", _NO_FSDP
)


def forget_backward(module: Any) -> None:
    """Reset what unfinished backward passes leave in a module of FSDP2. After an exception, later passes
    would reduce no gradients; gradients that were accumulated without reduction are those of the unsharded
    parameters, which ``zero_grad`` does not reach.
    """
    state = _fully_sharded_state()(module)
    if state._is_root:  # which resets the others, too; there is none before the first forward pass
        module.reset_iter_state()
    _unsharded_parameter()
    for group in state._fsdp_param_groups:
        for each in group.fsdp_params:
            each.unsharded_accumulated_grad = None
            if hasattr(each, "_unsharded_param"):  # since the first forward pass
                each._unsharded_param.grad = None


# ---- SPMD mode: the device

set_up_device: Final[Callable[..., object]] = _find(
    "torch.utils.backend_registration:_setup_privateuseone_for_python_backend", NO_SPMD_MODE
)
make_wrapper: Final[Callable[..., Any]] = _find("torch:Tensor._make_wrapper_subclass", NO_SPMD_MODE)
disabled_torch_function: Final[Any] = _find("torch._C:_disabled_torch_function_impl", NO_SPMD_MODE)
BaseTensor: Final[Any] = _find("torch._C:TensorBase", NO_SPMD_MODE)
BaseGenerator: Final[Any] = _find("torch._C:Generator", NO_SPMD_MODE)
BaseDeviceGuard: Final[Any] = _find("torch._C:_acc.DeviceGuard", NO_SPMD_MODE)
DeviceType: Final[Any] = _find("torch._C:_autograd.DeviceType", NO_SPMD_MODE)
INTERNALS.expect("torch._C:Generator._cdata", "torch:Tensor._version", without=NO_SPMD_MODE)

backward_engine: Final[Any] = _find("torch.autograd:Variable._execution_engine", NO_SPMD_MODE)
rebuild_on_device: Final[Callable[..., Tensor]] = _find(
    "torch._utils:_rebuild_device_tensor_from_cpu_tensor", "tensors on the device cannot be pickled"
)
rebuild_parameter: Final[Callable[..., Tensor]] = _find(
    "torch._utils:_rebuild_parameter", "parameters on the device cannot be pickled"
)

_COMPILED: Final = "torch.compile does not work in SPMD mode"
FrameAction: Final[Any] = _find("torch._C._dynamo.eval_frame:_FrameAction", _COMPILED, instead=None)
FrameExecStrategy: Final[Any] = _find(
    "torch._C._dynamo.eval_frame:_FrameExecStrategy", _COMPILED, instead=None
)
set_code_exec_strategy: Final[Any] = _find(
    "torch._C._dynamo.eval_frame:set_code_exec_strategy", _COMPILED, instead=None
)

_NO_LISTS: Final = "optimizers in SPMD mode record each parameter's operations"
foreach_types: Final[tuple[list[type], ...]] = (
    _find("torch.optim.optimizer:_foreach_supported_types", _NO_LISTS, instead=[]),
    _find("torch.utils._foreach_utils:_foreach_supported_types", _NO_LISTS, instead=[]),
)
"""Classes of tensors whose lists optimizers give to one operator."""

allowed_while_uninitialized: Final[tuple[Any, ...]] = _find(
    "torch.nn.parameter:UninitializedParameter._allowed_methods",
    "lazy modules cannot be made on the device",
    instead=(),
)

# ---- SPMD mode: operators

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
    )
else:
    DataDependentOutputException = _find(
        "torch._subclasses.fake_tensor:DataDependentOutputException", NO_SPMD_MODE
    )
    DynamicOutputShapeException = _find(
        "torch._subclasses.fake_tensor:DynamicOutputShapeException", NO_SPMD_MODE
    )
    FakeTensorMode = _find("torch._subclasses.fake_tensor:FakeTensorMode", NO_SPMD_MODE)

DispatchKey: Final[Any] = _find("torch._C:DispatchKey", NO_SPMD_MODE)
DispatchKeySet: Final[Any] = _find("torch._C:DispatchKeySet", NO_SPMD_MODE)
AutoDispatchBelowAutograd: Final[Any] = _find("torch._C:_AutoDispatchBelowAutograd", NO_SPMD_MODE)
DisableAutocast: Final[Any] = _find("torch._C:_DisableAutocast", NO_SPMD_MODE)
ExcludeDispatchKeyGuard: Final[Any] = _find(
    "torch._C:_ExcludeDispatchKeyGuard", "torch.autocast does not work in SPMD mode"
)
ForceDispatchKeyGuard: Final[Any] = _find("torch._C:_ForceDispatchKeyGuard", NO_SPMD_MODE)
excluded_keys: Final[Callable[[], Any]] = _find("torch._C:_dispatch_tls_local_exclude_set", NO_SPMD_MODE)
included_keys: Final[Callable[[], Any]] = _find("torch._C:_dispatch_tls_local_include_set", NO_SPMD_MODE)
has_kernel: Final[Callable[[str, str], bool]] = _find(
    "torch._C:_dispatch_has_kernel_for_dispatch_key", NO_SPMD_MODE
)
names_of_operators: Final[Callable[[], list[str]]] = _find(
    "torch._C:_dispatch_get_all_op_names", NO_SPMD_MODE
)
is_dense: Final[Callable[[Tensor], bool]] = _find(
    "torch._prims_common:is_non_overlapping_and_dense_or_false", NO_SPMD_MODE
)

to_copy: Final[Any] = _find("torch:ops.aten._to_copy.default", NO_SPMD_MODE)
copy_from: Final[Any] = _find("torch:ops.aten._copy_from.default", NO_SPMD_MODE)
local_scalar: Final[Any] = _find("torch:ops.aten._local_scalar_dense.default", NO_SPMD_MODE)
reshape_alias: Final[Any] = _find("torch:ops.aten._reshape_alias.default", NO_SPMD_MODE)
conj: Final[Any] = _find("torch:ops.aten._conj.default", NO_SPMD_MODE)
conj_physical: Final[Any] = _find("torch:ops.aten._conj_physical.default", NO_SPMD_MODE)
neg_view_operator: Final[Any] = _find("torch:ops.aten._neg_view.default", NO_SPMD_MODE)
pin_memory: Final[Any] = _find("torch:ops.aten._pin_memory.default", NO_SPMD_MODE)
foreach_norm: Final[Any] = _find("torch:ops.aten._foreach_norm.Scalar", NO_SPMD_MODE)
pack_padded_sequence: Final[Any] = _find("torch:ops.aten._pack_padded_sequence.default", NO_SPMD_MODE)
batch_norm: Final[Any] = _find("torch:ops.aten._native_batch_norm_legit.no_stats", NO_SPMD_MODE)
batch_norm_functional: Final[Any] = _find(
    "torch:ops.aten._native_batch_norm_legit_functional.default", NO_SPMD_MODE
)
flash_attention_for_cpu: Final[Any] = _find(
    "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu.default", NO_SPMD_MODE
)
INTERNALS.expect(
    "torch:ops.aten.add.Tensor._op",
    "torch:ops.aten.add.Tensor._op_dk",
    without=NO_SPMD_MODE,
)

# ---- SPMD mode: workers

c10d_library: Final[Any] = _find("torch._C._distributed_c10d", NO_SPMD_MODE)
work_of_future: Final[Callable[[Any], Any]] = _find(
    "torch._C._distributed_c10d:_create_work_from_future",
    "programs for several processes cannot run as one in SPMD mode",
)
world: Final[Any] = _find("torch.distributed.distributed_c10d:_world", NO_SPMD_MODE)
"""All process groups of this process."""
