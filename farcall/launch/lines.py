"""The lines of several streams on one terminal, each with its prefix. No I/O.

A line is written when it is complete. So is each step of a progress bar, which ends in a carriage return.
Other text, such as a prompt, is written when the stream has paused. If another stream then writes a line, it
begins a new one, and the unfinished line is written again, as a whole, when it goes on: a complete line is
never divided.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["Screen", "Stream"]

_LINE_BYTES: Final = 1 << 20
"""Maximum length of a line in bytes; a longer one is written in parts."""

_END: Final = re.compile(rb"\r?\n|\r(?=[^\n])")
"""The end of a line or of a step; a last carriage return may be the beginning of a line's end."""


class Stream:
    """One stream: what it has written of its last line, and how much of that is on the screen."""

    def __init__(self, prefix: bytes) -> None:
        self.prefix = prefix
        self.rest = b""
        self.shown = 0

    def take(self, read: bytes) -> list[bytes]:
        """Add text; returns the lines and steps that are complete now, with their ends. The empty text ends
        the stream.
        """
        data = self.rest + read
        ended, begin = [], 0
        for end in _END.finditer(data):
            ended.append(data[begin : end.end()])
            begin = end.end()
        self.rest = data[begin:]
        if self.rest and (not read or len(self.rest) > _LINE_BYTES):
            ended.append(self.rest + b"\n")
            self.rest = b""
        return ended


class Screen:
    """The last line of a terminal or file, which may be unfinished. Methods return what is to be written."""

    def __init__(self) -> None:
        self._unfinished: Stream | None = None
        """The stream whose line or step is the last one, and not ended by a newline."""

    def ended(self, stream: Stream, line: bytes) -> bytes:
        """Show a line or a step of a stream."""
        text = self._continued(stream, line)
        stream.shown = 0
        if text or self._unfinished is stream:
            self._unfinished = None if line.endswith(b"\n") else stream
        return text

    def paused(self, stream: Stream) -> bytes:
        """Show the unfinished line of a stream, without the rest of a character that has not arrived."""
        visible = stream.rest[: _whole_characters(stream.rest)]
        text = self._continued(stream, visible)
        if text:
            stream.shown = len(visible)
            self._unfinished = stream
        return text

    def _continued(self, stream: Stream, line: bytes) -> bytes:
        is_empty = not line.strip(b"\r\n")
        if self._unfinished is stream:
            prefix = b"" if stream.shown or is_empty else stream.prefix
            return prefix + line[stream.shown :]
        if is_empty and not line.endswith(b"\n"):
            return b""  # carriage returns where nothing has been written
        newline = b""
        if self._unfinished is not None:
            self._unfinished.shown = 0
            newline = b"\n"
        return newline + stream.prefix + line


def _whole_characters(text: bytes) -> int:
    """Return the length of a text without the beginning of a character of UTF-8 at its end."""
    for back in range(1, min(4, len(text) + 1)):
        byte = text[-back]
        if byte >= 0xC0:
            size = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(text) - back if back < size else len(text)
        if byte < 0x80:
            break
    return len(text)
