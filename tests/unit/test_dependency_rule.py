"""The dependency rule: imports point down only, by package, room and file, and importing does nothing.

``spmd`` is built on ``dist_optim``, that on ``dist_autograd``, that on ``rref``, that on ``rpc``; ``farcall``
is the front door and may import them all. Only the face ``rpc/__init__.py`` looks up, to offer ``remote`` and
``RRef`` where PyTorch does, and ``serve`` and ``trace``. The rooms of a package depend on each other as
``ROOMS_OF`` says, and no files import each other in a circle; imports under ``TYPE_CHECKING`` count. And
nobody imports what PyTorch may drop: its own RPC.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.support.fresh import RunFresh
from tests.support.sources import ROOT, source_of

MAY_IMPORT = {
    "rpc": set[str](),
    "rref": {"rpc"},
    "dist_autograd": {"rpc", "rref"},
    "dist_optim": {"rpc", "rref", "dist_autograd"},
    "spmd": {"rpc", "rref", "dist_autograd", "dist_optim"},
    "farcall": {"rpc", "rref", "dist_autograd", "dist_optim", "spmd"},
}
"""For each package, the others that it may import."""

FACES = {"rpc/__init__.py": {"rref", "dist_autograd", "farcall"}}
"""Files that may look up, and where to."""

REST = "*"
"""All rooms that are not named."""

ROOMS_OF: dict[str, tuple[set[str], ...]] = {
    "rpc": (
        {"entry_points", "errors", "functions", "device_maps", "options"},
        {"runtime"},
        {"wire"},
        {"serialization"},
        {"transport"},
        {"group"},
        {"bulk"},
        {"agent"},
        {"devices"},
        {"profiling"},
        {"rendezvous"},
        {"lifecycle"},
        {"api", "generators", "mapping", "retrying", "streaming", "testing"},
    ),
    "spmd": (
        {"collectives", "torch_internals"},
        {"workers", "elastic"},
        {"tensor_parallel"},
        {"engine", "backend"},
        {"sharding"},
        {"fsdp", "checkpoint"},
    ),
    "spmd/collectives": (
        {"errors", "memory", "reductions", "signature", "algorithms"},
        {"one_host"},
        {"between_hosts"},
        {REST},
    ),
    "spmd/engine": (
        {"errors", "program"},
        {"rules"},
        {"worker"},
        {"driver"},
        {"api", "auto"},
    ),
    "farcall/observe": (
        {"format"},
        {"reading"},
        {"why"},
        {"trace", "tracing"},
        {"worker"},
        {"metrics"},
        {"installation", "commands"},
    ),
    "farcall": (
        {"v1", "kserve", "extras", "doctor"},
        {"grpc", "scraping"},
        {"client"},
        {"serving", "compat"},
        {"observe"},
        {"page"},
        {"launch", "environment", "elastic", "examples", "one_sided", "ray", "weights"},
        {"accelerator_trial", "meeting", "trials"},
        {"cli"},
        {"__main__"},
    ),
}
"""The rooms (and single files) of packages, and of some rooms, from the lowest; those in one set may use each
other. Faces are above them. What a worker of SPMD mode runs imports nothing of the driver, which is another
process.
"""

ABOVE_WITH_AGENT = {
    "dist_autograd/installation.py",
    "rref/installation.py",
    "spmd/collectives/node.py",
    "spmd/collectives/store.py",
}
"""Files of packages above ``rpc`` that take an agent apart: they compose what is given ports."""

TOPICS = frozenset(("benchmarks", "devices", "examples", "farcall/xla", "rpc/testing"))
"""Folders of tests that are not folders of a package."""

ENTRY_POINTS = ROOT / "farcall_backend.py"
GUARD = ROOT / "farcall_guard.py"
"""Modules of the distribution that are in no package."""

REPLACED = ("torch.distributed.rpc", "torch.distributed.autograd", "torch._C._distributed_rpc")
"""PyTorch's own, which must not be needed."""

HEAVY_AT_IMPORT = ("sklearn", "scipy", "grpc", "torch._dynamo", "torch._inductor")
"""What importing the packages must not bring along, beyond what ``import torch`` does."""

WITH_EXTRAS = {
    ROOT / "farcall" / "client": ("client",),
    ROOT / "farcall" / "kserve": ("client",),
    ROOT / "farcall" / "examples": ("examples",),
    ROOT / "farcall" / "serving": ("client", "grpc", "metrics"),
    ROOT / "farcall" / "v1": ("client",),
    ROOT / "farcall" / "scraping.py": ("metrics",),
    ROOT / "farcall" / "observe" / "metrics" / "families.py": ("metrics",),
    ROOT / "farcall" / "observe" / "metrics" / "endpoint.py": ("metrics",),
    ROOT / "farcall" / "observe" / "worker" / "telemetry.py": ("otel",),
    ROOT / "farcall" / "grpc": ("grpc",),
    ROOT / "farcall" / "page": ("page",),
    ROOT / "farcall" / "ray": ("ray",),
    ROOT / "farcall" / "weights" / "torchrl.py": ("torchrl",),
    ROOT / "farcall" / "weights" / "verl.py": ("verl",),
    ROOT / "farcall" / "weights" / "vllm.py": ("vllm",),
}
"""What needs extras, and which."""

OTHER_NAMES = {
    "googleapis-common-protos": "google",
    "grpcio": "grpc",
    "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
    "opentelemetry-api": "opentelemetry",
    "opentelemetry-sdk": "opentelemetry",
    "prometheus-client": "prometheus_client",
    "protobuf": "google",
    "scikit-learn": "sklearn",
}
"""Distributions whose package has another name."""

PACKAGES = [package for package in MAY_IMPORT if (ROOT / package / "__init__.py").exists()]
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
OURS = frozenset(FILES)


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def imports(path: Path) -> list[tuple[int, str]]:
    """Every module that a file names in an import, and the line."""
    return source_of(path).imports


@cache
def file_of(module: str) -> Path | None:
    """The file of one of our modules; None if there is none of that name."""
    path = ROOT.joinpath(*module.split("."))
    found = (each for each in (path / "__init__.py", path.with_suffix(".py")) if each.exists())
    return next(found, None)


@cache
def imported_files(path: Path) -> set[Path]:
    """Our files that a file imports. (That Python also runs the faces of their packages does not count.)"""
    found: set[Path] = set()
    every = {name for _, name in imports(path)}
    for name in every:
        target = file_of(name)
        if target is None:
            target = file_of(name.rpartition(".")[0])
        elif any(file_of(longer) for longer in every if longer.startswith(name + ".")):
            continue  # ``from package import module`` names the package, too
        if target is not None and target in OURS and target != path:
            found.add(target)
    return found


def circles(graph: dict[Path, set[Path]]) -> set[Path]:
    """The files from which a way leads back to themselves."""

    def reached(start: Path) -> set[Path]:
        seen: set[Path] = set()
        ahead = [*graph[start]]
        while ahead:
            path = ahead.pop()
            if path not in seen:
                seen.add(path)
                ahead += graph[path]
        return seen

    return {path for path in graph if path in reached(path)}


def offences(is_wrong: Callable[[Path, str], bool]) -> list[str]:
    """The imports whose top-level package a rule forbids to the file they stand in."""
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in FILES
        for line, name in imports(path)
        if is_wrong(path, name.partition(".")[0])
    ]


def is_within(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def test_arrows_point_down() -> None:
    def allowed(path: Path) -> set[str]:
        package = path.relative_to(ROOT).parts[0]
        return MAY_IMPORT[package] | FACES.get(str(path.relative_to(ROOT)), set()) | {package}

    assert not offences(lambda path, name: name in MAY_IMPORT and name not in allowed(path))


def test_no_string_names_a_module_above() -> None:
    """As in an entry point, or in what is imported by name."""
    named = re.compile(rf"({'|'.join(MAY_IMPORT)})(\.\w+)+(:\w+)?")
    found = [
        f"{path.relative_to(ROOT)}:{line} names {text}"
        for path in FILES
        for line, text in source_of(path).strings
        if named.fullmatch(text)
        and file_of(text.partition(":")[0])
        and (package := path.relative_to(ROOT).parts[0]) != (above := text.partition(".")[0])
        and above not in MAY_IMPORT[package] | FACES.get(str(path.relative_to(ROOT)), set())
    ]
    assert not found


def test_the_guard_imports_nothing_of_ours_and_nobody_imports_the_entry_points() -> None:
    ours = {*MAY_IMPORT, "farcall_backend"}
    assert not [name for _, name in imports(GUARD) if name.partition(".")[0] in ours]
    assert not offences(lambda _, name: name == "farcall_backend")
    assert {name.partition(".")[0] for _, name in imports(ENTRY_POINTS)} & ours <= {"spmd"}


@pytest.mark.parametrize("package", ROOMS_OF)
def test_rooms_of_a_package_import_only_what_is_below(package: str) -> None:
    rooms, folder = ROOMS_OF[package], ROOT / package

    def floor(path: Path) -> int:
        room = path.relative_to(folder).parts[0].removesuffix(".py")
        return next((index for index, floor in enumerate(rooms) if {room, REST} & floor), -1)

    def is_face(path: Path) -> bool:
        return path == folder / "__init__.py"

    files = [path for path in FILES if path.is_relative_to(folder) and not is_face(path)]
    assert not names([path for path in files if floor(path) < 0]), "these have no room"
    assert not [
        f"{path.relative_to(ROOT)} imports {each.relative_to(ROOT)}"
        for path in files
        for each in imported_files(path)
        if each.is_relative_to(folder) and not is_face(each) and floor(each) > floor(path)
    ]


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = {path: imported_files(path) for path in FILES}
    assert not names(list(circles(graph))), "these import each other"


def test_packages_above_are_given_ports_and_not_the_agent() -> None:
    takes = {
        str(path.relative_to(ROOT))
        for path in FILES
        if path.relative_to(ROOT).parts[0] not in ("rpc", "farcall")
        if any(name == "rpc.agent.agent.Agent" for _, name in imports(path))
    }
    assert takes == ABOVE_WITH_AGENT


def test_tests_lie_where_the_code_lies() -> None:
    found = {
        str(path.parent.relative_to(ROOT / "tests" / kind))
        for kind in ("unit", "group")
        for path in (ROOT / "tests" / kind).rglob("test_*.py")
    }
    assert not {folder for folder in found - TOPICS if not (ROOT / folder).is_dir()}
    assert not [path.name for path in (ROOT / "tests" / "group").glob("test_*.py")]


def test_no_file_needs_what_it_replaces() -> None:
    assert not [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in FILES
        for line, name in [*imports(path), *source_of(path).of_torch]
        if any(is_within(name, module) for module in REPLACED)
    ]


def test_no_file_imports_tests_examples_or_benchmarks() -> None:
    assert not offences(lambda _, name: name in {"tests", "examples", "benchmarks"})


def test_what_a_file_imports_is_installed_with_the_distribution() -> None:
    """Else it is missing wherever nothing else happens to have brought it along."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = {*sys.stdlib_module_names, *MAY_IMPORT, *imported_as(project["dependencies"]), "farcall_guard"}
    extras = project["optional-dependencies"]

    @cache
    def may_import(path: Path) -> set[str]:
        needed = (names for place, names in WITH_EXTRAS.items() if path.is_relative_to(place))
        return known.union(*(imported_as(extras[name]) for names in needed for name in names))

    assert not offences(lambda path, name: name not in may_import(path))


def imported_as(requirements: list[str]) -> set[str]:
    """The packages that distributions bring."""
    distributions = {re.split(r"[^\w-]", requirement)[0] for requirement in requirements}
    return {OTHER_NAMES.get(each, each) for each in distributions}


IMPORT_AND_LOOK = """
import os, signal, sys, threading
import torch, torch.distributed
before = set(sys.modules)
state = signal.getsignal(signal.SIGINT), sys.getswitchinterval(), sys.excepthook, torch.get_num_threads()
descriptors = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
for package in sys.argv[1:]:
    __import__(package)
after = signal.getsignal(signal.SIGINT), sys.getswitchinterval(), sys.excepthook, torch.get_num_threads()
assert threading.active_count() == 1, threading.enumerate()
assert state == after, (state, after)
if descriptors:
    assert set(os.listdir("/proc/self/fd")) == descriptors
print(*sorted(set(sys.modules) - before))
"""


@pytest.mark.processes
def test_importing_the_packages_does_nothing(run_fresh: RunFresh) -> None:
    """No thread, no descriptor, no setting changed, and nothing heavy or replaced imported."""
    done = run_fresh(IMPORT_AND_LOOK, *PACKAGES)
    assert done.returncode == 0, done.stderr
    unwanted = [
        module
        for module in done.stdout.split()
        if any(is_within(module, other) for other in (*HEAVY_AT_IMPORT, *REPLACED))
    ]
    assert not unwanted


def test_every_package_of_the_distribution_is_held_to_the_rule() -> None:
    not_packages = {"tests", "examples", "benchmarks", "docs", "build"}
    found = {path.parent.name for path in ROOT.glob("*/__init__.py")} - not_packages
    assert found == set(PACKAGES)
    assert all((ROOT / package / "py.typed").exists() for package in PACKAGES)
