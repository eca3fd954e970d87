"""What an agent tells about itself."""

from __future__ import annotations

from rpc.runtime.current import current_agent

__all__ = ["get_debug_info"]


def get_debug_info() -> dict[str, int]:
    """Counts of what there is right now, by name.

    Keys that begin with ``agent.`` tell of threads, tasks, calls and messages; the others, from ``rref``, of
    references: ``num_owner_rrefs`` (objects of this worker that others refer to), ``num_forks`` (their
    references to them), ``num_pending_users`` (references on their way), ``num_pending_futures`` (objects
    still being made elsewhere); and, from ``dist_autograd``, ``num_autograd_contexts`` (contexts that this
    worker knows) and ``num_current_backward_passes`` (backwards in which it takes part).

    Example::

        rpc.get_debug_info()["agent.pending_calls"]
    """
    agent = current_agent()
    info: dict[str, int] = dict(agent.get_debug_info())
    for extension in getattr(agent, "extensions", {}).values():
        describe = getattr(extension, "debug_info", None)
        if describe is not None:
            info |= describe()
    return info
