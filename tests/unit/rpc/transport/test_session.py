"""What is sent again over a new connection."""

from __future__ import annotations

import pytest

from rpc.errors import ProtocolError
from rpc.transport.session import Session


def broken_after(*sent: bytes) -> Session:
    session = Session()
    session.sent += sent
    return session


def test_what_was_not_taken_in_is_sent_again_before_what_was_not_sent() -> None:
    assert broken_after(b"1", b"2").resume(1, [b"3"]) == [b"2", b"3"]


def test_a_message_that_arrived_before_its_writer_was_told_is_not_sent_again() -> None:
    """As with TLS, which takes several at once, and may have written only the first when the link breaks."""
    session = broken_after(b"1")
    assert session.resume(2, [b"2", b"3"]) == [b"3"]
    assert session.first == 2


@pytest.mark.parametrize("count", [0, 4])
def test_a_count_that_cannot_be_is_refused(count: int) -> None:
    session = broken_after(b"1", b"2")
    session.acknowledged(1)
    with pytest.raises(ProtocolError, match="it has taken in"):
        session.resume(count, [b"3"])
