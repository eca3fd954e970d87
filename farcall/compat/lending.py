"""Lends the names of ``torch_xla`` to our SPMD mode, and those of ``torchft`` to elastic jobs, where they are
not installed.

Python asks our finder last, so an installed package stays what it is. ``torch_xla`` is not lent until the
program asks: by ``lend(at_once=True)``, or by an import in its own source. Libraries that look for
``torch_xla`` find it from then on, and not before. A lent module has what our module offers in ``__all__``,
and is made when it is first imported.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType
from typing import Any, Final

from farcall.compat.own_source import is_imported_by_the_program

__all__ = ["is_lent", "lend", "take_back"]

_OURS: Final = "farcall.compat.torch_xla"
_TORCHFT: Final = "farcall.compat.torchft"

_LENT: Final[dict[str, str | None]] = {
    "torchft": _TORCHFT,
    **{
        f"torchft.{name}": f"{_TORCHFT}.{name}"
        for name in ("data", "ddp", "local_sgd", "manager", "optim", "process_group")
    },
    "torch_xla": f"{_OURS}.package",
    "torch_xla._XLAC": f"{_OURS}.binding",
    "torch_xla._internal": None,
    "torch_xla._internal.tpu": f"{_OURS}.tpu",
    "torch_xla.amp": f"{_OURS}.amp",
    "torch_xla.amp.syncfree": f"{_OURS}.syncfree",
    "torch_xla.core": None,
    "torch_xla.core.xla_builder": None,
    "torch_xla.core.xla_env_vars": f"{_OURS}.env_vars",
    "torch_xla.core.xla_model": f"{_OURS}.model",
    "torch_xla.debug": None,
    "torch_xla.debug.metrics": f"{_OURS}.metrics",
    "torch_xla.debug.profiler": f"{_OURS}.profiler",
    "torch_xla.distributed": None,
    "torch_xla.distributed.fsdp": f"{_OURS}.fsdp",
    "torch_xla.distributed.fsdp.utils": f"{_OURS}.fsdp_utils",
    "torch_xla.distributed.fsdp.wrap": "spmd.fsdp.wrap",
    "torch_xla.distributed.parallel_loader": f"{_OURS}.loader",
    "torch_xla.distributed.spmd": f"{_OURS}.sharding",
    "torch_xla.distributed.spmd.api": f"{_OURS}.sharding",
    "torch_xla.distributed.spmd.debugging": f"{_OURS}.debugging",
    "torch_xla.distributed.spmd.xla_sharded_tensor": f"{_OURS}.sharding",
    "torch_xla.distributed.spmd.xla_sharding": f"{_OURS}.sharding",
    "torch_xla.distributed.xla_backend": f"{_OURS}.process_group",
    "torch_xla.distributed.xla_multiprocessing": f"{_OURS}.launching",
    "torch_xla.experimental": f"{_OURS}.eager",
    "torch_xla.experimental.custom_kernel": None,
    "torch_xla.experimental.distributed_checkpoint": "spmd.checkpoint",
    "torch_xla.experimental.distributed_checkpoint._helpers": f"{_OURS}.checkpoint_helpers",
    "torch_xla.experimental.distributed_checkpoint.manager": "spmd.checkpoint.manager",
    "torch_xla.experimental.distributed_checkpoint.planners": "spmd.checkpoint.planners",
    "torch_xla.experimental.distributed_checkpoint.util": "spmd.checkpoint.priming",
    "torch_xla.experimental.eager": f"{_OURS}.eager",
    "torch_xla.experimental.gradient_accumulation": f"{_OURS}.loops",
    "torch_xla.experimental.scan": f"{_OURS}.loops",
    "torch_xla.experimental.scan_layers": f"{_OURS}.loops",
    "torch_xla.experimental.splash_attention": None,
    "torch_xla.experimental.spmd_fully_sharded_data_parallel": "spmd.fsdp",
    "torch_xla.experimental.xla_quantized_matmul": None,
    "torch_xla.experimental.xla_sharded_tensor": f"{_OURS}.sharding",
    "torch_xla.experimental.xla_sharding": f"{_OURS}.sharding",
    "torch_xla.runtime": f"{_OURS}.runtime",
    "torch_xla.stablehlo": None,
    "torch_xla.test": None,
    "torch_xla.test.test_utils": f"{_OURS}.printing",
    "torch_xla.utils": None,
    "torch_xla.utils.checkpoint": f"{_OURS}.rematerialization",
    "torch_xla.utils.utils": f"{_OURS}.sampling",
}
"""The facade of each module; None for a package that only contains others."""


class _Lender(MetaPathFinder, Loader):
    is_asked = False
    """Whether the program has asked for these names."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        package = fullname.partition(".")[0]
        is_theirs = not isinstance(sys.modules.get(package), _Lent) and fullname != package
        if fullname not in _LENT or is_theirs:
            return None
        if package == "torchft":
            return spec_from_loader(fullname, self, origin="farcall", is_package=_has_modules(fullname))
        if find_spec(_OURS) is None:
            return None
        if not self.is_asked and not is_imported_by_the_program():
            return None
        self.is_asked = True
        return spec_from_loader(fullname, self, origin="farcall", is_package=_has_modules(fullname))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Lent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__.startswith("torch_xla"):
            absent = importlib.import_module(f"{_OURS}.absent").absent
            module.__dict__.update(absent(module.__name__))
        ours = _LENT[module.__name__]
        if ours is not None:
            source = importlib.import_module(ours)
            module.__doc__ = source.__doc__
            module.__dict__.update({name: getattr(source, name) for name in source.__all__})


class _Lent(ModuleType):
    """A module that imports those below it when they are asked for, as ``torch_xla`` has imported them."""

    def __getattr__(self, name: str) -> Any:
        below = f"{self.__name__}.{name}"
        if below in _LENT:
            return importlib.import_module(below)
        page = "elastic" if self.__name__.startswith("torchft") else "xla_compatibility"
        raise AttributeError(
            f"farcall lends {self.__name__} without {name!r}; what it has is in docs/{page}.md"
        )


def _has_modules(name: str) -> bool:
    return any(other.startswith(name + ".") for other in _LENT)


_lender: Final = _Lender()


def lend(*, at_once: bool) -> None:
    """Have ``import torch_xla`` and ``import torchft`` find ours, unless there is another.

    Programs for torchft find the number of their replica in the environment, where torchft's launcher sets
    it; here each worker of a dynamic group is one.

    Args:
        at_once: False: from the program's first import of it on.
    """
    _lender.is_asked |= at_once
    if "RANK" in os.environ and "WORLD_SIZE" not in os.environ:
        os.environ.setdefault("REPLICA_GROUP_ID", os.environ["RANK"])
        os.environ.setdefault("NUM_REPLICA_GROUPS", os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if _lender not in sys.meta_path:
        sys.meta_path.append(_lender)


def is_lent() -> bool:
    """Whether libraries find ``torch_xla``, too."""
    return _lender in sys.meta_path and _lender.is_asked


def take_back() -> None:
    """Undo :func:`lend`."""
    sys.meta_path.remove(_lender)
    _lender.is_asked = False
    for name, undo in (
        ("device_name", "give_back"),
        ("operators", "take_away"),
        ("compiling", "give_back"),
        ("specs", "give_back"),
    ):
        module = sys.modules.get(f"{_OURS}.{name}")
        if module is not None:
            getattr(module, undo)()
    for name in [name for name, module in sys.modules.items() if isinstance(module, _Lent)]:
        del sys.modules[name]
