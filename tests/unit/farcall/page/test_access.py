"""Which requests the page's server answers."""

from __future__ import annotations

import pytest

from farcall.page.access import Access

PAGE = Access("a-token-of-sufficient-length", 4711)
HERE = {"Host": "127.0.0.1:4711"}


OWN = "http://127.0.0.1:4711"
OTHER_HOSTS = (
    *("", "127.0.0.1", "127.0.0.1:4712", "evil.example:4711"),
    *("127.0.0.1.evil.example:4711", "0.0.0.0:4711"),
)
OTHER_ORIGINS = ("http://evil.example", "https://127.0.0.1:4711", "http://127.0.0.1:4712", "null", "")


@pytest.mark.parametrize(
    ("status", "target", "headers"),
    [
        *((None, "/", {"Host": host}) for host in ("127.0.0.1:4711", "localhost:4711", "LOCALHOST:4711")),
        *((403, "/", {"Host": host}) for host in OTHER_HOSTS),
        (None, "/", {"Origin": OWN, "Sec-Fetch-Site": "same-origin"}),
        *((403, "/", {"Origin": origin}) for origin in OTHER_ORIGINS),
        # Another port of 127.0.0.1 is the same site.
        *((403, "/api/events", {"Sec-Fetch-Site": site}) for site in ("cross-site", "same-site")),
        (403, "/api/events", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}),
        (None, "/?token=x", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}),
        (413, "/", {"Content-Length": "1"}),
        (413, "/", {"Transfer-Encoding": "chunked"}),
        (414, "/" + 1024 * "x", {}),
    ],
)
def test_request_is_answered_if_it_is_of_the_page(
    status: int | None, target: str, headers: dict[str, str]
) -> None:
    refusal = PAGE.refuse("GET", target, HERE | headers)
    assert (None if refusal is None else refusal.status) == status


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE", "OPTIONS", "CONNECT", "TRACE"])
def test_the_page_is_only_read(method: str) -> None:
    refusal = PAGE.refuse(method, "/", HERE)
    assert refusal is not None
    assert refusal.status == 405


def test_default_port_may_be_left_out() -> None:
    page = Access("a-token-of-sufficient-length", 80)
    for host in ("127.0.0.1", "localhost", "127.0.0.1:80"):
        assert page.refuse("GET", "/", {"Host": host, "Origin": f"http://{host}"}) is None
    assert page.refuse("GET", "/", {"Host": "evil.example"}) is not None


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
