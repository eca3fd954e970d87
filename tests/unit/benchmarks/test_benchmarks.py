from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import chart, report, turns
from benchmarks.measuring import measure
from benchmarks.sides import FARCALL, Side
from benchmarks.turns import Failure
from benchmarks.workload import Workload
from benchmarks.workloads import WORKLOADS

ROOT = Path(__file__).resolve().parents[3]

in_repository = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="there are no revisions here")

NUMBERS: report.Numbers = {
    "farcall": {"null": [38.0, 58.0], "idle": [0.1, 0.3], "window": [60.0, 50.0]},
    "torch": {"null": [190.0, 290.0], "idle": [9.0, 9.0], "window": [10.0, 10.0]},
}


def printed(outcome: list[report.Line], other: str) -> str:
    console = Console(width=120, record=True, quiet=True)
    with console.capture() as capture:
        console.quiet = False
        console.print(report.table(outcome, 2, other))
    return capture.get()


def test_line_has_medians_ratio_cost_and_verdict() -> None:
    null, idle, window = report.lines(NUMBERS, ["null", "idle", "window"])
    assert (null.ours.median, null.theirs.median, null.ratio, null.holds) == (48.0, 240.0, 0.2, True)
    assert (null.ours.spread, null.cost) == (20 / 48, 0.2)
    assert (idle.holds, idle.cost) == (True, None)  # its bar is about the number itself
    assert (window.ratio, window.holds, window.limit) == (5.5, False, 1 / 8)
    assert window.cost == pytest.approx(1 / 5.5)  # of a rate too, the share of the other's time


def test_table_file_and_chart_show_every_line_and_name_failures(tmp_path: Path) -> None:
    failed: dict[str, list[float | Failure]] = {
        "null": [Failure("hung"), 100.0],
        "idle": [Failure("died (SIGKILL)", "why"), Failure("hung")],
    }
    outcome = report.lines({"farcall": NUMBERS["farcall"], "torch": failed}, ["null", "idle", "window"])
    text = printed(outcome, "PyTorch")
    for cell in ("farcall beside PyTorch", "null rpc_sync", "0.58 x", "100", "1 failed", "died (SIGKILL)"):
        assert cell in text
    report.save(tmp_path / "new" / "results.json", {"torch": failed}, outcome)
    saved = json.loads((tmp_path / "new" / "results.json").read_text())
    assert saved["summary"]["null"]["ratio"] == 0.58
    assert saved["runs"]["torch"]["idle"][0] == {"reason": "died (SIGKILL)", "details": "why"}
    pytest.importorskip("matplotlib")
    chart.draw(tmp_path / "chart.svg", outcome, "the other", report.machine())
    assert (tmp_path / "chart.svg").read_text().count("<svg") == 1


def _pass_on(_: Any) -> float:
    for _ in range(3):
        turns.pass_on()
    return 7.0


def _raise(_: Any) -> float:
    raise ValueError("not today")


def _die(_: Any) -> float:
    os.write(2, b"about to die\n")
    os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


def _hang(_: Any) -> float:
    time.sleep(1000)
    return 0.0


def _sides(monkeypatch: pytest.MonkeyPatch) -> list[Side]:
    """Two that need no other worker than the one that measures."""
    module: Any = types.ModuleType("rpc_without_workers")
    module.TensorPipeRpcBackendOptions = dict
    module.init_rpc = module.shutdown = lambda *_, **__: None
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return [Side(name, name, module.__name__, starts_its_workers=True) for name in ("a", "b")]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("fails", "reason", "details", "limit"),
    [
        (_raise, "ValueError", "not today", 60.0),
        (_die, "died (SIGKILL)", "about to die", 60.0),
        (_hang, "hung", "", 5.0),
    ],
)
def test_a_side_that_fails_has_fresh_workers_for_what_comes_next(
    monkeypatch: pytest.MonkeyPatch, fails: Callable[[Any], float], reason: str, details: str, limit: float
) -> None:
    workloads = [("before", _pass_on), ("fails", fails), ("after", _pass_on)]
    for name, function in workloads:
        monkeypatch.setitem(WORKLOADS, name, Workload(name, name, "s", function, workers=1))
    found = dict(measure(_sides(monkeypatch), [name for name, _ in workloads], limit))
    assert found["before"] == found["after"] == {"a": 7.0, "b": 7.0}
    for outcome in found["fails"].values():
        assert isinstance(outcome, Failure)
        assert outcome.reason == reason
        assert details in outcome.details


@in_repository
@pytest.mark.processes
def test_command_measures_and_saves_and_prints_nothing_else(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    options = ["--repeats", "1", "--peer", "HEAD", "--timeout", "60", "--output", str(output)]
    command = [sys.executable, "-m", "benchmarks", "null", *options]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=80, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert not ran.stderr
    assert "null rpc_sync" in ran.stdout
    assert f"{FARCALL.title} beside farcall at HEAD" in ran.stdout
    assert json.loads(output.read_text())["summary"]["null"]["farcall"] > 0


@in_repository
@pytest.mark.fresh_interpreter
def test_a_revision_is_measured_without_what_this_installation_has(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import importlib.metadata, sys
        from pathlib import Path
        import torch  # imports the backend of the installation
        import spmd
        from benchmarks.sides import revision

        folder = Path(sys.argv[1])
        revision("HEAD", folder).load()
        import spmd
        print(Path(spmd.__file__).is_relative_to(folder))
        print(importlib.metadata.distribution("farcall").read_text("entry_points.txt") ==
              (folder / next(folder.glob("*.dist-info")) / "entry_points.txt").read_text())
    """)
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_budget_shows_messages_and_intervals_of_both_workers() -> None:
    command = [sys.executable, "-m", "benchmarks", "--budget", "autograd-op"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for part in ("µs a step", "messages sent", "distributed backward", "gradients"):
        assert part in done.stdout
    for worker in ("worker0", "worker1"):
        assert f"{worker}   " in done.stdout
