"""Names of PyTorch's modules that a facade does not define: lent if they come from elsewhere, or refused.

The modules of PyTorch's RPC also have the names that they import, such as ``torch`` and ``Future``, and
programs import them from there. An error for any other name says what to use instead.
"""

from __future__ import annotations

import logging
import opcode
import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any, Final

__all__ = ["INSTEAD", "displaced", "without_counterpart"]

displaced: Final[dict[str, ModuleType]] = {}
"""PyTorch's modules that facades have replaced, by name."""

_OF_RPC: Final = (
    "torch.distributed.rpc",
    "torch.distributed.autograd",
    "torch.distributed.nn",
    "torch.distributed.optim",
)
"""The parts of PyTorch whose own names are never lent."""

_BY_SHUTDOWN: Final = "rpc.shutdown() does this"
_BY_INIT: Final = "rpc.init_rpc(...) does this"
_MEMBERS: Final = "rpc.init_rpc and rpc.shutdown manage the members; rpc.get_worker_info reads them"
_GATHERING: Final = "call torch.distributed.rpc.api._all_gather, or rpc.all_gather of farcall"
_PROFILER: Final = "use rpc._server_process_global_profile"
_PROFILED: Final = "a call made inside torch.autograd.profiler.profile() is named in the profile by itself"
_SENT: Final = "pass references as arguments and results of calls"
_DEVICES: Final = "use set_devices and set_device_map of rpc.TensorPipeRpcBackendOptions"
_BACKENDS: Final = "use rpc.register_backend, rpc.construct_rpc_backend_options and rpc.init_backend"
_REDUCERS: Final = "use _internal_rpc_pickler and its _register_reducer"
_MODULE: Final = "use RemoteModule and its methods"
_OPTIMIZER: Final = "use torch.distributed.optim.DistributedOptimizer"
_TYPES: Final = "define a TypeVar of your own"

INSTEAD: Final[dict[str, str]] = {
    "RemoteProfilerManager": _PROFILED,
    "T": _TYPES,
    "_LocalOptimizer": _OPTIMIZER,
    "_NON_SCRIPTABLE_REMOTE_MODULE_MODULE": _MODULE,
    "_P": _TYPES,
    "_R": _TYPES,
    "_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING": _MODULE,
    "_FunctionalLocalOptimizer": _OPTIMIZER,
    "_ScriptLocalOptimizer": _OPTIMIZER,
    "_ScriptLocalOptimizerInterface": _OPTIMIZER,
    "_SerializedRemoteModule": _MODULE,
    "_all_gather_dict_lock": _GATHERING,
    "_all_gather_sequence_id": _GATHERING,
    "_all_gather_sequence_id_to_states": _GATHERING,
    "_backend_type_doc": _BACKENDS,
    "_backend_type_repr": _BACKENDS,
    "_broadcast_to_followers": _GATHERING,
    "_cleanup_python_rpc_handler": _BY_SHUTDOWN,
    "_create_device_list": _DEVICES,
    "_create_module": _MODULE,
    "_create_module_with_interface": _MODULE,
    "_create_reverse_mapping": _DEVICES,
    "_destroy_rref_context": _BY_SHUTDOWN,
    "_disable_jit_rref_pickle": _SENT,
    "_disable_server_process_global_profiler": _PROFILER,
    "_enable_jit_rref_pickle": _SENT,
    "_enable_rpc_profiler": _PROFILED,
    "_enable_server_process_global_profiler": _PROFILER,
    "_finalize_shutdown": _BY_SHUTDOWN,
    "_functional_local_optimizer_step": _OPTIMIZER,
    "_gather_to_leader": _GATHERING,
    "_get_device_infos": _DEVICES,
    "_grad_t": "use torch.Tensor",
    "_group_membership_management": _MEMBERS,
    "_init_counter": _BY_INIT,
    "_init_counter_lock": _BY_INIT,
    "_init_process_group": "call torch.distributed.init_process_group",
    "_init_rpc_states": _BY_INIT,
    "_instantiate_template": _MODULE,
    "_local_optimizer_step": _OPTIMIZER,
    "_new_functional_local_optimizer": _OPTIMIZER,
    "_new_local_optimizer": _OPTIMIZER,
    "_new_script_local_optimizer": _OPTIMIZER,
    "_param_rrefs": "call remote_parameters() of the RemoteModule",
    "_pickler": _REDUCERS,
    "_raise_not_supported": _MODULE,
    "_recursive_script_module_receiver": _REDUCERS,
    "_recursive_script_module_reducer": _REDUCERS,
    "_remote_device": "import it from torch.distributed",
    "_remote_module_receiver": _REDUCERS,
    "_remote_module_reducer": _REDUCERS,
    "_reset_current_rpc_agent": _BY_SHUTDOWN,
    "_script_local_optimizer_step": _OPTIMIZER,
    "_set_devices_and_reverse_device_map": _DEVICES,
    "_set_profiler_node_id": _BY_INIT,
    "_start_record_function": _PROFILED,
    "_tensorpipe_construct_rpc_backend_options_handler": _BACKENDS,
    "_tensorpipe_exchange_and_check_all_device_maps": _DEVICES,
    "_tensorpipe_init_backend_handler": _BACKENDS,
    "_tensorpipe_validate_devices": _DEVICES,
    "_thread_local_tensor_tables": _REDUCERS,
    "_unpickler": _REDUCERS,
    "_update_group_membership": _MEMBERS,
    "_utils": _MEMBERS,
    "_validate_device_maps": _DEVICES,
    "_validate_rpc_args": "rpc.init_rpc checks its arguments",
    "_wait_for_all": "call torch.futures.wait_all",
    "enable_gil_profiling": "run `farcall why`, which names a thread that holds the interpreter lock",
    "faulty_agent_backend_registry": "use the backend FAULTY_TENSORPIPE of rpc._testing",
    "functional_optim_map": "import it from torch.distributed.optim.utils",
}
"""What to use in place of each name that is refused."""


def without_counterpart(module: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module's facade.

    Args:
        module: PyTorch's name of the module.
    """

    def lend_or_refuse(name: str) -> Any:
        lent = getattr(displaced.get(module), name, None)
        if not name.startswith("_") and name not in INSTEAD and _is_from_elsewhere(lent):
            return lent
        text = f"farcall.compat has no counterpart of {module}.{name}"
        if name in INSTEAD:
            text += f": {INSTEAD[name]}"
        if _is_imported_in(sys._getframe(1)):  # Python would hide an AttributeError's text
            raise ImportError(f"cannot import name {name!r} from {module!r}: {text}", name=module)
        raise AttributeError(text)

    return lend_or_refuse


def _is_from_elsewhere(value: object) -> bool:
    """Whether something in a module of PyTorch's RPC was only imported there."""
    if isinstance(value, logging.Logger):
        return False
    home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return isinstance(home, str) and hasattr(value, "__name__") and not home.startswith(_OF_RPC)


def _is_imported_in(frame: FrameType | None) -> bool:
    """Whether a module's attribute is looked up by ``from module import name``."""
    while frame is not None and frame.f_code.co_name == "__getattr__":  # a facade's own, around this one
        frame = frame.f_back
    return frame is not None and frame.f_code.co_code[frame.f_lasti] == opcode.opmap["IMPORT_FROM"]
