from __future__ import annotations

import contextlib
import gc
import itertools
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any

import pytest
from torch.distributed import (  # type: ignore[attr-defined]
    HashStore,
    PrefixStore,
    TCPStore,
)

from rpc.errors import RendezvousError, RendezvousTimeoutError
from rpc.rendezvous import init_method
from rpc.rendezvous.init_method import RankAndSize, _TcpStore, job_key, open_store, resolve_group
from rpc.rendezvous.static import join_static
from rpc.rendezvous.store import StoreWait
from rpc.runtime.process_signs import ProcessSigns
from tests.support.ports import reserved_port
from tests.unit.rpc.rendezvous.conftest import Workers, in_thread, results

__all__ = ["reserved_port"]

NEEDS_IPV6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")

_LISTENS = "0A"  # a state in those tables

# Rank, world size, job

TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4"}


ONE_HOST = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
URL = {"init_method": "tcp://host:1?rank=1&world_size=3"}
DYNAMIC = {"dynamic": True}


@pytest.mark.parametrize(
    ("rank", "world_size", "environ", "options", "place"),
    [
        (0, 2, {}, {}, RankAndSize(0, 2)),
        (-1, None, TORCHRUN, {}, RankAndSize(2, 4)),
        (0, 2, TORCHRUN, {}, RankAndSize(0, 2)),
        (3, None, TORCHRUN, {}, RankAndSize(3, 4)),
        (-1, 8, TORCHRUN, {}, RankAndSize(2, 8)),
        (0, None, {}, {}, RankAndSize(0, None)),
        (5, 0, {}, {}, RankAndSize(5, None)),
        (-1, None, TORCHRUN, DYNAMIC, RankAndSize(2, None)),
        (-1, None, TORCHRUN, URL, RankAndSize(1, 3)),
        (0, 2, TORCHRUN, URL, RankAndSize(0, 2)),
        (-1, None, ONE_HOST, {}, RankAndSize(0, 4, single_host=True)),
        (-1, None, ONE_HOST | {"WORLD_SIZE": "8"}, {}, RankAndSize(0, 8)),
        (0, 4, ONE_HOST | {"WORLD_SIZE": "8"}, {}, RankAndSize(0, 4)),
        (-1, None, ONE_HOST, DYNAMIC, RankAndSize(0, None)),
    ],
)
def test_argument_counts_before_init_method_and_that_before_the_environment(
    rank: int | None,
    world_size: int | None,
    environ: Mapping[str, str],
    options: dict[str, Any],
    place: RankAndSize,
) -> None:
    assert resolve_group(rank, world_size, environ, **options) == place


@pytest.mark.parametrize(
    ("rank", "options", "said"),
    [
        (0, DYNAMIC, "dynamic=True"),
        (-1, {"init_method": "tcp://host:1?rank=x"}, "rank in init_method must be a number"),
    ],
)
def test_what_contradicts_itself_or_is_no_number_is_refused(
    rank: int, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(RendezvousError, match=said):
        resolve_group(rank, 2, {}, **options)


def test_job_is_named_by_the_user_else_by_torchrun() -> None:
    assert job_key({}) == "default"
    assert job_key({"TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_RESTART_COUNT": "3"}) == "run"
    assert job_key({"TORCHELASTIC_RUN_ID": "run", "FARCALL_JOB": "mine"}) == "mine"


# The store


def serve(port: int = 0) -> TCPStore:
    """Serve a store as another program does, not to be shared within this process."""
    listener = socket.create_server(("127.0.0.1", port), backlog=64)
    port = listener.getsockname()[1]
    return TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())


def _listening_on(port: int) -> str:
    """The addresses at which some process listens on a port, by the kernel's tables; IPv6 ones as there."""
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, _, number = local.partition(":")
            if state == _LISTENS and int(number, 16) == port:
                if table == "tcp":
                    address = socket.inet_ntoa(int(address, 16).to_bytes(4, sys.byteorder))
                found.append(f"{address}:{port}")
    return " ".join(found)


# TCP


def test_rank_0_serves_and_the_others_wait_for_it(reserved_port: int) -> None:
    url = f"tcp://127.0.0.1:{reserved_port}"
    client = in_thread(open_store, url, 1, 2, timeout=20)
    server = open_store(url, 0, 2, timeout=20)
    server.set("key", b"\0value\xff")
    assert client.result(20).get("key") == b"\0value\xff"
    assert server.master == "127.0.0.1"


def test_environment_names_the_address(reserved_port: int) -> None:
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserved_port)}
    store = open_store("env://", 0, 1, timeout=20, environ=environ)
    assert f"127.0.0.1:{reserved_port} (MASTER_ADDR and MASTER_PORT)" in store.description


def test_store_on_loopback_listens_there_only(reserved_port: int) -> None:
    store = open_store(f"tcp://localhost:{reserved_port}", 0, 1, timeout=20)
    assert _listening_on(reserved_port) == f"127.0.0.1:{reserved_port}"
    assert store.add("n", 2) == 2


@pytest.mark.parametrize(
    ("found", "bound"),
    [
        (["10.0.0.1"], "10.0.0.1"),
        (["10.0.0.1", "10.0.0.2"], None),
        (["127.0.1.1"], None),
        ([], None),
    ],
    ids=["one address", "several", "loopback here alone", "none"],
)
def test_store_listens_everywhere_where_its_name_may_mean_another_address(
    monkeypatch: pytest.MonkeyPatch, found: list[str], bound: str | None
) -> None:
    def resolve(*_: object, **__: object) -> list[Any]:
        if not found:
            raise socket.gaierror("no such host")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert _TcpStore.of("tcp://master:1", 0, 2, {})._own_address() == bound


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", pytest.param("[::1]", marks=NEEDS_IPV6)])
def test_store_of_this_process_is_shared(reserved_port: int, host: str) -> None:
    first = open_store(f"tcp://{host}:{reserved_port}", 0, 1, timeout=20)
    first.set("key", b"value")
    again = open_store(f"tcp://{host}:{reserved_port}", 0, 1, timeout=20)
    assert again.get("key") == b"value"
    theirs = TCPStore(host.strip("[]"), reserved_port, None, True, wait_for_workers=False, multi_tenant=True)
    assert theirs.get("key") == b"value"


def test_torchruns_store_is_not_served_again(reserved_port: int) -> None:
    agents = serve(reserved_port)
    agents.set("key", "from torchrun")
    environ = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(reserved_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    assert open_store("env://", 0, 1, timeout=20, environ=environ).get("key") == b"from torchrun"


def test_two_processes_of_rank_0_meet_in_one_store(reserved_port: int) -> None:
    other = TCPStore(
        "127.0.0.1", reserved_port, None, True, wait_for_workers=False
    )  # not shared: as in another process
    other.set("key", "of the other")
    assert open_store(f"tcp://127.0.0.1:{reserved_port}", 0, 1, timeout=20).get("key") == b"of the other"


@pytest.mark.parametrize("rank", [0, 1])
def test_name_that_no_host_can_have_is_refused_at_once(rank: int) -> None:
    with pytest.raises(RendezvousError, match=r"'part\.\.missing' .*cannot be found.*spelling") as raised:
        open_store("tcp://part..missing:1", rank, 2, timeout=60)
    assert not isinstance(raised.value, RendezvousTimeoutError)


@pytest.mark.parametrize("rank", [0, 1])
def test_unknown_host_is_named_when_the_time_is_over(rank: int) -> None:
    said = r"not been reachable for 0\.3 s: the host 'no\.such\.host\.invalid' .*cannot be found.*spelling"
    with pytest.raises(RendezvousTimeoutError, match=said):
        open_store("tcp://no.such.host.invalid:1", rank, 2, timeout=0.3)


@pytest.mark.parametrize("rank", [0, None])
@pytest.mark.parametrize("code", [socket.EAI_NONAME, socket.EAI_AGAIN])
def test_host_that_gets_its_name_late_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, reserved_port: int, rank: int | None, code: int
) -> None:
    """As a pod does, whose headless service knows it a while after its start."""
    unknown = iter([socket.gaierror(code, "not known yet")] * 3)
    resolve = socket.getaddrinfo

    def look_up(*arguments: Any, **options: Any) -> Any:
        for error in unknown:
            raise error
        return resolve(*arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    other = None if rank == 0 else serve(reserved_port)
    store = open_store(f"tcp://localhost:{reserved_port}", rank, 2, timeout=20)
    assert next(unknown, None) is None
    assert store.add("n", 1) == 1
    del other


@pytest.fixture
def listeners_of_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets that the test listens with appear to belong to another process."""
    monkeypatch.setattr(init_method, "listening_processes", lambda ports: dict.fromkeys(ports, 1))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.usefixtures("listeners_of_another_process")
def test_store_that_is_slow_to_answer_is_waited_for(reserved_port: int, rank: int) -> None:
    """As where the name server takes seconds for each connection. A relay lets nothing through at first."""
    with socket.create_server(("127.0.0.1", reserved_port)) as slow, contextlib.ExitStack() as connections:
        server = serve()
        relaying = in_thread(relay_later, slow, server.port, connections)
        store = open_store(f"tcp://127.0.0.1:{reserved_port}", rank, 2, timeout=60)
        assert store.add("n", 1) == 1
        slow.shutdown(socket.SHUT_RDWR)
        relaying.result(20)


def relay_later(listener: socket.socket, port: int, connections: contextlib.ExitStack) -> None:
    """The first three get no answer: the question whether somebody is there, the client, and another such."""
    with contextlib.suppress(OSError):  # the test is over
        for number in itertools.count():
            client = connections.enter_context(listener.accept()[0])
            if number >= 3:
                server = connections.enter_context(socket.create_connection(("127.0.0.1", port)))
                in_thread(pump, client, server)
                in_thread(pump, server, client)


def pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while read := source.recv(1 << 16):
            target.sendall(read)
        target.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.usefixtures("listeners_of_another_process")
def test_port_of_another_program_is_named_at_once(rank: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        other_ends = in_thread(hang_up_on_all, other)
        with pytest.raises(RendezvousError, match="taken by a program that is not the store"):
            open_store(f"tcp://127.0.0.1:{other.getsockname()[1]}", rank, 2, timeout=60)
        other.shutdown(socket.SHUT_RDWR)
        other_ends.result(20)


class Refuses(BaseRequestHandler):
    def handle(self) -> None:
        self.request.recv(100)
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


class Http(BaseHTTPRequestHandler):
    timeout = 2  # in seconds; ends the connections of stores, which send no request

    def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002


@pytest.mark.parametrize(("handler", "rank"), [(Http, 0), (Http, 1), (Refuses, 1)])
@pytest.mark.usefixtures("listeners_of_another_process")
def test_port_of_a_server_of_text_is_named_after_one_answer(
    monkeypatch: pytest.MonkeyPatch, handler: Any, rank: int
) -> None:
    """On another host, too, where the process that has the port is unknown and may be busy. PyTorch's store
    reports each wrong answer with a traceback of its own.
    """
    monkeypatch.setattr(init_method, "_ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(init_method, "process_signs", lambda _: ProcessSigns(True, False, 1, 1))
    with ThreadingTCPServer(("127.0.0.1", 0), handler) as other:
        serving = in_thread(other.serve_forever)
        said = "taken by a program that is not the store .*it speaks another protocol"
        with pytest.raises(RendezvousError, match=said):
            open_store(f"tcp://127.0.0.1:{other.server_address[1]}", rank, 2, timeout=60)
        other.shutdown()
        serving.result(20)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes seconds takes moments."""
    for name in ("_ANSWER_SECONDS", "_LONGEST_SILENCE_SECONDS", "_MARGIN_SECONDS", "_PROBE_SECONDS"):
        monkeypatch.setattr(init_method, name, 0.05)


@pytest.mark.parametrize(
    ("address", "rank", "accepts"),
    [
        ("127.0.0.1", 0, True),
        ("127.0.0.1", 1, False),
        ("127.0.0.1", None, True),
        pytest.param("::1", 0, False, marks=NEEDS_IPV6),
    ],
)
@pytest.mark.usefixtures("listeners_of_another_process", "impatient")
def test_port_of_this_host_that_a_silent_program_has_is_named(
    monkeypatch: pytest.MonkeyPatch, address: str, rank: int | None, accepts: bool
) -> None:
    """A program that never answers, whether or not it accepts connections. Its process sleeps. A store would
    serve the port of ``::1`` at all addresses of IPv4, and wait for the program.
    """
    monkeypatch.setattr(init_method, "process_signs", lambda _: ProcessSigns(False, False, 1, 1))
    family, host = (socket.AF_INET6, "[::1]") if ":" in address else (socket.AF_INET, address)
    with socket.create_server((address, 0), family=family) as other, contextlib.ExitStack() as connections:
        accepting = in_thread(accept_all, other, connections) if accepts else None
        port = other.getsockname()[1]
        said = rf"port {port} of {address} is taken by a program that is not the store .*process 1;"
        with pytest.raises(RendezvousError, match=said):
            open_store(f"tcp://{host}:{port}", rank, None if rank is None else 2, timeout=60)
        other.shutdown(socket.SHUT_RDWR)
        if accepting is not None:
            accepting.result(20)


@pytest.mark.parametrize("address", ["127.0.0.1", pytest.param("::1", marks=NEEDS_IPV6)])
@pytest.mark.usefixtures("impatient")
def test_port_that_a_silent_socket_of_this_process_has_is_named(address: str) -> None:
    family, host = (socket.AF_INET6, "[::1]") if ":" in address else (socket.AF_INET, address)
    with socket.create_server((address, 0), family=family) as own:
        port = own.getsockname()[1]
        said = rf"port {port} of {address} is taken by .*process {os.getpid()}, which is this one;"
        with pytest.raises(RendezvousError, match=said):
            open_store(f"tcp://{host}:{port}", 0, 2, timeout=20)


@pytest.mark.usefixtures("listeners_of_another_process", "impatient")
def test_store_of_this_host_whose_process_is_stopped_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = itertools.count()

    def signs(_: int) -> ProcessSigns:
        next(looks)
        return ProcessSigns(True, False, 1, 1)

    monkeypatch.setattr(init_method, "process_signs", signs)
    with (
        socket.create_server(("127.0.0.1", 0)) as stopped,
        pytest.raises(RendezvousTimeoutError, match="has not been reachable for 2 s"),
    ):
        open_store(f"tcp://127.0.0.1:{stopped.getsockname()[1]}", 0, 2, timeout=2)
    assert next(looks) > 1


@pytest.mark.usefixtures("listeners_of_another_process")
def test_a_silent_program_does_not_delay_the_end_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init_method, "_ANSWER_SECONDS", 3600.0)
    monkeypatch.setattr(init_method, "process_signs", lambda _: ProcessSigns(True, False, 1, 1))
    with socket.create_server(("127.0.0.1", 0)) as other, contextlib.ExitStack() as connections:
        accepting = in_thread(accept_all, other, connections)
        store = _TcpStore.of(f"tcp://127.0.0.1:{other.getsockname()[1]}", 1, 2, {})
        opening = in_thread(store.open, StoreWait(0.2))
        with pytest.raises(RendezvousTimeoutError, match=r"has not been reachable for 0\.2 s"):
            opening.result(60)
        other.shutdown(socket.SHUT_RDWR)
        accepting.result(20)


def accept_all(listener: socket.socket, connections: contextlib.ExitStack) -> None:
    with contextlib.suppress(OSError):  # the test is over
        while True:
            connections.enter_context(listener.accept()[0])


@pytest.mark.usefixtures("listeners_of_another_process")
def test_rank_0_serves_after_one_that_was_just_dying() -> None:
    """The kernel accepts connections for a process that is being killed until its sockets are closed."""
    dying = socket.create_server(("127.0.0.1", 0))
    port = dying.getsockname()[1]
    dead = in_thread(accept_two_and_die, dying)
    store = open_store(f"tcp://127.0.0.1:{port}", 0, 2, timeout=60)
    dead.result(20)
    assert _listening_on(port) == f"127.0.0.1:{port}"
    assert store.add("n", 2) == 2


def accept_two_and_die(listener: socket.socket) -> None:
    """The probe of the port, and then the client of the store."""
    accepted = [listener.accept()[0] for _ in range(2)]
    for each in (listener, *accepted):
        each.close()


def hang_up_on_all(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the test is over
        while True:
            listener.accept()[0].close()


@pytest.mark.parametrize(
    ("init_method", "meant"),
    [("localhost:29500", "tcp://localhost:29500"), ("/tmp/meet", "file:///tmp/meet")],
)
def test_what_has_no_scheme_is_told_which(init_method: str, meant: str) -> None:
    with pytest.raises(RendezvousError, match=f"write '{meant}'"):
        open_store(init_method, 0, 1, timeout=20)


def test_first_of_a_dynamic_group_serves_the_store(reserved_port: int) -> None:
    url = f"tcp://127.0.0.1:{reserved_port}"
    first = open_store(url, None, None, timeout=20)
    first.set("key", b"value")
    assert open_store(url, 7, None, timeout=20).get("key") == b"value"


def test_dynamic_group_does_not_serve_for_another_host() -> None:
    assert not _TcpStore.of("tcp://192.0.2.1:29500", None, None, {})._may_serve


def test_server_that_is_replaced_is_found_again(reserved_port: int, workers: Workers) -> None:
    url = f"tcp://127.0.0.1:{reserved_port}"
    zero, one = workers(2)
    leaving = serve(reserved_port)
    joining = in_thread(join_static, open_store(url, 1, 2, timeout=20), one.member, 2, 20)
    while leaving.add("farcall/default/arrivals", 0) == 0:
        pass
    del leaving  # as when rank 0 ends the last group, and worker 1 was quick to come for the next
    next_store = open_store(url, 0, 2, timeout=20)
    groups = results([in_thread(join_static, next_store, zero.member, 2, 20), joining])
    assert [group.members for group in groups] == [(zero.member, one.member)] * 2


# Files and others


def test_file_is_made_and_left(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/meet", None, None, timeout=5)
    store.set("key", b"value")
    del store
    assert open_store(f"file://{tmp_path}/meet", None, None, timeout=5).get("key") == b"value"


def test_a_file_is_not_written_to_when_its_store_is_dropped(tmp_path: Path) -> None:
    """It may be that of another group by then, which PyTorch's store would read from the middle."""
    store = open_store(f"file://{tmp_path}/meet", None, None, timeout=5)
    store.set("key", b"value")
    written = (tmp_path / "meet").read_bytes()
    del store
    gc.collect()
    assert (tmp_path / "meet").read_bytes() == written


def test_store_object_is_used_as_it_is() -> None:
    shared = HashStore()
    store = open_store(PrefixStore("mine", shared), 0, 1, timeout=5)
    store.under("a").under("b").set("key", b"value")
    assert shared.get("mine/a/b/key") == b"value"
    assert store.master is None


def test_host_of_a_store_object_is_known() -> None:
    assert open_store(PrefixStore("mine", serve()), 0, 1, timeout=5).master == "127.0.0.1"


def test_other_urls_are_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = HashStore()

    def handler(url: str, **_: object) -> Iterator[tuple[HashStore, int, int]]:
        assert "rank=0" in url
        yield shared, 0, 1

    monkeypatch.setattr(sys.modules["torch.distributed.rendezvous"], "_rendezvous_handlers", {"own": handler})
    open_store("own://somewhere", 0, 1, timeout=5).set("key", b"value")
    assert shared.get("key") == b"value"
    with pytest.raises(RendezvousError, match="unheard://somewhere"):
        open_store("unheard://somewhere", 0, 1, timeout=5)
