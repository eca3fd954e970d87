"""The page over HTTP: what is answered and to whom. A job's files are made here; nothing runs."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import os
import queue
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from farcall.observe.format.jobs import find_job
from farcall.observe.format.layout import Beat
from farcall.observe.reading.launches import note_launch
from farcall.observe.worker.state_file import StateFile
from farcall.page import server as server_module
from farcall.page.server import Server
from farcall.page.token_file import page_token

HOSTILE = "<img src=x onerror=alert(1)>\x1b[2J"


def leave_job(folder: Path, job: str = "7c2f", name: str = "worker0", phase: str = "running") -> None:
    """The files of a job that is over."""
    state = StateFile(folder / job / "here.1.1.state")
    worker = {"name": name, "rank": 0, "pid": 1, "host": "elsewhere", "incarnation": 5, "phase": phase}
    stack = [[HOSTILE, "<script>", 1]]
    thread = {"id": 1, "name": "MainThread", "since": 5.0, "at": stack[0], "stack": stack}
    state.snapshot({"worker": worker, "monotonic": 10.0, "wall": 1000.0, "threads": [thread]})
    state.beat(Beat(1, 10.0, 1000.0, 0, 0, 0.0))


class Page:
    """A server that runs on a thread."""

    def __init__(self, folder: Path) -> None:
        job = find_job(folder, "7c2f")
        self.token = page_token(job.path)
        ready: queue.SimpleQueue[Any] = queue.SimpleQueue()

        async def serve() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            await Server(folder, job, self.token).run(0, ready.put, self._stop)

        self._thread = threading.Thread(target=lambda: asyncio.run(serve()))
        self._thread.start()
        self.address = ready.get(timeout=30)
        self.port = int(urlsplit(self.address).port or 0)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)

    def get(self, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of an answer."""
        connection = self.connect()
        connection.request(
            "GET", path, headers={name.replace("_", "-"): text for name, text in headers.items()}
        )
        answer = connection.getresponse()
        found = answer.status, dict(answer.getheaders()), answer.read()
        connection.close()
        return found

    def data(self, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
        return self.get(f"/api/{path}", Authorization=f"Bearer {self.token}", **headers)

    def event(self, job: str = "7c2f") -> Any:
        """The first event of a job."""
        connection = self.connect()
        headers = {"Authorization": f"Bearer {self.token}"}
        connection.request("GET", f"/api/events?job={job}", headers=headers)
        answer = connection.getresponse()
        assert answer.getheader("Content-Type", "").startswith("text/event-stream")
        while not (line := answer.readline()).startswith(b"data: "):
            pass
        connection.close()
        return json.loads(line[6:])

    def raw(self, text: bytes) -> bytes:
        """What comes back for bytes that are no proper request, until the server closes the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as connection:
            connection.sendall(text)
            parts = []
            while part := connection.recv(65536):
                parts.append(part)
        return b"".join(parts)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    leave_job(tmp_path)
    made = Page(tmp_path)
    yield made
    made.close()


def test_address_opens_the_page_and_a_cookie_its_files_alone(page: Page) -> None:
    parts = urlsplit(page.address)
    assert (parts.hostname, parse_qs(parts.query)["token"]) == ("127.0.0.1", [page.token])
    status, headers, body = page.get(f"/?token={page.token}")
    assert (status, b"<title>farcall" in body) == (200, True)
    cookie = headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert page.token not in cookie
    given = cookie.partition(";")[0]
    assert page.get("/static/page.js", Cookie=given)[0] == 200
    assert page.get("/", Cookie=given)[0] == 200
    assert page.get("/api/jobs", Cookie=given)[0] == 401


@pytest.mark.parametrize(
    "path", ["/", "/?token=wrong", "/static/page.js", "/api/events", "/api/jobs", "/api/nothing"]
)
def test_nothing_is_answered_without_the_token(page: Page, path: str) -> None:
    assert page.get(path)[0] == 401
    assert page.get(path, Authorization="Bearer wrong")[0] == 401


def test_other_origins_and_names_are_refused_even_with_the_token(page: Page) -> None:
    assert page.data("jobs")[0] == 200
    assert page.data("jobs", Host=f"evil.example:{page.port}")[0] == 403
    assert page.data("jobs", Origin="http://evil.example")[0] == 403
    assert page.data("jobs", Sec_Fetch_Site="cross-site")[0] == 403


def test_every_answer_lets_no_script_run_but_the_page_s_own(page: Page) -> None:
    for status, headers, _ in (
        page.get("/"),
        page.get(f"/?token={page.token}"),
        page.data("jobs"),
        page.data("none"),
    ):
        assert status in (200, 401, 404)
        policy = headers["Content-Security-Policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
        assert "Access-Control-Allow-Origin" not in headers


def test_files_outside_of_the_page_are_not_served(page: Page) -> None:
    for path in ("../server.py", "..%2fserver.py", "%2e%2e/server.py", "/etc/passwd", ""):
        assert page.get(f"/static/{path}?token={page.token}")[0] in (401, 404)


def test_events_show_the_job_as_json_with_control_characters_escaped(page: Page) -> None:
    event = page.event()
    assert event["view"]["job"]["id"] == "7c2f"
    assert [each["name"] for each in event["view"]["workers"]] == ["worker0"]
    assert HOSTILE.replace("\x1b", "\\x1b") in event["view"]["workers"][0]["doing"]


def test_worker_and_logs_and_past_jobs_are_shown(page: Page, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank0.log").write_text(f"first\n{HOSTILE}\n")
    note_launch(tmp_path / "7c2f", log_dir=str(logs))
    page.event()
    found = json.loads(page.data("worker?name=worker0")[2])
    assert found["threads"][0]["stack"][0][1:] == ["<script>", 1]
    assert page.data("worker?name=nobody")[0] == 404
    assert json.loads(page.data("logs?name=worker0")[2])["lines"] == [
        "first",
        HOSTILE.replace("\x1b", "\\x1b"),
    ]
    listed = json.loads(page.data("jobs")[2])
    assert [(each["id"], each["workers"]) for each in listed["jobs"]] == [("7c2f", 1)]


def test_jobs_are_listed_as_long_as_their_files_are_kept(page: Page, tmp_path: Path) -> None:
    leave_job(tmp_path, "90ab", phase="left")
    listed = {each["id"]: each for each in json.loads(page.data("jobs")[2])["jobs"]}
    assert (listed["90ab"]["state"], listed["90ab"]["workers"]) == ("left", 1)
    shutil.rmtree(tmp_path / "90ab")
    assert [each["id"] for each in json.loads(page.data("jobs")[2])["jobs"]] == ["7c2f"]


def test_jobs_without_a_readable_state_keep_no_others_from_the_list(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.event()  # the page's own is read
    monkeypatch.setattr(server_module, "_MAX_READ", 1)
    leave_job(tmp_path, "90ab", phase="left")
    for path in (tmp_path / "90ab" / "here.1.1.state", tmp_path / "90ab"):
        os.utime(path, (1.0, 1.0))
    for job in ("aaaa", "bbbb"):
        (tmp_path / job).mkdir(mode=0o700)

    def listed() -> set[str]:
        for _ in range(3):
            page.data("jobs")
        return {each["id"] for each in json.loads(page.data("jobs")[2])["jobs"]}

    assert listed() == {"7c2f", "90ab"}
    leave_job(tmp_path, "aaaa", phase="left")
    assert listed() == {"7c2f", "90ab", "aaaa"}


def test_requests_of_any_size_are_refused(page: Page) -> None:
    start = f"GET /api/jobs HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\nAuthorization: Bearer {page.token}\r\n"
    assert b" 413 " in page.raw(f"{start}Content-Length: 100000000000\r\n\r\n".encode()).partition(b"\r\n")[0]
    assert b" 200 " not in page.raw(f"GET /{'x' * 5000} HTTP/1.1\r\n\r\n".encode())
    assert b" 200 " not in page.raw(f"{start}X: {'x' * 20000}\r\n\r\n".encode())
    assert b" 200 " not in page.raw(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
    assert page.data("jobs")[0] == 200


def test_cookies_of_other_programs_do_no_harm(page: Page) -> None:
    assert page.data("jobs", Cookie=f"other={'x' * 10000}")[0] == 200


def test_token_is_in_no_log(page: Page, caplog: pytest.LogCaptureFixture) -> None:
    start = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\nCookie: a={page.token}"
    with caplog.at_level(logging.DEBUG):
        page.get(f"/?token={page.token}")
        page.get("/?token=wrong-but-secret")
        assert b" 400 " in page.raw(f"{start}\0\r\n\r\n".encode()).partition(b"\r\n")[0]
    assert [each for each in caplog.records if each.name.startswith("aiohttp")] == []
    assert page.token not in caplog.text
    assert "wrong-but-secret" not in caplog.text


def test_token_that_is_no_text_is_wrong(page: Page) -> None:
    start = f"GET /api/jobs HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\nAuthorization: Bearer ".encode()
    assert b" 401 " in page.raw(start + b"\xff\r\n\r\n").partition(b"\r\n")[0]


def test_only_event_streams_begin_to_watch_a_job(page: Page, tmp_path: Path) -> None:
    leave_job(tmp_path, "8888", "other0")
    assert page.data("worker?job=8888&name=other0")[0] == 404
    assert page.data("logs?job=8888&name=other0")[0] == 404
    assert [each.name for each in threading.enumerate() if each.name == "farcall-page-8888"] == []


def test_events_hold_no_number_that_json_lacks() -> None:
    packed = server_module._packed({"a": [float("nan"), (float("inf"), 1.5)], "b": "x"})
    assert json.loads(packed, parse_constant=pytest.fail) == {"a": [0.0, [0.0, 1.5]], "b": "x"}


def test_connections_without_the_token_give_way_and_the_owner_always_gets_in(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(server_module, "_FIRST_REQUEST_SECONDS", 0.5)
    for words in (b"", b"GET / HTTP/1.1\r\nHost: x\r\n"):
        silent = [socket.create_connection(("127.0.0.1", page.port), timeout=20) for _ in range(8)]
        for each in silent:
            with contextlib.suppress(OSError):
                each.sendall(words)
        assert page.data("jobs")[0] == 200
        for each in silent:  # the oldest at once, the last when they have shown no token for a while
            with contextlib.suppress(ConnectionError):
                assert each.recv(1) == b""
            each.close()


def test_event_streams_too_many_are_refused(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_MAX_STREAMS", 1)
    first = page.connect()
    first.request("GET", "/api/events", headers={"Authorization": f"Bearer {page.token}"})
    assert first.getresponse().status == 200
    assert page.data("events")[0] == 429
    first.close()


def test_other_jobs_of_this_user_can_be_seen_and_no_others(page: Page, tmp_path: Path) -> None:
    leave_job(tmp_path, "8888", "other0")
    assert page.event("8888")["view"]["job"]["id"] == "8888"
    assert page.data("events?job=../../etc")[0] == 404


def test_token_is_this_user_s_and_the_same_again(tmp_path: Path) -> None:
    leave_job(tmp_path)
    token = page_token(tmp_path / "7c2f")
    assert page_token(tmp_path / "7c2f") == token
    assert len(token) >= 32
    path = tmp_path / "7c2f" / "page.token"
    assert os.stat(path).st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(PermissionError, match=r"page\.token"):
        page_token(tmp_path / "7c2f")
