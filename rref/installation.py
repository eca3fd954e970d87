"""Makes an agent serve remote references."""

from __future__ import annotations

from rpc.agent.agent import Agent
from rpc.serialization import register_carrier, register_reducer
from rref.carrier import RRefCarrier
from rref.reference import EXTENSION, RRef
from rref.references import References
from rref.remote_module.module import RemoteModule, reduce_remote_module
from rref.serving import Server

__all__ = ["install"]

_carrier = RRefCarrier()


def install(agent: Agent) -> None:
    """Make an agent that has not joined its group yet serve remote references."""
    register_carrier(RRef, _carrier)
    register_reducer(RemoteModule, reduce_remote_module)
    agent.extensions[EXTENSION] = references = References(agent)
    Server(agent, references)
