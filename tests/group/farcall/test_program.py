"""``farcall run``: a program runs as under ``python``, and finds farcall where PyTorch's RPC was."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.workers import RunWorkers, Worker

ROOT = Path(__file__).resolve().parent.parent.parent.parent

SEEN = """
import json, os, pickle, sys
def function(): pass
import torch.distributed.rpc as rpc
print(json.dumps({
    "name": __name__,
    "file": __file__,
    "argv": sys.argv,
    "path0": sys.path[0],
    "package": __package__,
    "spec": __spec__ and __spec__.name,
    "pickles": pickle.loads(pickle.dumps(function)) is function,
    "main": sys.modules["__main__"].function is function,
    "rpc": rpc.__name__,
}))
"""


def run(worker: Worker, *arguments: str) -> tuple[Any, str, str]:
    """``farcall run`` in a process of its own: exit status, standard output and error."""
    from farcall.cli import main

    out, err = io.StringIO(), io.StringIO()
    status: Any = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(["run", *arguments])
        except SystemExit as end:
            status = ("exit", end.code)
    return status, out.getvalue(), err.getvalue()


def test_script_sees_what_python_would_show_it(run_workers: RunWorkers, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SEEN)
    [(status, out, _)] = run_workers(run, 1, [str(script), "--epochs", "3", "-m", "--", "x"])
    seen = json.loads(out)
    assert status == 0
    assert seen == {
        "name": "__main__",
        "file": str(script),
        "argv": [str(script), "--epochs", "3", "-m", "--", "x"],
        "path0": str(tmp_path),
        "package": None,
        "spec": None,
        "pickles": True,
        "main": True,
        "rpc": "farcall.compat.torch_rpc",
    }


def test_module_sees_what_python_would_show_it(run_workers: RunWorkers, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("import torch.distributed.rpc as rpc; name = rpc.__name__\n")
    (package / "__main__.py").write_text("from package import name\nassert 'farcall' in name\n" + SEEN)
    [(status, out, _)] = run_workers(run, 1, ["-m", "package", "--lr", "1"])
    seen = json.loads(out)
    assert status == 0
    assert seen["name"] == "__main__"
    assert seen["argv"] == [str(package / "__main__.py"), "--lr", "1"]
    assert seen["path0"] == str(tmp_path)
    assert (seen["package"], seen["spec"]) == ("package", "package.__main__")
    assert seen["main"]


def test_folder_and_zip_file_run_their_main(run_workers: RunWorkers, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "__main__.py").write_text("import sys; print(sys.path[0])")
    archive = tmp_path / "program.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("__main__.py", "import sys; print(sys.path[0])")
    for program in (folder, archive):
        assert run_workers(run, 1, [str(program)]) == [(0, f"{program}\n", "")]


def test_exit_status_is_the_programs(run_workers: RunWorkers, tmp_path: Path) -> None:
    (tmp_path / "leave.py").write_text("raise SystemExit(7)")
    [(status, _, _)] = run_workers(run, 1, [str(tmp_path / "leave.py")])
    assert status == ("exit", 7)


def test_traceback_begins_in_the_program(run_workers: RunWorkers, tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text("def f():\n    return 1 / 0\nf()\n")
    [(status, _, err)] = run_workers(run, 1, [str(tmp_path / "fail.py")])
    assert status == 1
    assert "ZeroDivisionError" in err
    assert "return 1 / 0" in err
    assert "farcall" not in err


@pytest.mark.parametrize("arguments", [["missing.py"], ["-m", "missing"], ["-m", "json.missing"]])
def test_missing_program_is_named(run_workers: RunWorkers, arguments: list[str]) -> None:
    [(status, _, err)] = run_workers(run, 1, arguments)
    assert status == ("exit", 2)
    assert "missing" in err


def test_own_module_named_as_ours_is_warned_of(run_workers: RunWorkers, tmp_path: Path) -> None:
    (tmp_path / "rpc.py").write_text("")
    (tmp_path / "train.py").write_text("")
    [(status, _, err)] = run_workers(run, 1, [str(tmp_path / "train.py")])
    assert status == 0
    assert f"{tmp_path / 'rpc.py'} has the name" in err


VISITED = """
import gc
is_on, visited = gc.isenabled(), len(gc.get_objects())
"""


def launched(worker: Worker) -> tuple[bool, int, int]:
    """A process of ``farcall launch``: whether garbage is collected, the objects visited, and those there."""
    worker_main = importlib.import_module("farcall.launch.worker_main")
    (worker.folder / "program.py").write_text(VISITED)
    imported: list[Any] = [[] for _ in range(100_000)]
    sys.argv[1:] = ["program.py"]
    assert worker_main.main() == 0
    main: Any = sys.modules["__main__"]
    return main.is_on, main.visited, len(imported)


def test_a_launched_programs_collections_do_not_visit_what_was_imported_before_it(
    run_workers: RunWorkers,
) -> None:
    [(is_on, visited, imported)] = run_workers(launched, 1)
    assert is_on
    assert visited < imported


@pytest.mark.fresh_interpreter
def test_spawned_children_get_it_too(tmp_path: Path) -> None:
    script = tmp_path / "spawning.py"
    script.write_text(
        "import multiprocessing\n"
        "import torch.distributed.rpc as rpc\n"
        "def child():\n"
        "    print(rpc.__name__, __name__, flush=True)\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('spawn').Process(target=child)\n"
        "    process.start()\n"
        "    process.join()\n"
        "    raise SystemExit(process.exitcode)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "farcall", "run", str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout == "farcall.compat.torch_rpc __mp_main__\n"
    assert done.returncode == 0
