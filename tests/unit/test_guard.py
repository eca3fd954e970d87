"""Another module that has the name of one of farcall's packages is named, with what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import farcall_guard
from farcall_guard import PACKAGES, HiddenPackageError, check, namesakes

ROOT = Path(farcall_guard.__file__).resolve().parent


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has imported none of farcall's packages."""
    for name in list(sys.modules):
        if name.partition(".")[0] in PACKAGES:
            monkeypatch.delitem(sys.modules, name)


def test_our_own_packages_pass() -> None:
    check(*PACKAGES)


def test_a_module_that_was_imported_before_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("rpc")
    other.__file__ = str(tmp_path / "rpc.py")
    monkeypatch.setitem(sys.modules, "rpc", other)
    with pytest.raises(HiddenPackageError, match="imported before farcall") as caught:
        check(*PACKAGES)
    assert caught.value.path == str(tmp_path / "rpc.py")


def test_importing_farcall_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rpc.py").write_text("")
    forget(monkeypatch)
    for name in list(sys.modules):
        if name.partition(".")[0] == "farcall":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"rpc\.py"):
        __import__("farcall")


LOADS_LATE = torch.__version__ >= "2.14"
"""Whether PyTorch loads backends when they are first named, and not when it is imported."""

USE_PYTORCH = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
print([str(each.message) for each in caught if "farcall" in str(each.message)])
try:
    print(torch.distributed.is_backend_available("farcall"))
except ImportError as error:
    print(type(error).__name__, error)
"""


def used_in(folder: Path) -> list[str]:
    """What a program prints that lies in a folder, imports PyTorch and looks for the backend."""
    (folder / "program.py").write_text(USE_PYTORCH)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.processes
def test_pytorch_finds_the_backend_without_an_import_of_ours(tmp_path: Path) -> None:
    assert used_in(tmp_path) == ["[]", "True"]


@pytest.mark.processes
def test_pytorch_goes_on_without_our_backend_where_a_package_is_hidden(tmp_path: Path) -> None:
    (tmp_path / "rpc.py").write_text("")
    warned, found = used_in(tmp_path)
    said = found if LOADS_LATE else warned
    assert "farcall needs its package 'rpc'" in said
    assert str(tmp_path / "rpc.py") in said
    if LOADS_LATE:
        assert warned == "[]"
        assert found.startswith("HiddenPackageError")
    else:
        assert "PyTorch runs without the backend 'farcall'" in warned
        assert found == "False"


def test_the_guard_imports_nothing_of_ours() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import farcall_guard, sys; print(*sys.modules)"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {*PACKAGES, "farcall", "farcall_backend", "torch"}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("imported", "name", "package"),
    [
        ("rpc", "rref", True),
        ("rref", "rpc", False),
        ("dist_autograd", "rpc", True),
        ("dist_optim", "dist_autograd", False),
    ],
)
def test_importing_a_package_names_what_hides_its_companions(
    tmp_path: Path, imported: str, name: str, package: bool
) -> None:
    other = tmp_path / name / "__init__.py" if package else tmp_path / f"{name}.py"
    other.parent.mkdir(exist_ok=True)
    other.write_text("")
    (tmp_path / "program.py").write_text(f"import {imported}\n")
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"farcall_guard.HiddenPackageError: farcall needs its package '{name}'")
    assert str(other.parent if package else other) in last
    assert "Rename" in last


@pytest.mark.parametrize("name", PACKAGES)
def test_every_package_is_looked_for(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("")
    assert namesakes(str(tmp_path)) == {name: tmp_path / f"{name}.py"}


def test_the_packages_are_those_that_are_installed() -> None:
    installed = {path.parent.name for path in ROOT.glob("*/py.typed")}
    assert {*PACKAGES, "farcall"} == installed
