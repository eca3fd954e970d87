"""``rpc`` is complete by itself: calls work where none of the packages that build on it are installed."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from tests.support.fresh import RunFresh

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
import sys
from importlib.util import find_spec

import torch
from torch.distributed import HashStore

import rpc

assert not [name for name in ("rref", "dist_autograd", "dist_optim", "spmd", "farcall") if find_spec(name)]
rpc.init_with_store(None, HashStore(), "alone", 0, 1)
print(rpc.rpc_sync("alone", torch.add, args=(torch.ones(2), 1)).tolist())
print(rpc.rpc_async("alone", max, args=(2, 3)).wait())
try:
    rpc.remote("alone", list)
except ModuleNotFoundError as error:
    print(error)
rpc.shutdown()
"""


@pytest.mark.processes
def test_calls_need_none_of_the_packages_above(tmp_path: Path, run_fresh: RunFresh) -> None:
    (tmp_path / "rpc").symlink_to(ROOT / "rpc")
    (tmp_path / "farcall_guard.py").write_text((ROOT / "farcall_guard.py").read_text())
    site = tmp_path / "site"
    site.mkdir()
    for installed in Path(sysconfig.get_path("purelib")).iterdir():
        if "farcall" not in installed.name:
            (site / installed.name).symlink_to(installed)
    done = run_fresh(PROGRAM, folder=tmp_path, path=[tmp_path, site])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[2.0, 2.0]", "3", "No module named 'rref'"]
