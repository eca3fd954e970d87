"""A name server as a cluster has one, for tests in network namespaces.

::

    python name_server.py ADDRESS ZONE SECONDS

It answers from a file with a line ``ADDRESS NAME`` for each host, which may change, and NXDOMAIN for other
names. Reverse look-ups take some seconds, and find nothing.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

_QUESTION_A, _QUESTION_PTR = 1, 12
_NAME_UNKNOWN = 3


def answer(server: socket.socket, query: bytes, client: Any, zone: Path, seconds: float) -> None:
    """Answer one query."""
    labels, at = [], 12
    while query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode())
        at += 1 + query[at]
    (kind,) = struct.unpack("!H", query[at + 1 : at + 3])
    hosts = {name: address for address, name in (line.split() for line in zone.read_text().splitlines())}
    name = ".".join(labels).lower()
    found = hosts.get(name) if kind == _QUESTION_A else None
    if kind == _QUESTION_PTR:
        time.sleep(seconds)
    flags = 0x8580 | (0 if name in hosts else _NAME_UNKNOWN)
    reply = query[:2] + struct.pack("!HHHHH", flags, 1, 1 if found else 0, 0, 0) + query[12 : at + 5]
    if found:
        reply += struct.pack("!HHHIH", 0xC00C, _QUESTION_A, 1, 1, 4) + socket.inet_aton(found)
    server.sendto(reply, client)


def main() -> None:
    """Serve until the process is ended."""
    address, zone, seconds = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((address, 53))
        print("serves", flush=True)
        while True:
            query, client = server.recvfrom(512)
            threading.Thread(target=answer, args=(server, query, client, zone, seconds), daemon=True).start()


if __name__ == "__main__":
    main()
