"""Private names of PyTorch: each stands once, in the gate of its package, and this version has it.

A gate is a file ``torch_internals.py``; see ``rpc/runtime/internals.py``.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest
import torch

from rpc.runtime.internals import Internal, Internals
from tests.support.sources import PACKAGES, ROOT, source_of

FILES: Final = [
    path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    if not path.name.endswith("_pb2.py")  # which protoc has written
]
GATES: Final = [path for path in FILES if path.name == "torch_internals.py"]

STANDARD_LIBRARY: Final = {
    "_Unpickler",
    "_current_frames",
    "_get_running_loop",
    "_getframe",
    "_inheriting",
    "_is_owned",
    "_sighandler_noop",
    "_slotnames",
}
"""Private names of Python's standard library, which are guarded where they are used."""

REPLACED: Final = ("torch._C._distributed_rpc", "torch._C._distributed_autograd")
"""Modules of PyTorch that ``farcall.compat`` replaces; it names them and needs nothing in them."""

MAJOR, MINOR = map(int, torch.__version__.split(".")[:2])


def internals_of(gate: Path) -> Internals:
    module = importlib.import_module(".".join(gate.relative_to(ROOT).with_suffix("").parts))
    found: Internals = module.INTERNALS
    return found


def names_in_gates() -> list[tuple[Path, Internal]]:
    return [(gate, internal) for gate in GATES for internal in internals_of(gate).names]


@cache
def own_names() -> frozenset[str]:
    """The private names that the packages define: functions, classes, attributes."""
    found = frozenset().union(*(source_of(path).defined for path in FILES if path not in GATES))
    return found - frozenset(dir(torch.Tensor))


def uses(path: Path, allowed: frozenset[str]) -> Iterator[tuple[int, str]]:
    """The private names that a file uses: of PyTorch's modules, and of objects other than its own."""
    source = source_of(path)
    for line, name, of_torch, own in source.uses:
        if name not in allowed:
            if of_torch:
                yield line, of_torch
            elif not own and name not in own_names() and name not in STANDARD_LIBRARY:
                yield line, f"?.{name}"
    for line, text in source.strings:
        if text.startswith("torch._") and not text.startswith(REPLACED):
            yield line, text


def expected_by(package: str) -> frozenset[str]:
    """The last parts of the names in the gates of a package and of lower ones, for uses on instances."""
    lower = PACKAGES[: PACKAGES.index(package) + 1]
    return frozenset(
        internal.name.rpartition(":")[2].rpartition(".")[2]
        for gate, internal in names_in_gates()
        if gate.relative_to(ROOT).parts[0] in lower
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_private_names_are_used_in_gates_only(package: str) -> None:
    expected = expected_by(package)
    assert not [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in FILES
        if path.relative_to(ROOT).parts[0] == package and path not in GATES
        for line, name in uses(path, expected)
    ]


def test_each_name_stands_once() -> None:
    counts = Counter((str(each), each.since, each.until) for _, each in names_in_gates())
    assert not [name for name, count in counts.items() if count > 1]


def test_this_version_of_pytorch_has_those_that_it_needs() -> None:
    needed = [each for _, each in names_in_gates() if each.is_needed((MAJOR, MINOR))]
    assert needed
    assert not [str(each) for each in needed if each.look_up(None) is None]
