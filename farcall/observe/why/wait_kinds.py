"""Kinds of waits, and descriptions of connections and rendezvous that are waited for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from farcall.observe.reading.state import whole

__all__ = ["kind_of_wait", "link_in_words", "listed", "missing_ranks", "rendezvous_in_words"]

_MAX_RANKS: Final = 1 << 16
"""Maximum size of a group whose missing ranks are listed."""

_KINDS: Final = (
    ("sleeps", "sleeps"),
    ("computes", "computes"),
    ("subprocess", "subprocess"),
    ("socket", "socket"),
    ("pipe", "pipe"),
    ("queue", "queue"),
    ("Event", "event"),
    ("Condition", "condition"),
    ("semaphore", "semaphore"),
    ("Barrier", "thread barrier"),
    ("thread to end", "join"),
    ("with block", "lock"),
    ("lock", "lock"),
    ("file", "file"),
)
"""Parts of the texts of waits, each with the kind of wait that it shows; the first that matches counts."""


def kind_of_wait(doing: str, type_name: str = "") -> str:
    """Return the kind of a wait, from the text for it and the type of the object that is waited for."""
    for part, kind in (
        ("queue.", "queue"),
        ("Queue", "queue"),
        ("threading.Event", "event"),
        ("socket.", "socket"),
        ("subprocess.", "subprocess"),
        ("_thread.", "lock"),
        ("Lock", "lock"),
        ("threading.Condition", "condition"),
    ):
        if part in type_name:
            return kind
    return next((kind for part, kind in _KINDS if part in doing), "runs")


def link_in_words(peer: Mapping[str, Any]) -> str:
    """Describe a connection that is not established, by its entry in the state of the waiting worker."""
    state = str(peer.get("state"))
    name = peer.get("name")
    if state == "LOST":
        return f"{name} is lost: {peer.get('lost', '')}"
    if state in ("HANDSHAKING", "CROSSED"):
        return f"the connection to {name} is being made again, and {name} has not answered the handshake yet"
    tries = whole(peer.get("failures"))
    return f"the connection to {name} is down; {tries} attempts to make it again have failed so far"


def missing_ranks(details: Mapping[str, Any]) -> list[int]:
    """Return the ranks that have not arrived at a rendezvous, in order."""
    present = details.get("present")
    here = {each for each in present if isinstance(each, int)} if isinstance(present, list) else set()
    size = min(whole(details.get("world_size")), _MAX_RANKS)
    return sorted(set(range(size)) - here)


def rendezvous_in_words(details: Mapping[str, Any]) -> str:
    """Describe which ranks have arrived at a rendezvous and which are missing; "" if that is not known."""
    size, missing = whole(details.get("world_size")), missing_ranks(details)
    if not size:
        return ""
    shown = ", ".join(map(str, missing[:10])) + (" ..." if len(missing) > 10 else "")
    return f"{size - len(missing)} of {size} ranks have come to {details.get('place', '')}; missing: {shown}"


def listed(names: list[str]) -> str:
    """Join names, at most four."""
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"
