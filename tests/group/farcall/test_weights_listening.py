"""Weight stores for programs without a group."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys

import pytest
import torch

from farcall import weights
from farcall.weights import Block, WeightsError
from farcall.weights import handle as handle_module
from farcall.weights.listening import Server
from rpc.errors import WorkerLostError
from tests.support.streams import until


@pytest.mark.parametrize("far", [False, True])
def test_programs_publish_and_read(
    store_server: Server, monkeypatch: pytest.MonkeyPatch, *, far: bool
) -> None:
    if far:
        monkeypatch.setattr(handle_module, "host_identity", lambda: "another host")
    whole = torch.arange(12.0).view(3, 4)
    with weights.connect(store_server.address) as trainer, weights.connect(store_server.address) as reader:
        for number in range(5):
            assert trainer.put(number, {"w": whole * number})
        into = torch.zeros(3, 2)
        assert reader.get({"w": Block(into, (0, 1), (3, 4))}, newer_than=2) == 4
        assert torch.equal(into, whole[:, 1:3] * 4)
        with reader.lease(3) as old:
            assert torch.equal(old["w"], whole * 3)
        assert reader.versions() == [2, 3, 4]
        usage = reader.usage()
        assert (usage["leases"], usage["keep"], usage["sent_bytes"] > 0) == (0, 3, far)
        with pytest.raises(TimeoutError, match="no version 9"):
            reader.get({"w": into}, version=9, timeout=0.01)


def test_a_program_that_ends_loses_its_leases(store_server: Server) -> None:
    with weights.connect(store_server.address) as trainer:
        trainer.put(1, {"w": torch.ones(2)})
        with weights.connect(store_server.address) as reader:
            lease = reader.lease()
            lease.__enter__()
            assert trainer.usage()["leases"] == 1
        until(lambda: trainer.usage()["leases"] == 0)


def test_an_address_where_none_answers_this_program(
    store_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = store_server.address
    monkeypatch.setenv("FARCALL_TOKEN", "another token of that length")
    with pytest.raises(WeightsError, match=f"cannot open the weight store at {address}: it refused"):
        weights.connect(address)
    store_server.close()
    with pytest.raises(WeightsError, match=f"cannot open the weight store at {address}: "):
        weights.connect(address)
    for wrong in ("nowhere", "host:port", ":7", ""):
        with pytest.raises(WeightsError, match="HOST:PORT"):
            weights.connect(wrong)


def started_again(address: str) -> Server:
    """A server at an address where another one of this process is about to end."""
    found: list[Server] = []

    def start() -> bool:
        with contextlib.suppress(OSError):
            found.append(Server(address, keep=3))
        return bool(found)

    until(start)
    return found[0]


def test_a_server_that_ends_is_told_and_one_that_is_started_again_is_another(store_server: Server) -> None:
    with weights.connect(store_server.address) as store:
        store.put(1, {"w": torch.ones(2)})
        with store.lease() as kept:
            store_server.close()
            with pytest.raises(WorkerLostError, match="store 'weights' is gone with worker"):
                store.get({"w": torch.zeros(2)}, newer_than=1)
            assert torch.equal(kept["w"], torch.ones(2))
        again = started_again(store_server.address)
        try:
            with pytest.raises((WorkerLostError, WeightsError), match="store 'weights'"):
                store.get({"w": torch.zeros(2)})
            with weights.connect(store_server.address) as new:
                assert new.versions() == []
        finally:
            again.close()


@pytest.mark.processes
def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARCALL_TOKEN", "a token of more than sixteen characters")
    command = [sys.executable, "-m", "farcall", "weights", "--listen", "127.0.0.1:0", "--keep", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.search(r" at (127\.0\.0\.1:\d+)$", said.strip())
        assert found, said
        with weights.connect(found[1]) as store:
            store.put(1, {"w": torch.ones(2)})
            store.put(2, {"w": torch.ones(2)})
            assert store.versions() == [2]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
