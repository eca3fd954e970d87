"""``shutdown``: leave the group, after all work everywhere is done or at once."""

from __future__ import annotations

import time

from rpc.agent import Agent
from rpc.api import all_gather
from rpc.current import clear_current_agent, current_agent

__all__ = ["shutdown"]


def shutdown(graceful: bool = True, timeout: float = 0.0) -> None:
    agent = current_agent()
    if not isinstance(agent, Agent):
        clear_current_agent()
        return
    try:
        if graceful and agent.is_static_group:
            while not agent.is_idle():
                time.sleep(0.002)
            all_gather(None, timeout=timeout)
            agent.extensions["rref"].release_all()
            agent.extensions["rref"].wait_released(2)
            all_gather(None, timeout=timeout)
    finally:
        clear_current_agent()
        agent.close("it has shut down")
