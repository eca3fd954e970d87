"""What PyTorch/XLA's own tests of SPMD mode hold it to, by subject, and where that is held here.

Their 39 files in ``test/spmd`` have some 240 cases. Those that can hold anywhere are written down in this
folder anew, under XLA's names:

- ``test_xla_sharding``: marks, specs, types in ``test_marks``; shards, parts from the CPU, manual sharding in
  ``test_shards``; loaders, with ``test_mp_input_sharding``, in ``test_loaders``; steps, with
  ``test_train_spmd_linear_model`` and ``test_train_spmd_imagenet``, in ``test_training``; hybrid meshes, with
  ``test_spmd_debugging``, in ``unit/spmd/sharding``
- ``test_xla_spmd_python_api_interaction``, ``test_spmd_xla_model_api``, ``test_xla_virtual_device``:
  ``test_runtime``
- ``test_dtensor_*``, ``test_xla_dtensor_*``: ``test_placements``
- ``test_fsdp_v2``, ``test_spmd_parameter_wrapping``: ``test_fsdp``
- ``test_xla_distributed_checkpoint``: ``test_checkpoints``, and ``spmd/test_sharded_checkpoints.py``
- ``test_xla_auto_sharding``, ``test_dtensor_integration2``: ``test_xla_names.py``

Those that cannot:

- Compiler text, counters of compilations, graph hashes and dumps, debug strings of tensors
  (``test_xla_sharding_hlo``, ``test_spmd_graph_dump``, ``test_spmd_lowering_context``, and single asserts):
  there is no compiler.
- ``torch.compile(backend="openxla")`` (``test_dynamo_spmd``, ``test_spmd_dynamo``): there is no such backend.
- Meshes of some of the devices (``test_submesh_*``), collectives inside manual sharding, discovery of hosts:
  theirs run on TPUs only.
- Host placeholders (``test_spmd_placeholder``): parameters on the meta device are made by ``FSDPv2``.
- ``DTensor.from_local`` on a mesh of ``"xla"``, and ``_spec``: PyTorch does not ask ``torch_xla`` for it.
- Tensors made before ``use_spmd()``, and the mode switched off by the environment (``test_runtime_spmd_api``,
  ``test_disable_spmd``): there is no device without it.

Different on purpose: results know their shardings at once, so ``placements`` of a result is no error; a
tensor that is marked is the tensor itself, and prints as one.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from farcall import compat
from tests.group.spmd.driven import WORKERS

__all__ = ["IN_ORDER", "SimpleLinear", "mesh_of", "said", "theirs"]

IN_ORDER = ",".join(map(str, range(WORKERS)))


def theirs() -> Any:
    """XLA's modules by the names that programs give them, in the mode that the session has begun."""
    compat.install()
    modules = {
        "torch_xla": "torch_xla",
        "xm": "torch_xla.core.xla_model",
        "xr": "torch_xla.runtime",
        "xs": "torch_xla.distributed.spmd",
        "pl": "torch_xla.distributed.parallel_loader",
        "xu": "torch_xla.utils.utils",
    }
    found = SimpleNamespace(**{short: importlib.import_module(name) for short, name in modules.items()})
    found.xr.use_spmd()
    return found


def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    """All workers in order."""
    return theirs().xs.Mesh(list(range(WORKERS)), shape, names)


def said(t: Tensor) -> str:
    """How a tensor is cut, asked of XLA's binding."""
    spec: str = theirs().torch_xla._XLAC._get_xla_sharding_spec(t)
    return spec


class SimpleLinear(nn.Module):
    """Two layers, the second to one feature."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(128, 64), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc2(torch.relu(self.fc1(x)))
        return result
