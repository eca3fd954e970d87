"""``shutdown``: leave the group, when all work is done or at once."""

from __future__ import annotations

from rpc.agent.interface import AgentInterface
from rpc.runtime.current import current_agent


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
    agent: AgentInterface = current_agent()
    agent.shutdown(graceful, timeout, release_references=release_references, raise_on_leaks=raise_on_leaks)
