"""What members of an elastic job ask of each other: methods of the other's ``Views``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

from rpc.errors import GivenUpError
from rpc.runtime.current import current_agent

__all__ = ["EXTENSION", "ask", "ask_for_entry"]

EXTENSION: Final = "spmd.elastic"
"""The agent's extension that answers: a ``Views``."""


def ask(to: int, method: Callable[..., Any], *args: Any) -> Any:
    """Call a method of the member with this incarnation. Called on its worker.

    Raises:
        GivenUpError: it has left, or its worker is another one.
    """
    agent: Any = current_agent()
    views = agent.extensions.get(EXTENSION)
    if views is None or to != views.me:
        raise GivenUpError(f"there is no member of this job in process {os.getpid()}")
    return method(views, *args)


def ask_for_entry(
    incarnation: int, key: tuple[int, int], description: str, replica: tuple[int, ...]
) -> tuple[Any, int, tuple[int, int], tuple[int, ...]]:
    """Return what this worker answers to a newcomer: its status, incarnation, key and replica."""
    agent: Any = current_agent()
    views = agent.extensions.get(EXTENSION)
    if views is None:
        return None, 0, (0, 0), ()
    return views.greeted(incarnation, key, description, tuple(replica))  # type: ignore[no-any-return]
