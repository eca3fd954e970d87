"""The sides of a comparison: farcall, an earlier revision of it, and other systems."""

from __future__ import annotations

import importlib
import io
import multiprocessing
import os
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.workload import Workload
from farcall_guard import PACKAGES

__all__ = ["FARCALL", "PEERS", "Side", "Unavailable", "peer", "revision"]

_ROOT = Path(__file__).parent.parent


class Unavailable(Exception):
    """A side that cannot be measured here; the message says why."""


@dataclass(frozen=True)
class Side:
    """Something that has the names of an RPC module.

    Attributes:
        name: heads its column.
        title: its full name.
        module: has its names.
        options: the name of the module's class of options.
        network: options that make its workers behave as if they were on different hosts.
        calls: what it can run of what is not about large tensors; ``None`` for all.
        starts_its_workers: ``init_rpc`` is for worker 0 only.
        encrypts: it has TLS where a workload asks for it.
        folder: found first when modules are imported; ``None`` for this process's path as it is.
        missing: what to say where there is no such module.
    """

    name: str
    title: str
    module: str
    options: str = "TensorPipeRpcBackendOptions"
    network: Mapping[str, Any] = field(default_factory=dict)
    calls: frozenset[str] | None = None
    starts_its_workers: bool = False
    encrypts: bool = True
    folder: Path | None = None
    missing: str = ""

    def can_run(self, workload: Workload) -> bool:
        """Whether it has what a workload needs."""
        if workload.stripes or workload.encrypted or workload.own:
            return self.module == "rpc"
        if self.calls is None or workload.name in self.calls:
            return True
        return workload.part == "tensors" and not (workload.network and self.starts_its_workers)

    def load(self) -> Any:
        """Import its module: in a worker, since only one of the sides can be in a process."""
        if self.folder is not None:
            sys.path.insert(0, str(self.folder))
            importlib.invalidate_caches()  # it may have been filled a moment ago
            for name in [each for each in sys.modules if each.partition(".")[0] in _OURS]:
                del sys.modules[name]  # PyTorch's entry points may have imported another tree's
            os.environ["PYTHONPATH"] = os.pathsep.join((str(self.folder), os.environ.get("PYTHONPATH", "")))
        module = importlib.import_module(self.module)
        if self.folder is not None and not Path(module.__file__ or "").is_relative_to(self.folder):
            raise ImportError(f"{self.module} of {self.folder} was asked for, {module.__file__} was imported")
        return module


_OURS: Final = frozenset(("farcall", "farcall_backend", "farcall_guard", *PACKAGES))

_FARCALL_ON_A_NETWORK = {"transports": ["tcp"], "shared_memory_bytes": 0}
FARCALL = Side("farcall", "farcall", "rpc", "AgentOptions", _FARCALL_ON_A_NETWORK, folder=_ROOT)

PEERS = {
    "torch": Side(
        "torch",
        "torch.distributed.rpc",
        "torch.distributed.rpc",
        network={"_transports": ["uv"], "_channels": ["basic"]},
        missing="this PyTorch has no torch.distributed.rpc",
    ),
    "plain": Side(
        "plain",
        "farcall without TLS",
        "rpc",
        "AgentOptions",
        _FARCALL_ON_A_NETWORK,
        encrypts=False,
        folder=_ROOT,
        missing="farcall cannot be imported here",
    ),
    "grpc": Side(
        "grpc",
        "gRPC",
        "benchmarks.grpc_peer",
        calls=frozenset(("null", "small", "window", "idle")),
        missing="there is no gRPC here (pip install grpcio)",
    ),
    "ray": Side(
        "ray",
        "Ray",
        "benchmarks.ray_peer",
        calls=frozenset(("null", "small", "remote", "window", "idle")),  # no calls back to its driver
        starts_its_workers=True,
        missing="there is no Ray here (pip install ray)",
    ),
}
"""Other systems, and farcall without TLS, by the name that the command accepts."""


def peer(name: str) -> Side:
    """One of ``PEERS``.

    Raises:
        Unavailable: it is not installed. (Asked in a child, so that this process does not import it.)
    """
    side = PEERS[name]
    child = multiprocessing.get_context("fork").Process(target=_try_import, args=(side.module,))
    child.start()
    child.join()
    if child.exitcode != 0:
        raise Unavailable(side.missing)
    return side


def _try_import(module: str) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    raise SystemExit(0 if hasattr(importlib.import_module(module), "init_rpc") else 1)


def revision(name: str, folder: Path) -> Side:
    """Farcall as it was at a revision of its repository.

    Args:
        name: what git understands: a commit, a branch, a tag, ``HEAD~3``.
        folder: where its files are put.

    Raises:
        Unavailable: git knows no such revision here.
    """
    packed = subprocess.run(
        ["git", "-C", str(_ROOT), "archive", "--format=tar", name], capture_output=True, check=False
    )
    if packed.returncode:
        raise Unavailable(f"neither {', '.join(PEERS)} nor a revision: {packed.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # CPython 3.11.4 and newer
        archive.extractall(folder)
    _add_metadata(folder)
    return Side(name, f"farcall at {name}", "rpc", "AgentOptions", _FARCALL_ON_A_NETWORK, folder=folder)


def _add_metadata(folder: Path) -> None:
    """Describe a revision's distribution as an installation would. Otherwise, its workers would find the
    entry points of the distribution that is installed, and import extensions of the wrong revision.
    """
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    described = folder / f"{project['name']}-{project['version']}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = project.get("entry-points", {})
    lines = [
        line for group, names in groups.items() for line in (f"[{group}]", *map(" = ".join, names.items()))
    ]
    (described / "entry_points.txt").write_text("\n".join(lines) + "\n")
