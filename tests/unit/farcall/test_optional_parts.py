"""Each optional part is a leaf: without its folders, everything else is imported, and calls work."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from tests.support.fresh import RunFresh

ROOT = Path(__file__).resolve().parents[3]

ADAPTERS = ("weights/torchrl.py", "weights/verl.py", "weights/vllm.py")
TRANSPORTS_AND_VIEWS = ("page", "compat/torch_xla", "ray", "kserve", "one_sided", *ADAPTERS)
SERVING = ("grpc", "serving", "client", "v1", "scraping.py", "observe/metrics")
"""What needs gRPC, and what counts for it."""

PROGRAM = """
import sys
from importlib import import_module
from pkgutil import walk_packages

import torch
from torch.distributed import HashStore

import farcall.cli, farcall.compat, farcall.launch, farcall.observe, farcall.weights
import dist_autograd, dist_optim, rpc, rref, spmd

for package in (farcall.observe, farcall.launch, farcall.weights, *map(import_module, sys.argv[1:])):
    for found in walk_packages(package.__path__, package.__name__ + "."):
        if found.name not in ("farcall.serving.inference", "farcall.launch.guard"):
            import_module(found.name)
rpc.init_with_store(None, HashStore(), "alone", 0, 1)
print(rpc.rpc_sync("alone", torch.add, args=(torch.ones(2), 1)).tolist())
rpc.shutdown()
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("removed", "imported"),
    [(TRANSPORTS_AND_VIEWS, ["farcall.serving"]), ((*TRANSPORTS_AND_VIEWS, *SERVING), [])],
    ids=["page, XLA, Ray, kserve, one-sided transfers and adapters", "these and gRPC"],
)
def test_nothing_else_needs_the_optional_parts(
    removed: tuple[str, ...], imported: list[str], tmp_path: Path, run_fresh: RunFresh
) -> None:
    for package in ("rpc", "rref", "dist_autograd", "dist_optim", "spmd", "farcall_guard.py"):
        (tmp_path / package).symlink_to(ROOT / package)
    copy_without(ROOT / "farcall", tmp_path / "farcall", {ROOT / "farcall" / each for each in removed})
    site = tmp_path / "site"
    site.mkdir()
    for installed in Path(sysconfig.get_path("purelib")).iterdir():
        if "farcall" not in installed.name:
            (site / installed.name).symlink_to(installed)
    done = run_fresh(PROGRAM, *imported, folder=tmp_path, path=[tmp_path, site])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[2.0, 2.0]"]


def copy_without(source: Path, target: Path, removed: set[Path]) -> None:
    """Link to all files of a folder, and of the folders in it, except those that are removed."""
    target.mkdir()
    for each in source.iterdir():
        if each in removed or each.name == "__pycache__":
            continue
        if each.is_dir():
            copy_without(each, target / each.name, removed)
        else:
            (target / each.name).symlink_to(each)
