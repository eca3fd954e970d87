"""``rpc.serve`` finds what serves by an entry point, which what is installed declares."""

from __future__ import annotations

import inspect
import sys
import tomllib
from pathlib import Path

import pytest

import farcall
import rpc
from farcall import client as clients
from tests.support.gateway import Scale

ROOT = Path(farcall.__file__).parent.parent


def install(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a place the first on the path, and put what pip writes of our entry points there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    written = place / "farcall-0.dist-info"
    written.mkdir()
    (written / "METADATA").write_text("Metadata-Version: 2.1\nName: farcall\nVersion: 0\n")
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {where}" for name, where in points.items()))
    ]
    (written / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.setattr(sys, "path", [str(place), *sys.path])


def test_it_serves_where_farcall_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch)
    with rpc.serve({"scale": Scale()}) as server, clients.connect(f"localhost:{server.port}") as client:
        assert float(client.call("scale", 1.0, timeout=60)) == 3.0


def test_its_options_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch)
    with pytest.raises(ValueError, match=r"anyone who reaches 0\.0\.0\.0 could call"):
        rpc.serve({"scale": Scale()}, host="0.0.0.0")
    rpc.serve({"scale": Scale()}, host="0.0.0.0", insecure=True).stop()


def test_where_nothing_that_serves_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ModuleNotFoundError, match=r"nothing is installed that serves: pip install 'farcall"):
        rpc.serve({"scale": Scale()})


def test_it_takes_what_farcall_serve_takes() -> None:
    asked, taken = (inspect.signature(each).parameters.values() for each in (rpc.serve, farcall.serve))
    assert [(each.name, each.kind, each.default) for each in asked] == [
        (each.name, each.kind, each.default) for each in taken
    ]


def implements(server: farcall.serving.Server) -> rpc.serving.RunningServer:
    """Checked by mypy alone: what ``farcall.serve`` returns is what ``rpc.serve`` says."""
    return server
