"""Transports are found by name: ours, and those of other packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from rpc.runtime.loop import LoopThread
from rpc.transport.base import TransportContext
from rpc.transport.registry import names, transports


def install(folder: Path) -> None:
    """A package that brings a transport."""
    info = folder / "carrier_pigeons-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: carrier-pigeons\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[farcall.transports]\npigeon = carrier_pigeons:Pigeons\n")
    (folder / "carrier_pigeons.py").write_text(
        "class Pigeons:\n    scheme = 'pigeon'\n    def __init__(self, context): self.context = context\n"
    )


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a package is installed."""
    install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture
def context(loop: LoopThread) -> TransportContext:
    return TransportContext(loop.loop, 1)


@pytest.mark.usefixtures("package")
def test_a_transport_of_another_package_is_there_when_it_is_named(context: TransportContext) -> None:
    assert "pigeon" not in transports(context)
    made = transports(context, ["pigeon", "tcp"])
    assert list(made) == ["tcp", "pigeon"]
    assert made["pigeon"].context is context  # type: ignore[attr-defined]
    assert names() == ["unix", "tcp", "grpc", "pigeon"]


def test_ours_come_best_first_in_whatever_order_they_are_named(context: TransportContext) -> None:
    assert list(transports(context, ["tcp", "unix"])) == ["unix", "tcp"]
    assert list(transports(context, ["tcp"])) == ["tcp"]


@pytest.mark.usefixtures("package")
def test_an_unknown_name_is_an_error_that_says_what_there_is(context: TransportContext) -> None:
    with pytest.raises(ValueError, match="there is no transport 'smoke': there are unix, tcp, grpc, pigeon"):
        transports(context, ["tcp", "smoke"])


def test_a_package_that_is_installed_while_the_program_runs_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "pigeon" not in names()
    install(tmp_path)
    assert "pigeon" in names()
