"""The context goes wherever calls made inside it go; answers are recorded in the context of their call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dist_autograd
import rpc
from rpc.errors import AutogradError, ProtocolError
from rpc.runtime.current import current_agent
from rref.requests import FETCH, fetch
from tests.support import default_device
from tests.support.default_device import not_on_devices
from tests.support.serving import WAIT_SECONDS, in_standing_group, open_gate, wait_at_gate

OTHER = "worker1"


def known_context() -> int | None:
    try:
        return dist_autograd.current_context().id
    except AutogradError:
        return None


@rpc.functions.async_execution
def answer_on_another_thread(x: Tensor) -> torch.futures.Future[Tensor]:
    """The future is completed by a thread that is in no context, or in one of its own."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()

    def complete() -> None:
        with dist_autograd.context():
            future.set_result(x * x)

    threading.Thread(target=complete).start()
    return future


@rpc.functions.async_execution
def answer_by_chain(x: Tensor, to: str) -> torch.futures.Future[Tensor]:
    """A callback makes a call of its own, in the context of the first."""
    return rpc.rpc_async(to, torch.mul, args=(x, x)).then(
        lambda future: rpc.rpc_sync(to, torch.mul, args=(future.value(), 3)) / 3
    )


async def answer_by_coroutine(x: Tensor, to: str) -> Tensor:
    product: Tensor = await rpc.rpc_async(to, torch.mul, args=(x, x))
    return product


async def contexts_seen(to: str) -> list[int | None]:
    return [known_context(), await rpc.rpc_async(to, known_context), known_context()]


def nested(to: str, function: Callable[..., Any], *args: Any) -> Any:
    return rpc.rpc_sync(to, function, args=args)


@in_standing_group(world_size=3)
def test_answers_are_recorded_in_the_context_of_their_call() -> None:
    x = torch.arange(1.0, 4.0, requires_grad=True)
    calls: list[tuple[Any, ...]] = [
        # A thread of the callee's own does not wait for the streams of a request.
        *([] if default_device.MODE else [(answer_on_another_thread, (x,))]),
        (answer_by_chain, (x, "worker2")),
        (answer_by_chain, (x, "worker0")),
        (answer_by_coroutine, (x, "worker2")),
        (nested, ("worker2", answer_by_coroutine, x, "worker0")),
    ]
    for function, args in calls:
        for call in (rpc.rpc_sync, lambda *given: rpc.remote(*given).to_here()):
            with dist_autograd.context() as context_id:
                loss = call(OTHER, function, args).sum()
                dist_autograd.backward(context_id, [loss])
                torch.testing.assert_close(dist_autograd.get_gradients(context_id)[x], 2 * x.detach())


@in_standing_group(world_size=3)
def test_the_context_follows_calls_and_ends_with_its_block() -> None:
    assert known_context() is None
    assert rpc.rpc_sync(OTHER, known_context) is None
    with dist_autograd.context() as context_id:
        assert known_context() == context_id
        assert rpc.rpc_sync(OTHER, known_context) == context_id
        assert rpc.rpc_sync("worker0", known_context) == context_id
        assert rpc.rpc_sync(OTHER, nested, args=("worker2", known_context)) == context_id
        assert rpc.rpc_sync(OTHER, contexts_seen, args=("worker2",)) == [context_id] * 3
        assert rpc.remote(OTHER, known_context).to_here() == context_id
        with torch.no_grad():
            assert rpc.rpc_sync(OTHER, known_context) == context_id
    assert known_context() is None
    assert rpc.rpc_sync(OTHER, known_context) is None


@not_on_devices("a backward that begins on a device's thread is refused")
@in_standing_group()
def test_the_context_follows_calls_of_a_backward_within_another() -> None:
    found: list[int | None] = []
    inner, outer = (torch.ones(3, requires_grad=True) for _ in range(2))
    with dist_autograd.context() as context_id:
        loss: Any = (inner * 2).sum()
        product: Any = outer * 2
        loss.register_hook(lambda _: found.append(rpc.rpc_sync(OTHER, known_context)))
        product.register_hook(lambda _: dist_autograd.backward(context_id, [loss]))
        dist_autograd.backward(context_id, [product.sum()])
        assert found == [context_id]
        torch.testing.assert_close(dist_autograd.get_gradients(context_id)[inner], torch.full((3,), 2.0))


@in_standing_group()
def test_a_reply_belongs_to_the_context_of_its_call_whoever_reads_it() -> None:
    """Answers are read by threads in another context, and by threads in none."""
    x = torch.arange(1.0, 4.0, requires_grad=True)
    with dist_autograd.context() as context_id:
        future = rpc.rpc_async(OTHER, torch.mul, args=(x, x))
        products: list[Tensor] = []

        def read() -> None:
            with dist_autograd.context():
                products.append(future.wait())

        thread = threading.Thread(target=read)
        thread.start()
        thread.join(WAIT_SECONDS)
        dist_autograd.backward(context_id, [products[0].sum()])
        torch.testing.assert_close(dist_autograd.get_gradients(context_id)[x], 2 * x.detach())


@in_standing_group()
def test_what_is_fetched_belongs_to_the_graph() -> None:
    rref = rpc.remote(OTHER, torch.ones, args=(3,), kwargs={"requires_grad": True})
    rref.to_here()
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [(rref.to_here() * 5).sum()])
        gradients = list(rpc.rpc_sync(OTHER, dist_autograd.get_gradients, args=(context_id,)).values())
        torch.testing.assert_close(gradients, [torch.full((3,), 5.0)])


@in_standing_group()
def test_fetch_with_a_bad_context_fails_alone() -> None:
    """Two fetch an object that is still being made, one of whom says nonsense about its context."""
    made = rpc.remote(OTHER, wait_at_gate, args=("making", [1, 2]))
    bad = fetch(made._rref)
    bad.header["context"] = "nonsense"
    agent = current_agent()
    call = agent.calls.caller.request(made._owner, FETCH, bad, WAIT_SECONDS, "a fetch")
    rpc.rpc_sync(OTHER, open_gate, args=("making",))
    with pytest.raises(ProtocolError, match="says badly what it is recorded as"):
        call.result()
    found: list[int] = made.to_here(timeout=WAIT_SECONDS)
    assert found == [1, 2]
