from __future__ import annotations

import pytest

from spmd.sharding.visualize import visualize_sharding


def shown(capsys: pytest.CaptureFixture[str], sharding: str) -> list[list[str]]:
    """What stands in the cells of the table that is printed."""
    visualize_sharding(sharding, use_color=False)
    lines = capsys.readouterr().out.splitlines()
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "CPU" in line]


@pytest.mark.parametrize(
    ("sharding", "cells"),
    [
        ("{devices=[2,2]0,1,2,3}", [["CPU 0", "CPU 1"], ["CPU 2", "CPU 3"]]),
        ("{devices=[3]2,0,1}", [["CPU 2"], ["CPU 0"], ["CPU 1"]]),
        ("{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}", [["CPU [0, 1]"], ["CPU [2, 3]"]]),
        ("{devices=[1,2,2]0,2,1,3 last_tile_dim_replicate}", [["CPU [0, 2]", "CPU [1, 3]"]]),
        ("{devices=[12,1]0,1,2,3,4,5,6,7,8,9,10,11}", [[f"CPU {number}"] for number in range(12)]),
    ],
)
def test_a_cell_names_the_workers_that_hold_it(
    capsys: pytest.CaptureFixture[str], sharding: str, cells: list[list[str]]
) -> None:
    assert shown(capsys, sharding) == cells


def test_a_cell_is_as_wide_as_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    visualize_sharding("{devices=[1,2]0,1}", use_color=False, min_width=20)
    assert capsys.readouterr().out.splitlines()[0] == "┌" + "┬".join(["─" * 20] * 2) + "┐"


@pytest.mark.parametrize(
    ("sharding", "message"),
    [
        ("", "sharding has no value"),
        ("{devices=[2,2]0,1,2,3", "sharding is not organized as expected"),
        ("{devices=[1,1,2]0,1}", "first two dimensions"),
    ],
)
def test_what_no_table_can_show_is_refused(sharding: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        visualize_sharding(sharding)
