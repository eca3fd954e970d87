"""Which programs import ``torch_xla`` whatever happens."""

from __future__ import annotations

from pathlib import Path

import pytest

from farcall.compat.own_source import imports_at_the_top, installed_imports


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch_xla", True),
        ("import os, torch_xla.core.xla_model as xm", True),
        ("from torch_xla import runtime as xr", True),
        ("from torch_xla.core import xla_model", True),
        ("'''torch_xla'''\nimport torch", False),
        ("import torch_xla_extras", False),
        ("from . import torch_xla", False),
        ("from .torch_xla import device", False),
        ("if available():\n    import torch_xla", False),
        ("try:\n    import torch_xla\nexcept ImportError:\n    pass", False),
        ("def main():\n    import torch_xla", False),
        ("import torch_xla\nthis is no Python", False),
        ("", False),
    ],
)
def test_only_an_import_at_the_top_level_counts(source: str, found: bool) -> None:
    assert imports_at_the_top(source.encode(), "torch_xla") == found


def test_modules_of_the_programs_own_folder_are_not_taken_for_installed_ones(tmp_path: Path) -> None:
    source = b"import pytest\nimport click\n"
    assert installed_imports(source, str(tmp_path)) == ["pytest", "click"]
    (tmp_path / "click.py").touch()
    assert installed_imports(source, str(tmp_path)) == ["pytest"]
