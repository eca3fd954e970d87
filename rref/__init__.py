"""Remote references: ``RRef`` and ``remote``."""

from __future__ import annotations

from rpc.agent import Agent
from rpc.serialization import register_carrier
from rref.carrier import RRefCarrier
from rref.reference import EXTENSION, RRef, references
from rref.references import References
from rref.remote import remote

__all__ = ["RRef", "debug_info", "install", "release_all_users", "remote"]


def install(agent: Agent) -> None:
    """Make an agent that has not joined its group yet serve remote references."""
    agent.extensions[EXTENSION] = References(agent)


def debug_info() -> dict[str, int]:
    """How many references are owned, forked and pending on this worker: ``num_owner_rrefs``, ``num_forks``,
    ``num_pending_users`` and ``num_pending_futures``.
    """
    return references().debug_info()


def release_all_users() -> None:
    """Give back every reference that this worker holds to objects of others: they are of no use then."""
    references().release_all()


register_carrier(RRef, RRefCarrier())
