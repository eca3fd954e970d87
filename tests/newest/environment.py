"""The environment ``.venv-newest``: which interpreter and which PyTorch, and how it is made.

The whole run (``make test-newest``) installs what a user gets today: the newest interpreter on this machine
for which the index has PyTorch, the newest PyTorch, and the newest versions of everything else, without
constraints.

The smoke run, a part of CI, downloads nothing. It uses the environment if it is there. Otherwise it looks for
a PyTorch newer than the pinned one among files on this machine: pip's ``find-links`` and those of its indexes
that are folders. Everything but PyTorch comes from the environment of the other tests, so the interpreter is
the same one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Final

__all__ = ["FOLDER", "ROOT", "Environment", "Unavailable", "found", "made_from_files", "made_from_index"]

ROOT: Final = Path(__file__).resolve().parent.parent.parent
FOLDER: Final = ROOT / ".venv-newest"

_READY: Final = FOLDER / ".ready"
_OLDEST_MINOR, _NEWEST_MINOR = 11, 30
"""Minor versions of Python 3 that are looked for."""
_SUITABLE: Final = (
    "import ctypes, ensurepip, ssl, sys, venv; print('%d.%d.%d' % sys.version_info[:3], sys.executable)"
)
_EXTRAS: Final = ("grpc", "serve", "examples", "test")
_FREE_BYTES: Final = 12 << 30
"""Free disk space without which no environment is made: builds with CUDA take about 6 GiB."""
_LOOK_SECONDS: Final = 60.0
"""How long pip may take to look for a version."""
_FILES_SECONDS: Final = 240.0
"""How long the installation from files may take."""
_UNCONFIGURED: Final = {
    **os.environ,
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_EXTRA_INDEX_URL": "",
    "PIP_FIND_LINKS": "",
}
"""The environment of a pip that knows no index, and no constraint, but those that it is told."""


class Unavailable(Exception):
    """There can be no such environment here; the text says why."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment in ``FOLDER``.

    Attributes:
        python: its interpreter.
        description: its versions, for people.
    """

    python: Path
    description: str


def found() -> Environment | None:
    """The environment that an earlier run has made, from the index or from files, if there is one."""
    return _environment() if _READY.exists() else None


def made_from_index() -> Environment:
    """Make the environment from the index; takes minutes, and gigabytes where PyTorch comes with CUDA.

    Raises:
        Unavailable: no interpreter has a PyTorch in the index, or the index cannot be reached.
    """
    newest = _newest_pytorch()
    environment = found() if _origin() == "index" else None
    if environment is not None and f"PyTorch {newest}" in environment.description:
        _run([environment.python, *_PIP, "install", *_requirements()])
        return environment
    reasons = []
    for version, python in _interpreters():
        print(f"making {FOLDER.name} with Python {version} ...", flush=True)
        _new(python)
        done = _pip(["install", "--upgrade", "pip", "setuptools>=77", f"torch=={newest}"])
        if done.returncode == 0:
            break
        reasons.append(f"Python {version}: {_last_line(done.stderr)}")
    else:
        raise Unavailable(f"PyTorch {newest} cannot be installed: {'; '.join(reasons) or 'no interpreter'}")
    for arguments in (["install", *_requirements()], _OURS):
        if (done := _pip(arguments)).returncode:
            raise Unavailable(_last_line(done.stderr))
    _READY.write_text("index")
    return _environment()


def made_from_files() -> Environment:
    """Make the environment from files of this machine, with the packages of the current environment.

    Raises:
        Unavailable: there is no newer PyTorch among them, or no space for it.
    """
    indexes, folders = _local_indexes(), _local_folders()
    if not indexes and not folders:
        raise Unavailable("pip knows no files on this machine")
    if (free := shutil.disk_usage(ROOT).free) < _FREE_BYTES:
        raise Unavailable(f"{free >> 30} GiB of disk are free, {_FREE_BYTES >> 30} are needed")
    where = ["--index-url", indexes[0]] if indexes else ["--no-index"]
    where += [part for each in indexes[1:] for part in ("--extra-index-url", each)]
    where += [part for each in folders for part in ("--find-links", each)]
    pytorch = ["install", "--no-deps", "--ignore-installed", f"torch>{_pinned('torch')}", *where]
    looked = _run([sys.executable, *_PIP, *pytorch, "--dry-run"], env=_UNCONFIGURED, seconds=_LOOK_SECONDS)
    if looked.returncode:
        raise Unavailable(f"no newer one is on this machine ({_last_line(looked.stderr)})")
    _new(Path(sys.executable))
    until = monotonic() + _FILES_SECONDS
    done = _pip(pytorch, env=_UNCONFIGURED, seconds=_FILES_SECONDS)
    if done.returncode:
        raise Unavailable(_last_line(done.stderr))
    for library in _libraries():  # one that is missing may not be needed to import PyTorch
        _pip(["install", library, *where], env=_UNCONFIGURED, seconds=until - monotonic())
    packages = next(Path(sys.prefix).glob("lib/python3.*/site-packages"))
    own = next(FOLDER.glob("lib/python3.*/site-packages"))
    try:
        (own / "other_packages.pth").write_text(f"import site; site.addsitedir({str(packages)!r})\n")
        environment = _environment()
        _READY.write_text("files")
    except OSError as error:  # the disk is full
        raise Unavailable(str(error)) from error
    return environment


def _origin() -> str:
    """Where the environment came from; nothing if there is none."""
    return _READY.read_text() if _READY.exists() else ""


def _libraries() -> list[str]:
    """The libraries of CUDA that the PyTorch in ``FOLDER`` requires."""
    script = "import importlib.metadata as m; print(*m.requires('torch'), sep='\\n')"
    lines = _run([FOLDER / "bin" / "python", "-c", script]).stdout.splitlines()
    required = [line.partition(";")[0].strip() for line in lines if "extra ==" not in line]
    return [each for each in required if each.startswith(("nvidia", "cuda"))]


# ---- interpreters and versions


def _interpreters() -> Iterator[tuple[str, Path]]:
    """Interpreters on this machine that can make an environment, the newest first."""
    versions: dict[tuple[int, ...], tuple[str, Path]] = {}
    for path in _candidates():
        done = subprocess.run([path, "-c", _SUITABLE], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            version, executable = done.stdout.split()
            versions.setdefault(tuple(map(int, version.split("."))), (version, Path(executable)))
    yield from (versions[key] for key in sorted(versions, reverse=True) if key >= (3, _OLDEST_MINOR))


def _candidates() -> Iterator[str | Path]:
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in range(_NEWEST_MINOR, _OLDEST_MINOR - 1, -1):
        yield from sorted(pyenv.glob(f"3.{minor}.*/bin/python"))
        if (path := shutil.which(f"python3.{minor}")) is not None:
            yield path
    yield sys.executable


def _newest_pytorch() -> str:
    done = _run([sys.executable, *_PIP, "index", "versions", "torch"], seconds=_LOOK_SECONDS)
    match = re.search(r"^torch \(([\w.+]+)\)", done.stdout, re.MULTILINE)
    if match is None:
        raise Unavailable(f"the index does not answer: {_last_line(done.stderr)}")
    return match[1].partition("+")[0]


def _pinned(name: str) -> str:
    text = (ROOT / "requirements" / "constraints.txt").read_text()
    match = re.search(rf"^{name}==(\S+)", text, re.MULTILINE)
    assert match is not None
    return match[1]


def _requirements() -> list[str]:
    """What farcall and its tests need, without PyTorch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *(each for name in _EXTRAS for each in _extra(project, name))]
    return [each for each in needed if not re.match(r"(torch|farcall)\b", each)]


def _extra(project: dict[str, dict[str, list[str]]], name: str) -> list[str]:
    return project["optional-dependencies"][name]


# ---- pip

_PIP: Final = ("-m", "pip", "--disable-pip-version-check", "--quiet")
_OURS: Final = ["install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT)]


def _local_indexes() -> list[str]:
    return [each for each in _configured("index-url", "extra-index-url") if each.startswith("file:")]


def _local_folders() -> list[str]:
    return [each for each in _configured("find-links") if "://" not in each or each.startswith("file:")]


def _configured(*names: str) -> list[str]:
    """Values of pip's settings, from its files and the environment."""
    lines = _run([sys.executable, "-m", "pip", "config", "list"]).stdout.splitlines()
    settings = (line.partition("=") for line in lines)
    found = [value.strip("'\"") for key, _, value in settings if key.rpartition(".")[2] in names]
    return list(dict.fromkeys(part for value in found for part in re.split(r"\s+|\\n", value) if part))


def _new(python: Path) -> None:
    _READY.unlink(missing_ok=True)
    done = _run([python, "-m", "venv", "--clear", FOLDER], seconds=_FILES_SECONDS)
    if done.returncode:
        raise Unavailable(f"{FOLDER.name} cannot be made: {_last_line(done.stderr or done.stdout)}")


def _environment() -> Environment:
    python = FOLDER / "bin" / "python"
    script = "import json, sys, torch; print(json.dumps([sys.version.split()[0], str(torch.__version__)]))"
    done = _run([python, "-c", script])
    if done.returncode:
        raise Unavailable(f"PyTorch cannot be imported: {_last_line(done.stderr)}")
    version, pytorch = json.loads(done.stdout)
    return Environment(python, f"Python {version}, PyTorch {pytorch}")


def _pip(
    arguments: Sequence[str], env: dict[str, str] | None = None, seconds: float | None = None
) -> subprocess.CompletedProcess[str]:
    return _run([FOLDER / "bin" / "python", *_PIP, *arguments], env=env, seconds=seconds)


def _run(
    command: Sequence[str | Path], env: dict[str, str] | None = None, seconds: float | None = None
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, env=env, timeout=seconds, capture_output=True, text=True, check=False)
    except OSError as error:
        raise Unavailable(str(error)) from error
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"it took more than {error.timeout:.0f} s to run {Path(command[0]).name}") from None


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no message")
