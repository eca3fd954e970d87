"""Compiles the simulated accelerator, once for each version of its sources, of PyTorch and of Python."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Final

import torch

__all__ = ["UnavailableError", "library"]

_SOURCES: Final = Path(__file__).parent / "csrc"
_FLAGS: Final = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-w"]
_MODULE: Final = "simulated_accelerator"


class UnavailableError(ImportError):
    """The simulated accelerator cannot be built on this machine; the message says what is missing."""


def library() -> Path:
    """The path of the compiled module, which is compiled now if it was not before.

    Raises:
        UnavailableError: there is no compiler, or no ``Python.h``, or the system is not Linux.
        RuntimeError: the compiler failed.
    """
    sources = sorted(_SOURCES.iterdir())
    key = hashlib.sha256(repr((torch.__version__, sys.version, _FLAGS)).encode())
    for source in sources:
        key.update(source.read_bytes())
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = caches / "farcall-simulated-accelerator"
    built = cache / f"{_MODULE}-{key.hexdigest()[:16]}.so"
    if not built.exists():
        cache.mkdir(parents=True, exist_ok=True)
        _build(built, [source for source in sources if source.suffix == ".cpp"])
    return built


def _build(target: Path, sources: list[Path]) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    python = Path(sysconfig.get_paths()["include"])
    if sys.platform != "linux":
        raise UnavailableError("it needs Linux")
    if compiler is None:
        raise UnavailableError("it needs a C++ compiler, and neither g++ nor clang++ is installed")
    if not (python / "Python.h").exists():
        raise UnavailableError(f"it needs Python's headers, and there is no Python.h in {python}")
    root = Path(torch.__file__).parent
    work = target.with_suffix(f".{os.getpid()}")
    work.mkdir(exist_ok=True)
    includes = [root / "include", root / "include/torch/csrc/api/include", python]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    options = [*_FLAGS, abi, f"-DTORCH_EXTENSION_NAME={_MODULE}", *(f"-I{each}" for each in includes)]
    jobs = []
    for source in sources:
        command = [compiler, *options, "-c", str(source), "-o", str(work / f"{source.stem}.o")]
        jobs.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    said = [job.communicate()[0] for job in jobs]
    if any(job.returncode for job in jobs):
        raise RuntimeError("the simulated accelerator does not compile:\n" + "\n".join(said))
    objects = [str(work / f"{source.stem}.o") for source in sources]
    libraries = [f"-L{root / 'lib'}", "-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
    made = work / "linked.so"
    path = f"-Wl,-rpath,{root / 'lib'}"
    subprocess.run([compiler, "-shared", *objects, "-o", str(made), *libraries, path], check=True)
    made.rename(target)  # complete, or not there
    shutil.rmtree(work)
