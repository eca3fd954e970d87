from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import chart, group, report
from benchmarks.__main__ import main
from benchmarks.workload import Bar
from benchmarks.workloads import WORKLOADS

NUMBERS = {
    "farcall": [{"null": 38.0, "idle": 0.1, "window": 60.0}, {"null": 58.0, "idle": 0.3, "window": 50.0}],
    "torch": [{"null": 300.0, "idle": 9.0, "window": 10.0}, {"null": 180.0, "idle": 9.0, "window": 10.0}],
}


def test_line_has_medians_ratio_and_verdict() -> None:
    null, idle, window = report.lines(NUMBERS, ["null", "idle", "window"])
    assert (null.ours, null.theirs, null.ratio, null.holds) == (48.0, 240.0, 0.2, True)
    assert null.spread == (20 / 48, 120 / 240)
    assert idle.holds  # absolute
    assert (window.ratio, window.holds) == (5.5, False)


def test_without_the_other_side_only_absolute_bars_are_judged() -> None:
    null, idle = report.lines({"farcall": NUMBERS["farcall"]}, ["null", "idle"])
    assert (null.theirs, null.ratio, null.holds) == (None, None, None)
    assert idle.holds


@pytest.mark.parametrize(
    ("bar", "value", "holds"),
    [
        (Bar(0.25), 0.25, True),
        (Bar(0.25), 0.26, False),
        (Bar(6, at_least=True), 6, True),
        (Bar(6, True), 5, False),
    ],
)
def test_bar_is_a_limit_either_way(bar: Bar, value: float, holds: bool) -> None:
    assert bar.holds(value) is holds


def test_table_and_file_show_every_line(tmp_path: Path) -> None:
    outcome = report.lines(NUMBERS, ["null", "idle", "window"])
    console = Console(width=120, record=True, quiet=True)
    with console.capture() as capture:
        console.quiet = False
        console.print(report.table(outcome, 2))
    assert "null rpc_sync" in capture.get()
    assert "0.20 x" in capture.get()
    report.save(tmp_path / "new" / "results.json", NUMBERS, outcome)
    saved = json.loads((tmp_path / "new" / "results.json").read_text())
    assert saved["summary"]["null"]["ratio"] == 0.2
    assert saved["runs"]["torch"] == NUMBERS["torch"]


def test_a_workload_that_the_other_side_cannot_run_has_no_ratio() -> None:
    numbers = {"farcall": [{"remote": 50.0}], "grpc": [dict[str, float]()]}
    (line,) = report.lines(numbers, ["remote"])
    assert (line.theirs, line.ratio, line.cost) == (None, None, None)
    assert not group.can_run("grpc", WORKLOADS["remote"])
    assert group.can_run("torch", WORKLOADS["remote"])
    assert group.can_run("ray", WORKLOADS["remote"])
    assert not group.can_run("ray", WORKLOADS["autograd-op"])


def test_bars_are_about_torch_and_no_other_peer() -> None:
    (line,) = report.lines({"farcall": [{"null": 10.0}], "ray": [{"null": 1000.0}]}, ["null"])
    assert (line.ratio, line.holds) == (0.01, None)


def test_cost_is_a_share_of_the_others_time_also_for_rates() -> None:
    null, idle, window = report.lines(NUMBERS, ["null", "idle", "window"])
    assert null.cost == 0.2
    assert idle.cost is None  # its bar is about the number itself
    assert window.cost == pytest.approx(1 / 5.5)
    assert window.limit == 1 / 8


def test_chart_shows_every_line_that_has_a_ratio(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    outcome = report.lines(NUMBERS, ["null", "idle", "window"])
    chart.draw(tmp_path / "chart.svg", outcome, "the other", report.machine())
    assert (tmp_path / "chart.svg").read_text().count("<svg") == 1


def test_chart_without_matplotlib_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(chart.MissingLibrary, match="pip install matplotlib"):
        chart.draw(tmp_path / "chart.svg", [], "the other", report.machine())


def test_unknown_workload_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["nonsense"])
    assert "no workload nonsense; there are: null" in capsys.readouterr().err


def test_names_are_the_keys() -> None:
    assert all(name == workload.name for name, workload in WORKLOADS.items())


@pytest.mark.processes
def test_command_measures_and_saves(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    options = ["--repeats", "1", "--peer", "none", "--timeout", "30", "--output", str(output)]
    command = [sys.executable, "-m", "benchmarks", "null", *options]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "null rpc_sync" in ran.stdout
    assert json.loads(output.read_text())["summary"]["null"]["farcall"] > 0
