"""The page's own files: what they may load, and whether its colours can be read."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib import resources

import pytest

STATIC = {
    each.name: each.read_bytes() for each in resources.files("farcall.page").joinpath("static").iterdir()
}
CSS = STATIC["page.css"].decode()
OWN = {
    name: text.decode()
    for name, text in STATIC.items()
    if name.endswith((".js", ".html", ".css")) and "uplot" not in name
}


def test_nothing_is_loaded_from_elsewhere_and_no_text_becomes_markup() -> None:
    for name, text in OWN.items():
        assert not [link for link in re.findall(r"https?://[^\s\"'`)]+", text) if "w3.org" not in link], name
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text
        ), name
    html = OWN["index.html"]
    assert not re.search(r"<script(?![^>]*\bsrc=)", html)
    assert not re.search(r"\son\w+=|\sstyle=", html)


def test_files_that_others_have_written_come_with_their_licence() -> None:
    assert b"MIT License" in STATIC["uplot.LICENSE.txt"]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_small_numbers_of_bytes_have_a_unit() -> None:
    script = OWN["dom.js"] + "\nconsole.log([0.25, 1, 2048, 2 ** 60].map(bytes).join());"
    found = subprocess.run(
        ["node", "--input-type=module", "-"], input=script, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "0 B,1 B,2.0 KiB,1048576 TiB"


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_points_that_are_sent_again_replace_the_old_ones() -> None:
    script = re.sub(r"^import .*$", "", OWN["charts.js"], flags=re.MULTILINE)
    script = "const rate = 0, bytes = 0;" + script
    script += (
        "\naddPoints([[1], [2]]); clearPoints(); addPoints([[1], [2], [3]]); console.log(points.join());"
    )
    found = subprocess.run(
        ["node", "--input-type=module", "-"], input=script, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "1,2,3"


def colours(scheme: str) -> dict[str, str]:
    blocks = re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)
    found = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", blocks[0]))
    return found if scheme == "light" else found | dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", blocks[1]))


def luminance(colour: str) -> float:
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    red, green, blue = (
        each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


PAIRS = [
    *((text, ground) for text in ("ink", "muted", "accent") for ground in ("bg", "surface", "raised")),
    *((tone, f"{tone}-soft") for tone in ("ok", "warn", "bad", "odd")),
    *((text, f"{tone}-soft") for text in ("ink", "muted") for tone in ("warn", "bad")),
]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("text", "ground"), PAIRS)
def test_text_has_enough_contrast(scheme: str, text: str, ground: str) -> None:
    """4.5 to 1: what WCAG 2 asks of text at level AA."""
    found = colours(scheme)
    assert contrast(found[text], found[ground]) >= 4.5
