"""The process's current agent."""

from __future__ import annotations

import functools
import os
from typing import Any

from rpc.errors import AlreadyInitializedError, ForkedProcessError, NotInitializedError
from rpc.runtime import interrupts
from rpc.runtime.tracebacks import fold_uncaught

agent: Any = None
"""The agent that this process's calls use, or None: an ``Agent``, or one that a registered backend made."""

_forked_from: int | None = None
_inherited: list[Any] = []
"""Agents of this process's ancestors: destroying their loops here would affect resources still used there."""


def current_agent() -> Any:
    """Return ``agent``, if there is one, and defer signals for what it does.

    Raises:
        NotInitializedError: there is none.
        ForkedProcessError: there is none because this process was forked from one that has it.
    """
    if not interrupts.are_wrapped:
        interrupts.ensure_deferred()
    found = agent
    if found is None:
        check_not_forked()
        fold_uncaught()
        raise NotInitializedError(
            "RPC has not been initialized, or is shut down. Call init_rpc first. "
            "(Current RPC agent is not set! Did you initialize the RPC framework?)"
        )
    return found


def extension(name: str) -> Any:
    """Return the current agent's extension with this name.

    Raises:
        NotInitializedError: there is no agent, or it has no such extension.
    """
    try:
        return current_agent().extensions[name]
    except KeyError:
        raise NotInitializedError(
            f"this worker has no extension '{name}'. Extensions are found by the entry points of installed "
            "distributions: install farcall (`pip install .` in its folder) instead of only putting it on "
            "sys.path"
        ) from None


def check_not_forked() -> None:
    """Raise ``ForkedProcessError`` if this process was forked from one that has an agent, and has none."""
    if _forked_from is not None:
        raise ForkedProcessError(
            "RPC has not been initialized in this process: it was forked from process "
            f"{_forked_from}, whose agent stays there. Call init_rpc here, with another name."
        )


def is_initialized() -> bool:
    """Whether this process has an agent."""
    return agent is not None


def set_current_agent(new: Any) -> None:
    """Make an agent the current one. Raises ``AlreadyInitializedError`` if there is one."""
    global agent, _forked_from
    if agent is not None:
        raise AlreadyInitializedError("RPC is already initialized in this process: call shutdown() first")
    _notice_forks()
    agent, _forked_from = new, None


def clear_current_agent(old: Any) -> None:
    """Unset an agent as the current one. If another one is current by now, that stays."""
    global agent
    if agent is old:
        agent = None


def _forked() -> None:
    """Forget the parent's agent, in a child that was just forked."""
    global agent, _forked_from
    if agent is not None:
        inherited, agent, _forked_from = agent, None, os.getppid()
        _inherited.append(inherited)
        if (leave := getattr(inherited, "abandon_after_fork", None)) is not None:
            leave()


@functools.cache
def _notice_forks() -> None:
    os.register_at_fork(after_in_child=_forked)
