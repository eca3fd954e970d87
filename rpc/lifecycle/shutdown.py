"""``shutdown``: leave the group, when all work is done or at once."""

from __future__ import annotations

from rpc.agent.agent import Agent
from rpc.errors import RpcError
from rpc.runtime.blocking import check_may_block
from rpc.runtime.current import clear_current_agent, current_agent

__all__ = ["shutdown"]


def shutdown(
    graceful: bool = True,
    timeout: float = 0.0,
    *,
    release_references: bool = True,
    raise_on_leaks: bool = False,
) -> None:
    """Leave the group and end this process's agent.

    Args:
        graceful: wait first: in a static group until all workers have called ``shutdown`` and no call is
            under way anywhere, calls made by calls included; in a dynamic one until this worker's own work
            is done. Otherwise leave at once; calls under way fail, here and at the other workers. A call that
            has timed out, or that nobody waits for any more, counts as under way until its callee has ended.
            A worker that has died, or whose program has ended, is not waited for, and is no error here: calls
            to it raise ``WorkerLostError``, and if it died or crashed, the log has a warning that names it.
        timeout: seconds to wait for that; 0 for no limit: then a callee that never ends keeps all here.
        release_references: give back all references to objects of others before leaving, so that their
            owners free them.
        raise_on_leaks: raise if others still hold references to objects of this worker at the end.

    Raises:
        NotInitializedError: there is no agent.
        RpcError: another thread is waiting in ``shutdown`` already, or a callee called it gracefully.
        RpcTimeoutError: not all work ended in time; names who is not in shutdown or still busy. This worker
            has left all the same.
        RRefError: others hold references, if asked to raise. This worker has left all the same.

    Example::

        rpc.init_rpc("worker0", rank=0, world_size=2)
        ...
        rpc.shutdown()
    """
    agent = current_agent()
    if not isinstance(agent, Agent):
        clear_current_agent(agent)
        leave = getattr(agent, "shutdown", None)  # made by a registered backend
        if leave is not None:
            leave()
        return
    if graceful:
        check_may_block()
        if agent.executor.owns_current_thread():
            raise RpcError("a callee cannot shut down gracefully: it would wait for its own call to end")
    timeout = agent.caller.effective_timeout(timeout)
    references = agent.extensions["rref"]
    departure = agent.departure
    left_to_another = False
    try:
        if graceful:
            left_to_another = not departure.claim()
            if left_to_another:
                raise RpcError(f"worker '{agent.info.name}' is being shut down by another thread already")
            departure.wait(timeout)
            if release_references:
                references.release_all()
            departure.wait(timeout)
            try:
                if raise_on_leaks:
                    references.check_leaks()
            finally:
                departure.wait(timeout)
    finally:
        if not left_to_another:
            references.released = True
            clear_current_agent(agent)
            agent.close("it has shut down" if graceful else "it has shut down without waiting")
