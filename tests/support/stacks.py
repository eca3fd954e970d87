"""What ``faulthandler`` prints, made short: most threads of a worker that hangs are idle, and alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

_HEADS = ("Thread 0x", "Current thread 0x")
_INDENT = "  "
"""Before each frame, and before what else is said of a thread."""
_LEFT_OUT = "Extension modules: "
_FORKED = "/tests/support/fork_server.py"
_STARTED = "/threading.py"

Stack = tuple[str, ...]


def condensed(lines: Iterable[str]) -> list[str]:
    """What a process has printed, with equal stacks shown once, and without what all end with."""
    parts = list(_parts(lines))
    counts = Counter(stack for _, stack in parts if stack)
    short: list[str] = []
    for line, stack in parts:
        alike = counts.pop(stack, 0) if stack else 1
        if alike:
            short += [line if alike == 1 else f"{line} and {alike - 1} more like it", *stack]
    return short


def _parts(lines: Iterable[str]) -> Iterator[tuple[str, Stack]]:
    """Each line with the stack that it is the head of, which is empty for most."""
    head: str | None = None
    frames: list[str] = []
    for line in lines:
        if head is not None and line.startswith(_INDENT):
            frames.append(line)
            continue
        if head is not None:
            yield head, _own(frames)
            head, frames = None, []
        if line.startswith(_HEADS):
            head = line
        elif not line.startswith(_LEFT_OUT):
            yield line, ()
    if head is not None:
        yield head, _own(frames)


def _own(frames: list[str]) -> Stack:
    """The frames of a thread, the innermost first, without those that made the process or the thread."""
    end = next((index for index, frame in enumerate(frames) if _FORKED in frame), len(frames))
    while end > 1 and _STARTED in frames[end - 1]:
        end -= 1
    return tuple(frames[:end])
