"""A context is over on all workers, however it is left."""

from __future__ import annotations

import threading

import torch

import dist_autograd
import rpc
from dist_autograd.contexts import Context
from rpc.group.peer import Peer
from tests.group.dist_autograd.test_faults import wait_until_nothing_is_left
from tests.support.serving import in_standing_group

OTHER = "worker1"


@in_standing_group()
def test_a_context_that_is_left_on_another_thread_is_released() -> None:
    entered = dist_autograd.context()
    context_id = entered.__enter__()
    rpc.rpc_sync(OTHER, torch.mul, args=(torch.ones(1, requires_grad=True), 2))
    errors: list[ValueError] = []

    def leave() -> None:
        try:
            entered.__exit__(None, None, None)
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert errors
    assert not dist_autograd.has_context(context_id)
    wait_until_nothing_is_left(OTHER)


class OverWhenTold(set[Peer]):
    """Whom a context has told, when it ends on another thread right as the next is to be told."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context

    def add(self, peer: Peer) -> None:
        self._context.contexts.release(self._context)
        super().add(peer)


@in_standing_group()
def test_a_call_made_while_its_context_ends_does_not_bring_it_to_a_worker_for_good() -> None:
    with dist_autograd.context():
        context = dist_autograd.current_context()
        context.told = OverWhenTold(context)
        assert rpc.rpc_sync(OTHER, torch.add, args=(torch.ones(1), 1)).item() == 2
        wait_until_nothing_is_left(OTHER)
