"""Lines of several ranks on one terminal: whole ones, progress bars and prompts."""

from __future__ import annotations

import pytest

from farcall.launch.lines import Screen, Stream


class Shown:
    """A terminal with two ranks."""

    def __init__(self) -> None:
        self.streams = Stream(b"[0] "), Stream(b"[1] ")
        self.screen = Screen()
        self.text = b""

    def write(self, rank: int, text: bytes) -> bytes:
        """What is written at once."""
        stream = self.streams[rank]
        return self._add(b"".join([self.screen.ended(stream, line) for line in stream.take(text)]))

    def pause(self, rank: int) -> bytes:
        return self._add(self.screen.paused(self.streams[rank]))

    def _add(self, text: bytes) -> bytes:
        self.text += text
        return text


@pytest.fixture
def shown() -> Shown:
    return Shown()


def test_lines_have_their_prefix(shown: Shown) -> None:
    assert shown.write(0, b"one\ntwo\r\n\nthr") == b"[0] one\n[0] two\r\n[0] \n"
    assert shown.write(1, b"other\n") == b"[1] other\n"
    assert shown.write(0, b"ee\n") == b"[0] three\n"


def test_each_step_of_a_progress_bar_is_shown_when_it_is_drawn(shown: Shown) -> None:
    for number in range(3):
        shown.write(0, b"\r%d of 3" % number)
        shown.pause(0)
        assert shown.text.endswith(b"[0] %d of 3" % number)
    assert shown.write(0, b"\rdone\n") == b"\r[0] done\n"
    assert shown.text == b"[0] 0 of 3\r[0] 1 of 3\r[0] 2 of 3\r[0] done\n"


def test_steps_that_end_in_carriage_returns_are_shown_too(shown: Shown) -> None:
    shown.write(0, b"1%\r")
    assert shown.pause(0) == b"[0] 1%\r"
    assert shown.write(0, b"2%\r3%\r") == b"[0] 2%\r"
    assert shown.write(0, b"\n") == b"[0] 3%\r\n"


def test_no_line_is_divided_by_that_of_another_rank(shown: Shown) -> None:
    shown.write(0, b"loss: ")
    assert shown.pause(0) == b"[0] loss: "
    assert shown.pause(0) == b""
    assert shown.write(1, b"other\n") == b"\n[1] other\n"
    assert shown.pause(0) == b"[0] loss: "
    assert shown.write(0, b"0.1\n") == b"0.1\n"
    shown.write(0, b"acc")
    shown.pause(0)
    shown.write(1, b"other\n")
    assert shown.write(0, b"uracy\n") == b"[0] accuracy\n"


def test_unfinished_lines_of_two_ranks(shown: Shown) -> None:
    for rank in (0, 1):
        shown.write(rank, b"name? ")
        shown.pause(rank)
    assert shown.text == b"[0] name? \n[1] name? "
    assert shown.write(1, b"yes\n") == b"yes\n"


def test_a_character_that_has_not_arrived_is_waited_for(shown: Shown) -> None:
    word = "\u00fc\U0001f600".encode()
    for end in range(len(word) + 1):
        whole = word[:end].decode(errors="ignore").encode()
        screen, stream = Screen(), Stream(b"")
        stream.take(word[:end])
        assert screen.paused(stream) == whole
    assert shown.write(0, word[:3]) == b""
    assert shown.pause(0) == b"[0] " + word[:2]
    assert shown.write(0, word[3:] + b"\n") == word[2:] + b"\n"


def test_long_lines_come_in_parts_and_the_end_ends_a_line(shown: Shown) -> None:
    long = b"x" * ((1 << 20) + 1)
    assert shown.write(0, long) == b"[0] " + long + b"\n"
    shown.write(0, b"rest")
    assert shown.write(0, b"") == b"[0] rest\n"
