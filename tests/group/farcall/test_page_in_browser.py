"""The page in a real Chromium: what a user sees of jobs that run, hang and die."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import rpc
from farcall.observe.format.jobs import JobFolder, jobs, jobs_folder
from farcall.observe.format.layout import Beat
from farcall.observe.reading.processes import signs_of
from farcall.observe.reading.reader import read_worker
from farcall.observe.worker.state_file import StateFile
from tests.support.browser import chromium, served_page
from tests.support.hangs import HANGS
from tests.support.workers import RunWorkers, Worker, Workers

pytestmark = [pytest.mark.processes, pytest.mark.nightly, pytest.mark.timeout(300)]

PATIENCE = 60.0
Start = Callable[..., Workers]
TABS = ("overview", "tasks", "memory", "references", "collectives", "spmd", "logs", "history")


def job_of(workers: Workers) -> JobFolder:
    """The job of workers, once all have joined."""
    for worker in workers:
        worker.wait_for("joined")
    pids = {worker.pid for worker in workers}
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        for job in jobs(jobs_folder(os.environ)):
            found = [read_worker(file) for file in job.state_files()]
            if {each.pid for each in found if each.phase == "running"} == pids:
                return job
        workers.server_news()
        time.sleep(0.1)
    pytest.fail("the workers have left no state files")


@pytest.fixture
def start(run_workers: RunWorkers) -> Iterator[Start]:
    """Starts workers that are killed at the end."""
    started: list[Workers] = []

    def begin(task: Callable[..., object], count: int) -> Workers:
        started.append(run_workers.start(task, count, time_limit=280))
        return started[0]

    yield begin
    for worker in (each for workers in started for each in workers):
        worker.kill()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    with chromium(tmp_path) as found:
        yield found


class Seen:
    """A tab of the browser, and what went wrong in it."""

    def __init__(self, tab: Any) -> None:
        self.tab = tab
        self.troubles: list[str] = []
        tab.set_default_timeout(1000 * PATIENCE)
        tab.on("pageerror", lambda error: self.troubles.append(str(error)))
        tab.on("console", lambda said: self.troubles.append(said.text) if said.type == "error" else None)
        tab.on("dialog", self._dialog)

    def _dialog(self, dialog: Any) -> None:
        self.troubles.append(dialog.message)
        dialog.dismiss()


@contextmanager
def looked_at(
    browser: Any, address: str, width: int = 1600, scheme: str = "light", pill: str = "live"
) -> Iterator[Seen]:
    context = browser.new_context(viewport={"width": width, "height": 1000}, color_scheme=scheme)
    seen = Seen(context.new_page())
    try:
        seen.tab.goto(address)
        seen.tab.wait_for_selector(f".pill.{pill}")
        yield seen
        assert seen.troubles == []
    finally:
        context.close()


def serve(worker: Worker) -> None:
    worker.join()
    worker.report("joined")
    while True:
        time.sleep(1.0)


def test_killed_worker_turns_red_within_two_seconds(start: Start, tmp_path: Path, browser: Any) -> None:
    workers = start(serve, 3)
    with served_page(tmp_path, job_of(workers).id) as address, looked_at(browser, address) as seen:
        seen.tab.wait_for_selector(".node[data-tone=ok]")
        workers[1].kill()
        killed = time.monotonic()
        seen.tab.wait_for_selector("[aria-label='worker1: dead'][data-tone=bad]", timeout=10_000)
        assert time.monotonic() - killed < 2.0
        assert seen.tab.locator("#banner").get_attribute("data-state") == "bad"
        assert "✕ dead" in seen.tab.locator("tr[data-worker=worker1]").inner_text()
        colour = seen.tab.eval_on_selector(
            "[data-tone=bad] circle.body", "node => getComputedStyle(node).fill"
        )
        assert colour == "rgb(191, 31, 42)"


def test_job_that_is_over_shows_its_figures_and_its_cycle(start: Start, tmp_path: Path, browser: Any) -> None:
    workers = start(HANGS["cycle_of_calls_and_a_lock"], 2)
    with served_page(tmp_path, job := job_of(workers).id) as address, looked_at(browser, address) as seen:
        seen.tab.wait_for_selector(".box.cycle >> nth=2")
        for each in workers:
            each.kill()
        seen.tab.wait_for_selector(".pill.over")
    with served_page(tmp_path, job) as address, looked_at(browser, address, pill="over") as seen:
        seen.tab.wait_for_selector(".box.cycle >> nth=2")
        seen.tab.click("#tab-history")
        row = seen.tab.locator("#history tr", has_text=job)
        row.wait_for()
        assert "dead" in row.inner_text()
        assert "cycle:" in row.inner_text()


def test_hang_shows_its_cycle(start: Start, tmp_path: Path, browser: Any) -> None:
    hang = HANGS["cycle_of_calls_and_a_lock"]
    workers = start(hang, 2)
    with served_page(tmp_path, job_of(workers).id) as address, looked_at(browser, address) as seen:
        seen.tab.wait_for_selector(".box.cycle >> nth=2")
        boxes = seen.tab.locator(".box.cycle").all_inner_texts()
        assert len(boxes) == 3
        file, line = hang.culprit
        assert f"{file}:{line}" in "".join(boxes)
        assert seen.tab.locator("path.arrow.cycle").count() == 3
        seen.tab.wait_for_selector("#headline:has-text('nothing has moved for')")
        assert seen.tab.locator("#findings .label.cycle").count() == 1
        assert seen.tab.locator("path.edge.cycle").count() == 2
        seen.tab.locator(".box.cycle").nth(2).click()
        seen.tab.wait_for_selector("dialog .thread")
        assert "block" in seen.tab.locator("dialog .thread").first.inner_text()


CUT_TABLES = """[...document.querySelectorAll(".folds")]
    .filter((each) => each.offsetWidth > each.parentNode.clientWidth).map((each) => each.textContent)"""
"""The tables of which a part is out of sight."""

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


def hostile(worker: Worker) -> None:
    """Functions and files whose names are markup."""
    worker.join()
    worker.report("joined")
    if worker.rank == 0:
        rpc.rpc_sync("worker1", run_hostile, timeout=0)
    while True:
        time.sleep(1.0)


def run_hostile() -> None:
    names: dict[str, Any] = {}
    exec(compile("import time\ndef f():\n    time.sleep(3600)\n", f"/{HOSTILE}.py", "exec"), names)
    function = names["f"]
    function.__code__ = function.__code__.replace(co_name=HOSTILE, co_qualname=HOSTILE)
    function()


def test_no_script_runs_from_the_name_of_a_function(start: Start, tmp_path: Path, browser: Any) -> None:
    workers = start(hostile, 2)
    with served_page(tmp_path, job_of(workers).id) as address, looked_at(browser, address) as seen:
        seen.tab.wait_for_function(
            "text => document.querySelector('#waits').textContent.includes(text)", arg=HOSTILE
        )
        for tab in TABS:
            seen.tab.click(f"#tab-{tab}")
            seen.tab.wait_for_timeout(300)
        seen.tab.click("#tab-overview")
        seen.tab.click("tr[data-worker=worker1] button")
        seen.tab.wait_for_selector("dialog .thread")
        assert HOSTILE in seen.tab.locator("#worker-body").inner_text()
        assert "owned" not in seen.tab.title()
        assert seen.tab.locator("img[src=x]").count() == 0
        # What a script in the page itself would try, the policy stops.
        blocked = (
            """() => { try { document.body.innerHTML = '<b>x</b>'; return false } catch { return true } }"""
        )
        assert seen.tab.evaluate(blocked)
        seen.troubles[:] = [each for each in seen.troubles if "TrustedHTML" not in each]


def test_page_is_used_by_keyboard(start: Start, tmp_path: Path, browser: Any) -> None:
    workers = start(serve, 3)
    focused = """(() => {
        const at = document.activeElement;
        return `${at.id} ${at.getAttribute("aria-label") ?? at.textContent}`;
    })()"""
    with served_page(tmp_path, job_of(workers).id) as address, looked_at(browser, address) as seen:
        seen.tab.wait_for_selector(".node[data-tone=ok] >> nth=2")
        press = seen.tab.keyboard.press
        press("Tab")
        assert "Skip to content" in seen.tab.evaluate(focused)
        press("Tab")
        assert seen.tab.evaluate(focused).startswith("tab-overview")
        press("ArrowRight")
        assert seen.tab.evaluate(focused).startswith("tab-tasks")
        assert seen.tab.locator("#panel-tasks").is_visible()
        press("Home")
        for _ in range(9):  # the graph of waits, if the workers count as waiting, comes first
            press("Tab")
            if "worker0: " in seen.tab.evaluate(focused):
                break
        assert "worker0: " in seen.tab.evaluate(focused)
        press("ArrowRight")
        assert "worker1" in seen.tab.evaluate(focused)
        press("Enter")
        seen.tab.wait_for_selector("dialog[open] .thread")
        assert seen.tab.locator("#worker-name").inner_text() == "worker1"
        press("Escape")
        assert seen.tab.locator("dialog[open]").count() == 0
        assert "worker1" in seen.tab.evaluate(focused)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_nothing_is_wider_than_the_window(
    start: Start, tmp_path: Path, browser: Any, width: int, scheme: str
) -> None:
    workers = start(HANGS["cycle_of_calls_and_a_lock"], 2)
    with (
        served_page(tmp_path, job_of(workers).id) as address,
        looked_at(browser, address, width, scheme) as seen,
    ):
        seen.tab.wait_for_selector(".box.cycle >> nth=2")
        for tab in TABS:
            seen.tab.click(f"#tab-{tab}")
            seen.tab.wait_for_timeout(300)
            assert seen.tab.evaluate("document.documentElement.scrollWidth") <= width, tab
            assert seen.tab.evaluate(CUT_TABLES) == [], tab
        unnamed = """() => [...document.querySelectorAll("button, input, select, canvas, [tabindex='0']")]
            .filter(each => !each.closest("[aria-hidden=true]"))
            .filter(each => !["aria-label", "aria-labelledby"].some(name => each.getAttribute(name)))
            .filter(each => !each.textContent.trim() && !each.labels?.length)
            .map(each => each.outerHTML)"""
        assert seen.tab.evaluate(unnamed) == []


def leave_states(folder: Path, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """The state files of workers that are these processes, each with a call in flight to the next."""
    count, now, wall = len(processes), time.monotonic(), time.time()
    for rank, process in enumerate(processes):
        signs = signs_of(process.pid)
        assert signs is not None
        to = (rank + 1) % count
        call = {"id": 1, "to": f"worker{to}", "incarnation": to + 1, "what": "work", "began": now - rank / 9}
        place = ["main", "prog.py", 7]
        thread = {"id": 1, "name": "MainThread", "since": now, "at": place, "stack": 20 * [place]}
        thread |= {"call": [to + 1, 1], "doing": "is in rpc_sync"}
        peers = [{"name": f"worker{n}", "state": "ESTABLISHED", "near": True} for n in range(count)]
        worker = {"name": f"worker{rank}", "rank": rank, "pid": process.pid, "host": socket.gethostname()}
        worker |= {"start": signs.start, "incarnation": rank + 1, "phase": "running", "observer": 1}
        state = StateFile(folder / f"here.{process.pid}.1.state")
        snapshot = {"worker": worker, "monotonic": now, "wall": wall, "moved": now, "called": now}
        state.snapshot(snapshot | {"threads": [thread], "calls": [call], "requests": [], "peers": peers})
        state.beat(Beat(1, now, wall, 0, 0, 0.0))


def test_page_of_128_workers_takes_a_small_part_of_a_core(tmp_path: Path, browser: Any) -> None:
    job = jobs_folder(os.environ) / "many"
    processes = [subprocess.Popen(["sleep", "600"]) for _ in range(128)]
    try:
        leave_states(job, processes)
        look_at_128(tmp_path, browser, processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        shutil.rmtree(job)


def look_at_128(folder: Path, browser: Any, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    with served_page(folder, "many") as address, looked_at(browser, address) as seen:
        seen.tab.wait_for_selector(".node >> nth=127")
        server = next(
            int(each.name)
            for each in Path("/proc").iterdir()
            if each.name.isdigit() and serves(each, address)
        )
        before, began = signs_of(server), time.monotonic()
        seen.tab.wait_for_timeout(15_000)
        after = signs_of(server)
        assert before is not None
        assert after is not None
        share = (after.seconds - before.seconds) / (time.monotonic() - began)
        print(f"the server takes {share:.3f} of a core")
        assert share < 0.2
        if shots := os.environ.get("FARCALL_TEST_SHOTS"):
            seen.tab.screenshot(path=f"{shots}/many.png", full_page=True)
        processes[77].kill()
        killed = time.monotonic()
        seen.tab.wait_for_selector("[aria-label^='worker77: dead'][data-tone=bad]")
        print(f"red after {time.monotonic() - killed:.1f} s")


def serves(process: Path, address: str) -> bool:
    """Whether a process is the page's server: the child of this test that runs ``farcall page``."""
    try:
        command = (process / "cmdline").read_bytes().split(b"\0")
        parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return False
    return b"page" in command and parent == os.getpid()
