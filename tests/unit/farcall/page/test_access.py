"""Which requests the page's server answers."""

from __future__ import annotations

import pytest

from farcall.page.access import Access

PAGE = Access("a-token-of-sufficient-length", 4711)
HERE = {"Host": "127.0.0.1:4711"}


def status(method: str = "GET", target: str = "/", **headers: str) -> int | None:
    given = HERE | {name.replace("_", "-"): value for name, value in headers.items()}
    refusal = PAGE.refuse(method, target, given)
    return None if refusal is None else refusal.status


@pytest.mark.parametrize("host", ["127.0.0.1:4711", "localhost:4711", "LOCALHOST:4711"])
def test_request_to_the_page_may_go_on(host: str) -> None:
    assert status(Host=host) is None


def test_default_port_may_be_left_out() -> None:
    page = Access("a-token-of-sufficient-length", 80)
    for host in ("127.0.0.1", "localhost", "127.0.0.1:80"):
        assert page.refuse("GET", "/", {"Host": host, "Origin": f"http://{host}"}) is None
    assert page.refuse("GET", "/", {"Host": "evil.example"}) is not None


@pytest.mark.parametrize(
    "host",
    ["", "127.0.0.1", "127.0.0.1:4712", "evil.example:4711", "127.0.0.1.evil.example:4711", "0.0.0.0:4711"],
)
def test_name_that_leads_here_is_refused_if_it_is_not_loopback(host: str) -> None:
    assert status(Host=host) == 403


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "https://127.0.0.1:4711", "http://127.0.0.1:4712", "null", ""]
)
def test_request_of_another_origin_is_refused(origin: str) -> None:
    assert status(Origin=origin) == 403


def test_request_of_the_page_itself_may_go_on() -> None:
    assert status(Origin="http://127.0.0.1:4711", Sec_Fetch_Site="same-origin") is None


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_request_that_another_site_has_made_is_refused(site: str) -> None:
    """Another port of 127.0.0.1 is the same site."""
    assert status(target="/api/events", Sec_Fetch_Site=site) == 403
    assert status(target="/api/events", Sec_Fetch_Site=site, Sec_Fetch_Mode="navigate") == 403


def test_link_to_the_page_may_come_from_elsewhere() -> None:
    assert status(target="/?token=x", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate") is None


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE", "OPTIONS", "CONNECT", "TRACE"])
def test_the_page_is_only_read(method: str) -> None:
    assert status(method) == 405


def test_bodies_and_long_addresses_are_refused() -> None:
    assert status(Content_Length="1") == 413
    assert status(Transfer_Encoding="chunked") == 413
    assert status(target="/" + 1024 * "x") == 414


def test_data_needs_the_token_in_a_header() -> None:
    assert PAGE.opens_data("Bearer a-token-of-sufficient-length")
    for wrong in (
        None,
        "",
        "Bearer",
        "Bearer x",
        f"Bearer {PAGE.cookie}",
        "Basic a-token-of-sufficient-length",
    ):
        assert not PAGE.opens_data(wrong)


def test_files_need_the_token_or_the_cookie() -> None:
    assert PAGE.opens_files("a-token-of-sufficient-length", None)
    assert PAGE.opens_files(None, PAGE.cookie)
    assert not PAGE.opens_files(None, None)
    assert not PAGE.opens_files(None, "a-token-of-sufficient-length")
    assert not PAGE.opens_files("wrong", PAGE.cookie)
