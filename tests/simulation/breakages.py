"""Deletes each line that exactly-once delivery depends on, and shows what notices:
``python -m tests.simulation.breakages``.

For each line the tree is copied, the line is taken out of the copy, and simulated groups live there until a
promise is broken. What the simulated network cannot show, since it copies frames at once, is for the unit
tests that the deletion names.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.support.deletions import Deletion, report, run

__all__ = ["GUARDS"]

RUNS: Final = 400
"""Maximum number of simulated groups for one deletion."""

SECONDS: Final = 300.0

_SESSION: Final = "rpc/transport/session.py"
_PEER: Final = "rpc/group/peer.py"
_CONTROL: Final = "rpc/group/control.py"

GUARDS: Final = (
    Deletion("a frame that is taken in is counted", _SESSION, "self.received += 1"),
    Deletion("acknowledged frames are counted", _SESSION, "self.first += 1"),
    Deletion("frames that have arrived are not sent again", _SESSION, "self.acknowledged(count)"),
    Deletion("frames that have not arrived are", _SESSION, "again = list(self.sent)", "again = []"),
    Deletion("what is sent again is kept again by its writer", _SESSION, "self.sent.clear()"),
    Deletion("a connection knows its number", _SESSION, "self.connections = number"),
    Deletion("frames are kept until they are acknowledged", _PEER, "connection.carry(self.session)"),
    Deletion("frames go over the next connection", _PEER, "connection.send_small(frame, 0)"),
    Deletion(
        "frames without a connection go over the first", _PEER, "connection.send(buffers, size, wait=False)"
    ),
    Deletion(
        "frames that were only queued are remembered",
        _PEER,
        "self._unsent += connection.remains()",
        tests="tests/unit/rpc/group/test_peer_table.py",
    ),
    Deletion(
        "a new connection is numbered by the later of both sides' counts",
        "rpc/group/connections.py",
        "number = max(hello.session[0], peer.session.connections) + 1",
        "number = peer.session.connections + 1",
    ),
    Deletion(
        "frames are acknowledged",
        "rpc/group/heartbeat.py",
        "peer.session.acknowledged(frame.call_id)",
        tests="tests/unit/rpc/group/test_heartbeat.py tests/unit/rpc/transport/test_transports.py",
    ),
    Deletion("control messages are counted by their sender", _CONTROL, "exchange.posted += 1"),
    Deletion("control messages are counted when handled", _CONTROL, "exchange.handled += count"),
    Deletion(
        "control messages' acknowledgements are taken in",
        _CONTROL,
        "self.acknowledged = max(self.acknowledged, count)  # a large batch may have been overtaken",
    ),
    Deletion(
        "control messages are acknowledged by themselves",
        _CONTROL,
        "self._loop.call_later(ACK_SECONDS, self._acknowledge)",
    ),
)

_LIVE: Final = f"""
import logging
from tests.simulation.life import Life, Plan
logging.disable(logging.CRITICAL)
for seed in range({RUNS}):
    try:
        Life(Plan.of(seed)).run()
    except Exception as error:
        print(f"seed {{seed}}: {{error}}")
        break
"""


def _notices(guard: Deletion, folder: Path) -> str:
    try:
        found = run(folder, "-c", _LIVE, seconds=SECONDS).stdout.strip()
    except subprocess.TimeoutExpired:
        return f"a simulation that does not end within {SECONDS:g} s"
    if found or not guard.tests:
        return found
    ended = run(folder, "-m", "pytest", "-q", "-x", "-o", "addopts=", *guard.tests.split(), seconds=SECONDS)
    failed = [line for line in ended.stdout.splitlines() if line.startswith("FAILED")]
    return failed[0] if failed else ""


def main() -> int:
    """Print the table; returns 1 if a line can be deleted unnoticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.breakages", description=__doc__)
    parser.add_argument("--only", type=int, help="one of them, by its number, from 1 on")
    return report(GUARDS, _notices, parser.parse_args().only)


if __name__ == "__main__":
    sys.exit(main())
