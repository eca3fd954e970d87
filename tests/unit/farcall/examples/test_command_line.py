"""The command line that the examples share, and that each of them stands alone."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from farcall.examples import example_parser

EXAMPLES = Path(__file__).resolve().parents[4] / "examples"
INSTALLED = {"farcall", "spmd", "torch", "numpy"}


def test_a_missing_package_ends_an_example_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["example.py"])
    with pytest.raises(SystemExit) as end:
        example_parser("Shows.", needs=["torch", "no-such-package"]).parse_args()
    assert end.value.code == 1
    command = f"{sys.executable} -m pip install no-such-package"
    assert capsys.readouterr().err == f"This example needs no-such-package: {command}\n"


def test_an_example_without_missing_packages_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["example.py"])
    assert vars(example_parser("Shows.", needs=["torch"]).parse_args()) == {}


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_needs_no_other_file(example: Path) -> None:
    tree = ast.parse(example.read_text())
    imported = {each.module or "" for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)}
    imported |= {name.name for each in ast.walk(tree) if isinstance(each, ast.Import) for name in each.names}
    assert {name.partition(".")[0] for name in imported} <= INSTALLED | sys.stdlib_module_names
