"""Adds distributed autograd to an agent."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from dist_autograd import engine
from dist_autograd.api import EXTENSION, Autograd, autograd
from dist_autograd.backward_messages import SentMessages
from dist_autograd.backwards import Backwards
from dist_autograd.contexts import Contexts
from dist_autograd.ddp import Models
from dist_autograd.propagation import Propagation
from dist_autograd.recording import anchor
from dist_autograd.torch_internals import INTERNALS, NO_AUTOGRAD
from rpc.agent.agent import UNSET_TIMEOUT, Agent
from rpc.agent.calls import Caller
from rpc.errors import AutogradError, RRefError, with_article
from rpc.serialization.serializer import Serializer
from rref.installation import install as install_references
from rref.protocol.messages import RRefId
from rref.references import References

__all__ = ["install"]


def _backward_of(calls: Caller, rref: Any, context_id: int, retain_graph: bool) -> None:
    """See ``RRef.backward``."""
    if rref.is_owner():
        backward_here(rref, context_id, retain_graph)
        return
    if context_id == -1:
        raise AutogradError(
            f"User RRefs require 'dist_autograd_ctx_id' to be specified: {rref} refers to an object of "
            f"worker '{rref.owner_name()}'; pass the id of the context that its tensor was computed in"
        )
    call = calls.call(rref.owner(), backward_here, (rref, context_id, retain_graph), {}, UNSET_TIMEOUT)
    call.result()


def backward_here(rref: Any, context_id: int, retain_graph: bool) -> None:
    """Start a backward pass at an object of this worker."""
    root = rref.local_value()
    if not isinstance(root, Tensor):
        raise RRefError(
            f"RRef should contain a tensor for .backward(), and {rref} refers to {with_article(type(root))}"
        )
    if context_id == -1:
        torch.autograd.backward((root,), retain_graph=retain_graph)
    else:
        autograd().backwards.run(context_id, [root], retain_graph)


def _perform_step(references: References, serializer: Serializer, rref: RRefId, context_id: int) -> bool:
    """Call the ``step`` of an optimizer of this worker, as other workers may do through a reference.

    Returns:
        False if the optimizer must wait for the end of the backward, so that it has not been called.
    """
    value = references.value(rref)
    if value.turns is not None or not value.is_ready:
        why = "is still being made" if value.turns is None else "was made with concurrency="
        raise AutogradError(
            f"the optimizer RRef({references.id_text(rref)}) {why}, so it cannot step at the end of a "
            "worker's part of a backward: call backward, and then step"
        )
    optimizer = value.get()
    if serializer.allow is not None:
        serializer.allow.check_method(optimizer, "step")
    if getattr(optimizer, "waits_for_backward", False):
        return False
    optimizer.step(context_id)
    return True


def install(agent: Agent) -> None:
    """Add distributed autograd to an agent that has not joined its group yet."""
    INTERNALS.check()
    if INTERNALS.is_missing(NO_AUTOGRAD):
        return
    engine.prepare()
    anchor()  # before several threads ask for it, each of which might make one
    agent.serializer.allow_function(backward_here)
    calls, workers, messages = agent.calls, agent.group.peers, agent.messages
    hooks, executor = agent.lifecycle.hooks, agent.executor
    models, references = Models(), install_references(agent)
    contexts = Contexts(
        agent.incarnation, calls.requests, workers, messages, hooks, agent.mailbox, executor, models.watch
    )
    backwards = Backwards(
        calls.answers,
        workers,
        SentMessages(calls.caller, calls.table, messages.sender, agent.serializer),
        agent.lifecycle.activity,
        agent.serializer,
        executor,
        contexts,
        models,
        partial(_perform_step, references, agent.serializer),
    )
    backwards.register(messages, hooks)
    hooks.closed.append(models.stop)
    agent.tracing.follow(Propagation(contexts))
    agent.extensions[EXTENSION] = Autograd(models, contexts, backwards)
    references.backward = partial(_backward_of, calls.caller)
