"""Another module that has the name of one of farcall's packages is named, with what to do."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import farcall_guard
from farcall.launch.job import Job
from farcall.launch.launcher import launch
from farcall_guard import PACKAGES, hides_farcall, namesakes
from tests.support.fresh import RunFresh

ROOT = Path(farcall_guard.__file__).resolve().parent


IMPORT_EACH = """
for line in (
    "from farcall import rpc",
    "import farcall.rref",
    "import farcall; farcall.serve",
    "import farcall.serving",
):
    try:
        exec(line)
    except ImportError as error:
        print(type(error).__name__, error)
"""


@pytest.mark.processes
def test_importing_from_farcall_checks(tmp_path: Path, run_fresh: RunFresh) -> None:
    """Not `import farcall` alone, which imports none of these packages, and comes before `farcall.compat`."""
    (tmp_path / "rpc.py").write_text("")
    lines = run_fresh(IMPORT_EACH, folder=tmp_path).stdout.splitlines()
    assert len(lines) == 4
    for line in lines:
        assert line.startswith("HiddenPackageError farcall needs its package")
        assert str(tmp_path / "rpc.py") in line


PRINT_WHOSE = """
import rpc, spmd, torch, torch.distributed.rpc
print(torch.distributed.rpc.__name__, rpc.__name__, torch.distributed.is_backend_available("farcall"))
print(rpc.__file__, spmd.__file__)
"""


def hide(folder: Path) -> None:
    """Two modules with names of ours: a package and a file."""
    (folder / "spmd").mkdir()
    (folder / "spmd" / "__init__.py").write_text("")
    (folder / "rpc.py").write_text("")


def assert_ours(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    first, second = done.stdout.splitlines()
    assert first == "farcall.compat.torch_rpc rpc True"
    assert second == f"{ROOT / 'rpc' / '__init__.py'} {ROOT / 'spmd' / '__init__.py'}"
    told = [line for line in done.stderr.splitlines() if "names of packages of farcall's" in line]
    assert len(told) == 1
    assert f"{folder / 'rpc.py'} and {folder / 'spmd'} have" in told[0]


@pytest.mark.processes
def test_under_compat_ours_are_found_wherever_others_are(tmp_path: Path, run_fresh: RunFresh) -> None:
    hide(tmp_path)
    done = run_fresh("import farcall.compat\nfarcall.compat.install()\n" + PRINT_WHOSE, folder=tmp_path)
    assert_ours(done, tmp_path)
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.processes
@pytest.mark.fresh_interpreter
@pytest.mark.parametrize(
    ("command", "on_path"),
    [
        (["run"], False),
        pytest.param(["run"], True, marks=pytest.mark.nightly),
        pytest.param(["launch", "-n", "1", "--lend-names"], False, marks=pytest.mark.nightly),
    ],
)
def test_a_command_finds_ours_wherever_others_are(tmp_path: Path, command: list[str], on_path: bool) -> None:
    """In the current folder, which is the program's, or on ``PYTHONPATH``."""
    others = tmp_path / "others" if on_path else tmp_path
    others.mkdir(exist_ok=True)
    hide(others)
    path = [str(others), str(ROOT)] if on_path else [str(ROOT)]
    done = run_in(tmp_path, PRINT_WHOSE, "-m", "farcall", *command, path=path)
    lines = (line.removeprefix("[0] ") for line in done.stdout.splitlines(keepends=True))
    done.stdout = "".join(line for line in lines if not line.startswith("farcall: rank"))
    assert_ours(done, others)


@pytest.mark.processes
def test_compat_does_not_replace_what_was_imported_before(tmp_path: Path, run_fresh: RunFresh) -> None:
    (tmp_path / "rpc.py").write_text("")
    done = run_fresh("import rpc\nimport farcall.compat\n", folder=tmp_path)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("farcall_guard.HiddenPackageError")
    assert "It was imported before farcall, as 'rpc'" in last


def run_in(
    folder: Path,
    program: str,
    *command: str,
    path: Sequence[str] = (str(ROOT),),
) -> subprocess.CompletedProcess[str]:
    """Run a program that lies in a folder."""
    (folder / "program.py").write_text(program)
    return subprocess.run(
        [sys.executable, *command, "program.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=False,
    )


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


@pytest.mark.processes
@pytest.mark.fresh_interpreter
def test_pytorch_finds_the_backend_without_an_import_of_ours(tmp_path: Path) -> None:
    assert run_in(tmp_path, USE_PYTORCH).stdout.splitlines() == ["[]", "True"]


@pytest.mark.processes
@pytest.mark.fresh_interpreter
def test_pytorch_goes_on_without_our_backend_where_a_package_is_hidden(tmp_path: Path) -> None:
    (tmp_path / "rpc.py").write_text("")
    warned, found = run_in(tmp_path, USE_PYTORCH).stdout.splitlines()
    said = found if LOADS_LATE else warned
    assert "farcall needs its package 'rpc'" in said
    assert str(tmp_path / "rpc.py") in said
    if LOADS_LATE:
        assert warned == "[]"
        assert found.startswith("HiddenPackageError")
    else:
        assert "PyTorch runs without the backend 'farcall'" in warned
        assert found == "False"


HIDERS = (
    ("rpc", "rref", True),
    ("rref", "rpc", False),
    ("dist_autograd", "rpc", True),
    ("dist_optim", "dist_autograd", False),
)
"""What is imported, which of its companions is hidden, and whether by a package."""

IMPORT_BESIDE = """
import sys
for each in sys.argv[1:]:
    folder, _, imported = each.partition(":")
    sys.path.insert(0, folder)
    try:
        __import__(imported)
    except ImportError as error:
        print(type(error).__name__, error)
    sys.path.remove(folder)
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("rpc", "rref", "dist_autograd", "dist_optim", "spmd"):
            del sys.modules[name]
"""


@pytest.mark.processes
def test_importing_a_package_names_what_hides_its_companions(tmp_path: Path, run_fresh: RunFresh) -> None:
    beside = []
    for imported, name, package in HIDERS:
        folder = tmp_path / imported
        other = folder / name / "__init__.py" if package else folder / f"{name}.py"
        other.parent.mkdir(parents=True)
        other.write_text("")
        beside.append((f"{folder}:{imported}", name, other.parent if package else other))
    lines = run_fresh(IMPORT_BESIDE, *(each for each, _, _ in beside), folder=tmp_path).stdout.splitlines()
    for line, (_, name, other) in zip(lines, beside, strict=True):
        assert line.startswith(f"HiddenPackageError farcall needs its package '{name}'")
        assert str(other) in line
        assert "Rename" in line


@pytest.mark.parametrize("name", PACKAGES)
def test_every_package_is_looked_for(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("")
    assert namesakes(str(tmp_path)) == {name: tmp_path / f"{name}.py"}


def test_the_packages_are_those_that_are_installed() -> None:
    installed = {path.parent.name for path in ROOT.glob("*/py.typed")}
    assert {*PACKAGES, "farcall"} == installed


def test_packages_and_their_modules_are_found_below_farcall_as_the_same_objects() -> None:
    for package in PACKAGES:
        assert importlib.import_module(f"farcall.{package}") is importlib.import_module(package)
    functions = importlib.import_module("farcall.rpc.functions")
    reference = importlib.import_module("farcall.rref.remote_module.module")
    assert (functions, reference) == (sys.modules["rpc.functions"], sys.modules["rref.remote_module.module"])
    assert functions.__spec__ is not None
    assert functions.__spec__.name == functions.__name__ == "rpc.functions"
    for missing in ("farcall.rpc.nothing", "farcall.rpc.api.nothing"):
        with pytest.raises(ModuleNotFoundError, match=f"No module named '{missing}'"):
            importlib.import_module(missing)


def test_each_stub_below_farcall_describes_a_module_of_its_name() -> None:
    stubs = [each for each in sorted((ROOT / "farcall").rglob("*.pyi")) if "_pb2" not in each.name]
    described = set()
    for stub in stubs:
        name = ".".join(stub.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        assert stub.read_text().startswith(f"from {name.removeprefix('farcall.')} import *\n")
        importlib.import_module(name)
        described.add(name)
    assert {f"farcall.{package}" for package in PACKAGES} <= described


def test_a_module_named_farcall_is_found_in_a_folder(tmp_path: Path) -> None:
    assert hides_farcall(str(ROOT)) is None
    assert hides_farcall(str(tmp_path)) is None
    (tmp_path / "farcall").mkdir()
    assert hides_farcall(str(tmp_path)) is None, "a folder without __init__.py gives way to a package"
    (tmp_path / "farcall" / "__init__.py").touch()
    assert hides_farcall(str(tmp_path)) == tmp_path / "farcall"


def test_a_launcher_names_the_script_that_has_farcalls_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (script := tmp_path / "farcall.py").write_text("from farcall import rpc\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    assert launch(Job(2), "farcall.py", [], module=False, lend_names=True) == 2
    assert capsys.readouterr().err.startswith(f"farcall: {script} has farcall's name")
