"""The port for metrics: what it serves, to whom, and what it costs."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from farcall.serving import Server
from tests.support.certificates import Authority
from tests.support.gateway import Connect, Scale, Serve

TOKEN = "a token of one caller"
BEYOND = "127.0.0.2"
"""An address that counts as one that other hosts reach."""
SOON = 60.0


def scrape(
    server: Server, host: str = "127.0.0.1", *, token: str = "", tls: ssl.SSLContext | None = None
) -> str:
    scheme = "http" if tls is None else "https"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"{scheme}://{host}:{server.metrics_port}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=SOON, context=tls) as answer:
        text: str = answer.read().decode()
    return text


def connected(server: Server, host: str = "127.0.0.1") -> socket.socket:
    assert server.metrics_port is not None
    return socket.create_connection((host, server.metrics_port), SOON)


def told(server: Server, request: bytes) -> bytes:
    """The first line of the answer."""
    with connected(server) as sock:
        sock.sendall(request)
        return sock.makefile("rb").readline().strip()


def test_metrics_are_served(serve: Serve, connect: Connect) -> None:
    server = serve({"scale": Scale()}, metrics_port=0)
    connect(server).call("scale", 1.0)
    assert 'farcall_calls_total{code="OK",name="scale"} 1.0' in scrape(server)


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (b"GET / HTTP/1.0\r\n\r\n", b"HTTP/1.1 200 OK"),
        (b"GET /metrics?name[]=x HTTP/1.1\r\nHost: x\r\n\r\n", b"HTTP/1.1 200 OK"),
        (b"GET /other HTTP/1.1\r\n\r\n", b"HTTP/1.1 404 Not Found"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 9\r\n\r\n", b"HTTP/1.1 405 Method Not Allowed"),
        (b"\x16\x03\x01\r\n\r\n", b"HTTP/1.1 400 Bad Request"),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 20_000, b"HTTP/1.1 431 Request Header Fields Too Large"),
    ],
)
def test_what_is_asked(serve: Serve, request_: bytes, answer: bytes) -> None:
    server = serve({"scale": Scale()}, metrics_port=0)
    assert told(server, request_) == answer


def test_idle_connections_take_no_threads_and_the_oldest_are_closed(serve: Serve) -> None:
    server = serve({"scale": Scale()}, metrics_port=0)
    scrape(server)
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connected(server)) for _ in range(100)]
        assert "farcall_calls" in scrape(server)
        assert threading.active_count() <= before  # a thread of the scrape may have ended
        assert all(each.recv(1) == b"" for each in idle[:80])
        assert "farcall_calls" in scrape(server)


def test_a_request_that_does_not_come_in_time_is_not_waited_for(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farcall.scraping._SECONDS", 0.1)
    with connected(serve({"scale": Scale()}, metrics_port=0)) as slow:
        try:
            slow.sendall(b"GET / HTTP/1.1")
            assert slow.recv(1) == b""
        except ConnectionError:
            pass  # it was closed before this came


def test_a_server_ends_while_connections_are_idle(serve: Serve) -> None:
    server = serve({"scale": Scale()}, metrics_port=0)
    with connected(server) as idle:
        scrape(server)
        server.stop()
        assert idle.recv(1) == b""
        with pytest.raises(OSError, match="refused"):
            connected(server)


def test_they_are_served_on_this_host_only_wherever_calls_are(serve: Serve) -> None:
    server = serve({"scale": Scale()}, host=BEYOND, tokens=TOKEN, metrics_port=0)
    assert "farcall_calls" in scrape(server)
    with pytest.raises(urllib.error.URLError, match="refused"):
        scrape(server, BEYOND)


def test_beyond_this_host_they_need_a_token(serve: Serve) -> None:
    server = serve({"scale": Scale()}, tokens={"ann": TOKEN}, metrics_port=0, metrics_host=BEYOND)
    assert "farcall_calls" in scrape(server, BEYOND, token=TOKEN)
    for wrong in ("", "another token......"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            scrape(server, BEYOND, token=wrong)
        assert (caught.value.code, caught.value.headers["WWW-Authenticate"]) == (401, "Bearer")


@pytest.mark.parametrize("certificates", [False, True])
def test_beyond_this_host_they_are_encrypted_where_calls_are(
    serve: Serve, tmp_path: Path, certificates: bool
) -> None:
    tls = Authority(tmp_path).issue(host=BEYOND)
    options = (
        {"client_certificates": True} if certificates else {"client_certificates": False, "tokens": TOKEN}
    )
    server = serve({"scale": Scale()}, tls=tls, metrics_port=0, metrics_host=BEYOND, **options)
    context = ssl.create_default_context(cafile=tls.ca)
    if certificates:
        with pytest.raises(OSError, match=r"(?i)certificate.required|reset|EOF|closed"):
            scrape(server, BEYOND, tls=context)
        context.load_cert_chain(tls.cert, tls.key)
    assert "farcall_calls" in scrape(server, BEYOND, token="" if certificates else TOKEN, tls=context)
    with pytest.raises(OSError):  # noqa: PT011  how it fails is the platform's
        scrape(server, BEYOND)
