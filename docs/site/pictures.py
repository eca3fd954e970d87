"""Makes the pictures of the documentation from real runs: of ``why``, ``top``, the page, and a trace.

::

    python docs/site/pictures.py         # needs Chromium, and playwright from PyPI, for the page

Nothing is drawn by hand: what the commands print becomes an SVG file, and Chromium photographs the page.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.text import Text

__all__ = ["main"]

ROOT: Final = Path(__file__).resolve().parents[2]
PICTURES: Final = ROOT / "docs" / "pictures"
WIDTH: Final = 92
"""Width of the terminal, in characters."""

HANG: Final = """\
import os
import threading

from farcall import rpc

lock = threading.Lock()


def block():
    with lock:
        pass


def b_calls_a():
    rpc.rpc_sync("worker0", block, timeout=0)


rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}")
if rank == 0:
    with lock:
        rpc.rpc_sync("worker1", b_calls_a, timeout=0)
rpc.shutdown()
"""

TRACED: Final = """\
import os
import time

from farcall import rpc


def load(n):
    time.sleep(0.004)


def step():
    futures = [rpc.rpc_async("worker2", load, args=(n,)) for n in range(2)]
    time.sleep(0.003)
    for each in futures:
        each.wait()


rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}")
if rank == 0:
    rpc.rpc_sync("worker1", step)
    with rpc.trace("run.json"):
        rpc.rpc_sync("worker1", step)
rpc.shutdown()
"""


def main() -> None:
    """Make all pictures."""
    with tempfile.TemporaryDirectory(prefix="farcall-pictures-") as folder:
        os.environ |= {"FARCALL_JOBS_DIR": f"{folder}/jobs", "PYTHONPATH": str(ROOT), "COLUMNS": str(WIDTH)}
        with launched(Path(folder), HANG, "hang.py", 2):
            until_hangs(Path(folder))
            for name in ("why", "top"):
                write_terminal(name, ask(Path(folder), name))
            photograph(Path(folder))
        with launched(Path(folder), TRACED, "traced.py", 3) as launcher:
            launcher.wait(120)
        draw_trace(json.loads((Path(folder) / "run.json").read_text()))


@contextmanager
def launched(folder: Path, program: str, name: str, workers: int) -> Iterator[subprocess.Popen[bytes]]:
    """A program in ``farcall launch``, ended at the end."""
    (folder / name).write_text(program)
    command = [sys.executable, "-m", "farcall", "launch", "-n", str(workers), "--grace", "1", name]
    process = subprocess.Popen(command, cwd=folder)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def ask(folder: Path, *arguments: str) -> str:
    """What a command prints."""
    command = [sys.executable, "-m", "farcall", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder).stdout


def until_hangs(folder: Path) -> None:
    """Wait until the hang was seen for a while."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        time.sleep(1)
        try:
            found = json.loads(ask(folder, "why", "--json"))
        except subprocess.CalledProcessError:
            continue  # no worker has left anything yet
        if found["still_seconds"] > 12 and found["findings"][:1] and found["findings"][0]["kind"] == "cycle":
            return
    raise TimeoutError("the program does not hang")


def write_terminal(name: str, said: str) -> None:
    """A terminal with a command and what it has printed, as an SVG file that loads nothing."""
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"), highlight=False)  # noqa: SIM115
    console.print(Text(f"$ farcall {name}", style="bold"))
    console.print(Text(said.rstrip()))
    svg = console.export_svg(title=f"farcall {name}", unique_id=f"farcall-{name}")
    svg = re.sub(r"@font-face \{.*?\}|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code", "DejaVu Sans Mono")
    (PICTURES / f"{name}.svg").write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")


def photograph(folder: Path) -> None:
    """The page of the job, by Chromium."""
    from playwright.sync_api import sync_playwright

    command = [sys.executable, "-m", "farcall", "page"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        with sync_playwright() as playwright:
            sandbox = ["--no-sandbox"] if os.getuid() == 0 else []
            path = shutil.which(os.environ.get("CHROMIUM", "chromium"))
            browser = playwright.chromium.launch(executable_path=path, args=sandbox)
            tab = browser.new_page(viewport={"width": 1180, "height": 820})
            tab.goto(address)
            tab.wait_for_selector(".box.cycle >> nth=2", timeout=60_000)
            tab.wait_for_timeout(8000)
            tab.screenshot(path=PICTURES / "page.png")
            browser.close()
    finally:
        server.terminate()
        server.wait(30)


# ---- the trace

ROW: Final = 22
LEFT: Final = 190
SIZE: Final = 960


def draw_trace(trace: dict[str, Any]) -> None:
    """The spans of a trace, by worker and thread, as an SVG file."""
    events = trace["traceEvents"]
    names = {
        (each["name"], each["pid"], each.get("tid") if each["name"] == "thread_name" else None): each["args"][
            "name"
        ]
        for each in events
        if each["ph"] == "M" and each["name"] in ("process_name", "thread_name")
    }
    spans = [each for each in events if each["ph"] == "X"]
    begin = min(each["ts"] for each in spans)
    length = max(each["ts"] + each["dur"] for each in spans) - begin
    lanes: dict[tuple[Any, Any], list[list[dict[str, Any]]]] = {}
    for each in sorted(spans, key=lambda span: (span["pid"], span["ts"], -span["dur"])):
        rows = lanes.setdefault((each["pid"], each["tid"]), [])
        row = next((row for row in rows if row[-1]["ts"] + row[-1]["dur"] <= each["ts"]), None)
        if row is None:
            rows.append(row := [])
        row.append(each)
    parts, top = [], 12
    for (process, thread), rows in sorted(lanes.items(), key=lambda item: str(item[0])):
        worker = names.get(("process_name", process, None), str(process))
        worker = worker.partition(" (")[0]
        label = f"{worker} {names.get(('thread_name', process, thread), thread)}"
        parts.append(f'<text class="lane" x="8" y="{top + 15}">{html.escape(label[:28])}</text>')
        for row in rows:
            for span in row:
                x = LEFT + (span["ts"] - begin) / length * (SIZE - LEFT - 10)
                width = max(1.0, span["dur"] / length * (SIZE - LEFT - 10))
                shade = sum(map(ord, span["name"])) % 5
                parts.append(
                    f'<rect class="s{shade}" x="{x:.1f}" y="{top}" width="{width:.1f}" height="18" rx="3"/>'
                )
                fits = int(width / 7)
                if fits > 3:
                    text = html.escape(span["name"][:fits])
                    parts.append(f'<text class="span" x="{x + 4:.1f}" y="{top + 13}">{text}</text>')
            top += ROW
        top += 6
    style = (
        "text{font:12px DejaVu Sans,sans-serif}.lane{fill:#57606c}.span{fill:#fff;font-size:11px}"
        ".s0{fill:#3b6fd4}.s1{fill:#b8581a}.s2{fill:#1f8160}.s3{fill:#b03a70}.s4{fill:#7a54c4}"
    )
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE} {top + 24}" role="img">',
        f"<style>{style}</style>",
        f'<rect width="{SIZE}" height="{top + 24}" rx="8" fill="#f5f6f8"/>',
        *parts,
        f'<text class="lane" x="{LEFT}" y="{top + 14}">0</text>',
        f'<text class="lane" x="{SIZE - 10}" y="{top + 14}" text-anchor="end">{length / 1000:.1f} ms</text>',
        "</svg>",
    ]
    (PICTURES / "trace.svg").write_text("\n".join(svg) + "\n")


if __name__ == "__main__":
    main()
