"""``torch_xla`` is lent to programs that ask for it, and libraries do not find it in others."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.support.workers import RunWorkers, Worker

ROOT = Path(__file__).resolve().parents[3]

LIBRARY = '''
"""As accelerate and transformers do."""
import importlib.util
try:
    import torch_xla.core.xla_model
    imported = True
except ImportError:
    imported = False
is_there = importlib.util.find_spec("torch_xla") is not None

def look():
    try:
        import torch_xla
    except ImportError:
        return False
    return importlib.util.find_spec("torch_xla") is not None
'''

SPAWN = """
import multiprocessing, sys
import library

def child():
    import library
    print(library.imported, flush=True)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


def run(
    run_workers: RunWorkers, folder: Path, program: str, *options: str, module: bool = False
) -> list[str]:
    """What a program prints under ``farcall run`` that has an installed library beside it."""
    library = folder / "site-packages"
    library.mkdir()
    (library / "library.py").write_text(LIBRARY)
    (folder / "program.py").write_text(program)
    target = ["-m", "program"] if module else [str(folder / "program.py")]
    outcome: tuple[int, str]
    [outcome] = run_workers(partial(run_here, folder=folder, arguments=[*options, *target]), 1)
    status, printed = outcome
    assert status == 0
    return printed.splitlines()


def run_here(worker: Worker, folder: Path, arguments: list[str]) -> tuple[int, str]:
    from farcall.cli import main

    os.chdir(folder)
    sys.path[:0] = ["", str(folder / "site-packages")]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        return main(["run", *arguments]), printed.getvalue()


PRINT = "print(library.imported, library.is_there, library.look())\n"
AGAIN = "from farcall import compat\ncompat.uninstall()\ncompat.install({})\nimport library\n"
LOOKS = "import library\nfrom importlib.util import find_spec\nprint(find_spec('torch_xla'))\n"


@pytest.mark.parametrize(
    ("program", "options", "module", "printed"),
    [
        ("import library\n" + PRINT, [], False, ["False False False"]),
        (LOOKS + PRINT, [], False, ["None", "False False False"]),
        ("import library\n" + PRINT, ["--xla"], False, ["True True True"]),
        ("import library\n" + PRINT, ["--xla"], True, ["True True True"]),
        ("import library\nfrom torch_xla import runtime\n" + PRINT, [], False, ["True True True"]),
        ("import library\nimport torch_xla.runtime as xr\n" + PRINT, [], True, ["True True True"]),
        (
            f"import library, helpers\n{PRINT}helpers.begin()\nprint(library.look())\n",
            [],
            False,
            ["False False False", "True"],
        ),
        (AGAIN.format("") + PRINT, [], False, ["False False False"]),
        (AGAIN.format("xla=True") + PRINT, [], False, ["True True True"]),
    ],
    ids=[
        "a library looks",
        "the program looks",
        "an option",
        "an option, and a module",
        "an import at the top",
        "an import at the top of a module",
        "a later import",
        "names that the program installs",
        "names that the program installs for all",
    ],
)
def test_who_finds_it(
    run_workers: RunWorkers,
    tmp_path: Path,
    program: str,
    options: list[str],
    module: bool,
    printed: list[str],
) -> None:
    (tmp_path / "helpers.py").write_text("def begin():\n    import torch_xla.runtime\n")
    assert run(run_workers, tmp_path, program, *options, module=module) == printed


@pytest.mark.processes
def test_children_have_what_their_parent_has(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "library.py").write_text(LIBRARY)
    (tmp_path / "program.py").write_text(SPAWN)
    done = subprocess.run(
        [sys.executable, "-m", "farcall", "run", "--xla", "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path / "site-packages"), str(ROOT)))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
