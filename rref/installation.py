"""Adds remote references to an agent."""

from __future__ import annotations

from functools import partial

from rpc.agent.agent import Agent
from rref import names
from rref.carrier import RRefCarrier
from rref.creation import created_and_fetched
from rref.delayed_answers import DelayedAnswers
from rref.names import Names
from rref.reference import EXTENSION, RRef
from rref.reference_server import ReferenceServer
from rref.references import References
from rref.remote_module.module import RemoteModule, reduce_remote_module
from rref.requests import FETCHED
from rref.torch_internals import INTERNALS

__all__ = ["install"]


def install(agent: Agent) -> References:
    """Add remote references to an agent that has not joined its group yet, unless they were added before.

    Returns:
        The agent's references.
    """
    if EXTENSION in agent.extensions:
        installed: References = agent.extensions[EXTENSION]
        return installed
    INTERNALS.check()
    agent.serializer.register_reducer(RemoteModule, reduce_remote_module)
    hooks = agent.lifecycle.hooks
    references = References(
        agent.incarnation,
        agent.calls,
        agent.group.peers,
        agent.messages.control,
        agent.group.lose,
        hooks,
        agent.mailbox,
        agent.executor,
    )
    agent.extensions[EXTENSION] = references
    agent.serializer.register_carrier(RRef, RRefCarrier(references))
    named = agent.extensions[names.EXTENSION] = Names(references, agent.serializer, hooks)
    server = ReferenceServer(
        references,
        named,
        agent.calls,
        agent.messages,
        agent.lifecycle.activity,
        agent.executor,
        agent.serializer,
        agent.tracing.recording_of,
        DelayedAnswers(agent.mailbox, hooks),
    )
    hooks.gone.append(server.peer_gone)
    agent.messages.on(FETCHED, partial(created_and_fetched, agent.calls.table), any_thread=True)
    return references
