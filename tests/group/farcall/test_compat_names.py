"""``farcall.compat`` answers for every name of PyTorch's RPC, private ones too: lent, or refused.

The names are those of the PyTorch that is installed, module by module. One that a new version adds fails
here until somebody decides.
"""

from __future__ import annotations

import importlib
import pkgutil
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
import torch

import rpc as ours
from tests.support.fresh import RunFresh
from tests.support.serving import in_processes, in_worker0

EXTENSION = {
    "RemoteProfilerManager",
    "_cleanup_python_rpc_handler",
    "_destroy_rref_context",
    "_disable_jit_rref_pickle",
    "_disable_server_process_global_profiler",
    "_enable_jit_rref_pickle",
    "_enable_server_process_global_profiler",
    "_reset_current_rpc_agent",
    "_set_profiler_node_id",
    "enable_gil_profiling",
}
"""What programs cannot do to our agent: take its parts down one by one, or switch parts of PyTorch's on."""

RPC = "torch.distributed.rpc"

REFUSED: dict[str, set[str]] = {
    "torch._C._distributed_rpc": EXTENSION,
    "torch._C._distributed_rpc_testing": set(),
    "torch._C._distributed_autograd": set(),
    "torch.distributed.autograd": set(),
    RPC: EXTENSION | {"_init_counter", "_init_counter_lock", "_validate_rpc_args", "_utils"},
    f"{RPC}._testing": {"faulty_agent_backend_registry"},
    f"{RPC}.api": {
        "RemoteProfilerManager",
        "T",
        "_P",
        "_R",
        "_all_gather_dict_lock",
        "_all_gather_sequence_id",
        "_all_gather_sequence_id_to_states",
        "_broadcast_to_followers",
        "_cleanup_python_rpc_handler",
        "_destroy_rref_context",
        "_enable_rpc_profiler",
        "_finalize_shutdown",
        "_gather_to_leader",
        "_group_membership_management",
        "_init_rpc_states",
        "_reset_current_rpc_agent",
        "_update_group_membership",
    },
    f"{RPC}.backend_registry": {
        "_backend_type_doc",
        "_backend_type_repr",
        "_create_device_list",
        "_create_reverse_mapping",
        "_get_device_infos",
        "_group_membership_management",
        "_init_process_group",
        "_set_devices_and_reverse_device_map",
        "_tensorpipe_construct_rpc_backend_options_handler",
        "_tensorpipe_exchange_and_check_all_device_maps",
        "_tensorpipe_init_backend_handler",
        "_tensorpipe_validate_devices",
        "_update_group_membership",
        "_validate_device_maps",
    },
    f"{RPC}.constants": set(),
    f"{RPC}.functions": set(),
    f"{RPC}.internal": {"_pickler", "_start_record_function", "_thread_local_tensor_tables", "_unpickler"},
    f"{RPC}.options": set(),
    f"{RPC}.rref_proxy": set(),
    f"{RPC}.server_process_global_profiler": {
        "_disable_server_process_global_profiler",
        "_enable_server_process_global_profiler",
    },
    "torch.distributed.nn.api.remote_module": {
        "T",
        "_NON_SCRIPTABLE_REMOTE_MODULE_MODULE",
        "_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING",
        "_SerializedRemoteModule",
        "_create_module",
        "_create_module_with_interface",
        "_grad_t",
        "_instantiate_template",
        "_param_rrefs",
        "_raise_not_supported",
        "_recursive_script_module_receiver",
        "_recursive_script_module_reducer",
        "_remote_device",
        "_remote_module_receiver",
        "_remote_module_reducer",
    },
    "torch.distributed.optim.optimizer": {
        "_LocalOptimizer",
        "_ScriptLocalOptimizer",
        "_ScriptLocalOptimizerInterface",
        "_local_optimizer_step",
        "_new_local_optimizer",
        "_new_script_local_optimizer",
        "_script_local_optimizer_step",
        "_wait_for_all",
        "functional_optim_map",
    },
}
"""For each module that is replaced, those names of PyTorch's making that are about how it is built."""

IN_NEWER_VERSIONS = {
    "torch.distributed.optim.optimizer": {
        "_FunctionalLocalOptimizer",
        "_functional_local_optimizer_step",
        "_new_functional_local_optimizer",
    }
}
"""Names that PyTorch 2.14 and 2.15 have added, and that are refused."""

NOT_REPLACED = {f"{RPC}._utils", f"{RPC}._testing.faulty_agent_backend_registry"}
"""Modules without a counterpart."""

STAY = {
    "torch.distributed.nn",
    "torch.distributed.nn.api",
    "torch.distributed.nn.functional",
    "torch.distributed.nn.jit",
    "torch.distributed.nn.jit.instantiator",
    "torch.distributed.nn.jit.templates",
    "torch.distributed.nn.jit.templates.remote_module_template",
}
"""Modules that stay PyTorch's: functions of process groups, packages around what is replaced, and what writes
the code of remote modules, which only uses names of the modules that are replaced.
"""

OF_THE_LANGUAGE = {"TYPE_CHECKING", "annotations"}
CONSTANTS = (bool, float, int, str, timedelta, type(None))


def is_of_rpc(value: Any) -> bool:
    """Whether it was made for PyTorch's RPC, and not imported from elsewhere by its modules."""
    home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or RPC
    places = (*REFUSED, *NOT_REPLACED, RPC)
    return any(home == place or home.startswith(place + ".") for place in places)


@in_processes(1)
def test_every_name_of_the_installed_pytorch_is_lent_or_refused() -> None:
    theirs = {name: names_in(name) for name in all_of_pytorchs_modules() - STAY}
    from farcall import compat

    compat.install()
    assert theirs.keys() == REFUSED.keys() | NOT_REPLACED
    wrong = []
    for module, refused in REFUSED.items():
        facade = importlib.import_module(module)
        for name, value in theirs[module].items():
            if name in OF_THE_LANGUAGE or name.startswith("__"):
                continue
            try:
                lent = getattr(facade, name)
            except AttributeError as error:
                allowed = name in refused | IN_NEWER_VERSIONS.get(module, set())
                if not allowed or not str(error).endswith(f"no counterpart of {module}.{name}"):
                    wrong.append(f"{module}.{name}: refused with {error}")
            else:
                if name in refused:
                    wrong.append(f"{module}.{name}: lent")
                elif lent is value and is_of_rpc(value) and not isinstance(value, CONSTANTS):
                    wrong.append(f"{module}.{name}: PyTorch's own")
    assert not wrong, "\n".join(wrong)
    for module in NOT_REPLACED:
        with pytest.raises(ModuleNotFoundError, match=r"no counterpart of torch\.distributed\."):
            importlib.import_module(module)


def names_in(module: str) -> dict[str, Any]:
    package, _, name = module.rpartition(".")
    if package == "torch._C":  # whose parts cannot all be imported
        return dict(vars(getattr(torch._C, name)))
    return dict(vars(importlib.import_module(module)))


def all_of_pytorchs_modules() -> set[str]:
    """Every module of its RPC, distributed autograd and remote modules, in Python and in C++."""
    names = {"torch.distributed.autograd", "torch.distributed.optim.optimizer"}
    for package in (RPC, "torch.distributed.nn"):
        found = pkgutil.walk_packages(importlib.import_module(package).__path__, package + ".")
        names |= {package, *(module.name for module in found)}
    parts = [name for name in dir(torch._C) if name.startswith(("_distributed_rpc", "_distributed_autograd"))]
    return names | {f"torch._C.{part}" for part in parts}


@in_processes(1)
def test_what_stays_pytorchs_is_its_own() -> None:
    before = {name: dict(vars(importlib.import_module(name))) for name in STAY}
    from farcall import compat

    compat.install()
    changed = {
        f"{module}.{name}"
        for module, theirs in before.items()
        for name, value in vars(importlib.import_module(module)).items()
        if theirs.get(name) is not value
    }
    assert changed == {
        "torch.distributed.nn.RemoteModule",
        "torch.distributed.nn.api.remote_module",
    }


@torch.jit.script
def halve(x: torch.Tensor) -> torch.Tensor:
    return x / 2


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self, number: int, *, times: int = 1) -> int:
        self.count += number * times
        return self.count


@in_worker0()
def test_private_doors_make_calls() -> None:
    from farcall import compat

    compat.install()
    doors, private, internal, proxies = (
        importlib.import_module(name)
        for name in ("torch._C._distributed_rpc", f"{RPC}.api", f"{RPC}.internal", f"{RPC}.rref_proxy")
    )
    to, two = ours.get_worker_info("worker1"), torch.full((2,), 2.0)
    call = internal.serialize(internal.PythonUDF(max, (3, 4), {}))
    script = torch._jit_internal._qualified_name(halve)
    values = [
        private._invoke_rpc(to, max, private.RPCExecMode.SYNC, (3, 4)).wait(),
        doors._invoke_rpc_python_udf(to, *call, 5, False).wait(),
        doors._invoke_remote_python_udf(to, *call, 5, False).to_here(),
    ]
    assert values == [4, 4, 4]
    tensors = [
        doors._invoke_rpc_builtin(to, "aten::add", 5, two, 2, alpha=0).wait(),
        doors._invoke_remote_builtin(to, "aten::mul", 5, two, 1).to_here(),
        doors._invoke_rpc_torchscript("worker1", script, (two * 2,), {}, 5, False).wait(),
        doors._invoke_remote_torchscript("worker1", script, 5, False, two * 2).to_here(),
    ]
    assert all(torch.equal(tensor, two) for tensor in tensors)
    counter: Any = ours.remote("worker1", Counter)
    assert proxies._invoke_rpc(counter, ours.rpc_sync, "add", 5, 1, times=2) == 2
    assert proxies._invoke_rpc(counter, ours.rpc_async, "add", 5, 1).wait() == 3
    assert ours.rpc_sync(to, proxies._local_invoke, (counter, "add", (1,), {})) == 4
    assert private._rref_typeof_on_user(counter) is Counter
    assert {"worker0", "worker1"} == private._ALL_WORKER_NAMES


@in_processes(1)
def test_an_import_of_a_refused_name_says_so() -> None:
    from farcall import compat

    compat.install()
    for statement in (
        f"from {RPC} import enable_gil_profiling",
        "from torch._C._distributed_rpc import enable_gil_profiling",
    ):
        with pytest.raises(
            ImportError, match=r"cannot import name 'enable_gil_profiling' .* no counterpart of torch"
        ):
            exec(statement)
    with pytest.raises(ImportError, match=rf"no counterpart of {RPC}\.api\._finalize_shutdown"):
        exec(f"from {RPC}.api import _finalize_shutdown")
    with pytest.raises(ModuleNotFoundError, match=rf"no counterpart of {RPC}\._utils"):
        exec(f"import {RPC}._utils")
    assert not hasattr(importlib.import_module(RPC), "RemoteProfilerManager")


class Fragile(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first, second)


def fail(error: Exception) -> None:
    raise error


@in_worker0()
def test_names_that_libraries_take_from_inside_do_their_work() -> None:
    from farcall import compat

    compat.install()
    theirs, api, internal, instantiator = (
        importlib.import_module(name)
        for name in (RPC, f"{RPC}.api", f"{RPC}.internal", "torch.distributed.nn.jit.instantiator")
    )
    states = theirs.AllGatherStates()
    assert (states.gathered_objects, states.proceed_signal.is_set()) == ({}, False)
    assert api.AllGatherStates is theirs.AllGatherStates
    assert api.Future is torch.futures.Future
    fetch = theirs.method_factory("to_here", "Fetches.")
    assert fetch.__doc__ == "Fetches."
    assert fetch(ours.remote("worker1", max, args=(3, 4)), timeout=5) == 4
    assert theirs.new_method(ours.RRef(5)) == 5
    assert theirs.method_factory("__str__", None)(ours.RRef(5)).startswith("OwnerRRef")
    with pytest.raises(AttributeError, match="no_method"):
        theirs.method_factory("no_method", None)(ours.RRef(5))

    run, raise_from = (getattr(internal, name) for name in ("_run_function", "_handle_exception"))
    assert run(internal.PythonUDF(max, (3, 4), {})) == 4
    for call in (internal.PythonUDF(fail, (KeyError("x"),), {}), AttributeError("no such function")):
        failure = run(call)
        assert "worker0" in failure.msg
        with pytest.raises(failure.exception_type, match="worker0"):
            raise_from(failure)
    with pytest.raises(RuntimeError, match="the callee raised Fragile"):
        raise_from(internal.RemoteException("text", Fragile))
    raise_from(4)

    written = instantiator.instantiate_non_scriptable_remote_module_template()
    assert written.rpc is theirs
    module = importlib.import_module("torch.distributed.nn").RemoteModule("worker1/cpu", torch.nn.Identity)
    assert torch.equal(written.forward(module, torch.ones(2)), torch.ones(2))


def test_remote_modules_bring_the_packages_that_pytorchs_bring(run_fresh: RunFresh) -> None:
    program = (
        "import torch.distributed as dist; assert not hasattr(dist, 'nn');"
        "from farcall import compat; compat.install(); import torch.distributed.nn;"
        "print(dist.nn.jit.instantiator.__name__)"
    )
    done = run_fresh(program)
    assert done.stdout.strip() == "torch.distributed.nn.jit.instantiator", done.stderr


def test_remote_modules_do_without_pytorchs_package_for_scripts(run_fresh: RunFresh) -> None:
    program = (
        "import sys; sys.modules['torch.distributed.nn.jit.instantiator'] = None;"
        "from farcall import compat; compat.install(); import torch.distributed.nn;"
        "print(torch.distributed.nn.RemoteModule.__module__)"
    )
    done = run_fresh(program)
    assert done.stdout.strip() == "farcall.compat.torch_nn", done.stderr
