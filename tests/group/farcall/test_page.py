"""``farcall page`` and ``farcall launch --page`` as users run them, over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.support.launchers import Launchers, launchers

__all__ = ["launchers"]

pytest.importorskip("aiohttp")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

PROGRAM = """\
import os, threading
import rpc

rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}")
print("joined")
threading.Event().wait()
"""


def address_of(lines: list[str]) -> str:
    return next(line.rpartition(" ")[2] for line in lines if "farcall: page of job" in line)


def events(address: str) -> Iterator[dict[str, Any]]:
    """The events that a page at an address gets."""
    parts = urlsplit(address)
    (token,) = parse_qs(parts.query)["token"]
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=30)
    connection.request("GET", "/api/events", headers={"Authorization": f"Bearer {token}"})
    answer = connection.getresponse()
    assert answer.status == 200
    try:
        while line := answer.readline():
            if line.startswith(b"data: "):
                yield json.loads(line[6:])
    finally:
        connection.close()


def test_launched_job_has_a_page_that_ends_with_it(launchers: Launchers) -> None:
    launcher = launchers(PROGRAM, "-n 2 --page --grace 1")
    launcher.wait_for("joined", 2)
    launcher.wait_for("farcall: page of job")
    address = address_of(launcher.lines)
    for event in events(address):
        workers = event["view"]["workers"]
        if [each["state"] for each in workers] == ["running", "running"]:
            break
    os.kill(workers[1]["pid"], signal.SIGKILL)
    launcher.end()
    with pytest.raises(OSError, match="refused"):
        next(events(address))
