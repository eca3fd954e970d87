"""What can go wrong in a context or a backward: bad input, errors on any worker, deaths, and what is left."""

from __future__ import annotations

import functools
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dist_autograd
import rpc
from dist_autograd.backward_messages import GRADIENTS
from rpc.errors import AutogradError, BackwardError, NotInitializedError, WorkerLostError
from rpc.runtime.current import current_agent
from rpc.testing.faults import Faults, Rule
from tests.fuzz.autograd.guarded import apply_guarded
from tests.support.default_device import not_on_devices
from tests.support.serving import WAIT_SECONDS, in_group, in_worker0, open_gate, serve
from tests.support.streams import until
from tests.support.workers import RunWorkers, Task, Worker

OTHER = "worker1"


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise LookupError("no gradient today")


apply_failing: Callable[[Tensor], Tensor] = Failing.apply


def guarded(x: Tensor) -> Tensor:
    return apply_guarded(x)


def failing(x: Tensor) -> Tensor:
    return apply_failing(x)


def through(worker: str, function: Any, x: Tensor) -> Any:
    return rpc.rpc_sync(worker, function, args=(x,))


def counts() -> dict[str, int]:
    return dist_autograd.debug_info()


def wait_until_nothing_is_left(worker: str) -> None:
    """Waits until a worker knows no context and takes part in no backward."""
    until(lambda: not any(rpc.rpc_sync(worker, counts).values()))


# ---- bad input


@in_worker0(world_size=1)
def test_bad_input_is_refused_with_what_to_do() -> None:
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(AutogradError, match="Could not find autograd context with id: 7 on worker 'worker0'"):
        dist_autograd.backward(7, [x.sum()])
    with pytest.raises(AutogradError, match="Could not find autograd context"):
        dist_autograd.get_gradients(7)
    with dist_autograd.context() as context_id:
        assert dist_autograd.has_context(context_id)
        for roots, text in (
            ([], "No tensors provided"),
            ([x.detach().sum()], "requires_grad not set on root 0"),
            ([x.sum(), x * 2], "root 1, of shape .3,., is not a scalar"),
            ([torch.ones(1, requires_grad=True)], "does not have a valid gradient function"),
        ):
            with pytest.raises(AutogradError, match=text):
                dist_autograd.backward(context_id, roots)
        for wrong in (None, x.sum(), ["text"]):
            with pytest.raises(TypeError, match="incompatible function arguments"):
                dist_autograd.backward(context_id, wrong)  # type: ignore[arg-type]
        with pytest.raises(AutogradError, match="Already have an autograd context id for this thread"):
            dist_autograd.context().__enter__()
    assert not dist_autograd.has_context(context_id)
    with pytest.raises(AutogradError, match=f"Could not find autograd context with id: {context_id}"):
        dist_autograd.backward(context_id, [x.sum()])


def test_there_is_no_context_without_an_agent() -> None:
    with pytest.raises(NotInitializedError), dist_autograd.context():
        pass


@in_worker0()
def test_a_graph_of_another_context_or_a_local_backward_is_refused() -> None:
    x = torch.ones(3, requires_grad=True)
    with dist_autograd.context() as first:
        y = rpc.rpc_sync(OTHER, torch.mul, args=(x, 2))
    with dist_autograd.context() as second:
        with pytest.raises(AutogradError, match=f"received from worker 'worker1' in context {first}"):
            dist_autograd.backward(second, [y.sum()])
        with pytest.raises(AutogradError, match=r"goes on at worker 'worker1'.*dist_autograd.backward"):
            y.sum().backward()  # type: ignore[no-untyped-call]


# ---- errors


def fail_at(worker: str, x: Tensor) -> Any:
    if worker == "worker0":
        return rpc.rpc_sync(OTHER, torch.mul, args=(failing(x), 2))
    return rpc.rpc_sync(OTHER, through, args=("worker2", failing, x))


@in_worker0(world_size=3)
def test_an_error_on_any_worker_is_raised_at_the_root_and_names_it() -> None:
    x = torch.ones(3, requires_grad=True)
    for worker in ("worker0", "worker2"):
        with dist_autograd.context() as context_id:
            loss = fail_at(worker, x).sum()
            with pytest.raises(BackwardError, match=f"no gradient today.*\n.*worker '{worker}'") as caught:
                dist_autograd.backward(context_id, [loss])
            assert caught.value.worker == worker
            cause = caught.value.__cause__
            assert isinstance(cause, LookupError)
            if worker != "worker0":
                assert "in backward" in "".join(traceback.format_exception(cause))  # the remote traceback
            again = rpc.rpc_sync(OTHER, torch.mul, args=(x, 3))
            dist_autograd.backward(context_id, [again.sum()])
            torch.testing.assert_close(dist_autograd.get_gradients(context_id)[x], torch.full((3,), 3.0))
    for worker in ("worker0", "worker1", "worker2"):
        wait_until_nothing_is_left(worker)


# ---- deaths


def _leaving(task: Any) -> Any:
    """``task`` in the group, which is left at once."""

    def run(worker: Worker) -> None:
        worker.join()
        try:
            task(worker)
        finally:
            rpc.shutdown(graceful=False)

    return run


def make_a_context_and_die(worker: Worker) -> None:
    x = torch.ones(3, requires_grad=True)
    with dist_autograd.context():
        rpc.rpc_sync(OTHER, through, args=("worker2", torch.exp, x))
        worker.die()


def know_no_context_once_its_maker_is_dead(worker: Worker) -> None:
    worker.wait_for("dead")
    while any(counts().values()):  # the time limit of the test ends it
        rpc.rpc_sync(worker.name, counts)


def test_contexts_of_a_dead_worker_are_released_everywhere(run_workers: RunWorkers) -> None:
    others = [_leaving(know_no_context_once_its_maker_is_dead)] * 2
    workers = run_workers.start([_leaving(make_a_context_and_die), *others], 3)
    workers[0].result()
    for worker in (workers[1], workers[2]):
        worker.tell("dead")
        worker.result()


dropping: list[tuple[Faults, Rule]] = []


def drop_gradients(to: str) -> None:
    faults = Faults()
    dropping.append((faults, faults.drop(GRADIENTS, to=to)))
    faults.install(current_agent())


def lose_once_dropped(worker: str) -> bool:
    """Give a worker up if gradients for it were dropped; returns whether they were."""
    ((faults, rule),) = dropping
    if not rule.struck:
        return False
    faults.remove()
    agent = current_agent()
    agent.group.lose(agent.group.peers.find(worker), "gradients for it were lost, as a test wants it")
    dropping.clear()
    return True


@in_worker0(world_size=3)
def test_a_backward_ends_if_gradients_are_lost_whose_sender_has_done_its_part() -> None:
    """For the root, the sender lives, and so does the worker that waits."""
    x = torch.ones(3, requires_grad=True)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with dist_autograd.context() as context_id:
                y = rpc.rpc_sync(OTHER, through, args=("worker2", torch.exp, x))
                dist_autograd.backward(context_id, [y.sum()])
        except WorkerLostError as error:
            errors.append(error)

    rpc.rpc_sync("worker2", drop_gradients, args=(OTHER,))
    thread = threading.Thread(target=run)
    thread.start()
    while not rpc.rpc_sync("worker2", lose_once_dropped, args=(OTHER,)):  # the limit of the test ends it
        pass
    thread.join(WAIT_SECONDS)
    assert "has not sent its gradients" in str(errors[0])
    for worker in ("worker0", OTHER, "worker2"):
        wait_until_nothing_is_left(worker)


# ---- many at once


def run_three_at_once(worker: Worker) -> None:
    """Three contexts, whose backwards are all at the gate of the other worker before one may end."""
    results: dict[int, Tensor] = {}

    def train(number: int) -> None:
        x = torch.full((3,), float(number), requires_grad=True)
        with dist_autograd.context() as context_id:
            loss = (rpc.rpc_sync(OTHER, guarded, args=(x * x,)) * number).sum()
            dist_autograd.backward(context_id, [loss])
            results[number] = dist_autograd.get_gradients(context_id)[x]

    threads = [threading.Thread(target=train, args=(number,)) for number in (1, 2, 3)]
    for thread in threads:
        thread.start()
    worker.wait_for("open")
    assert rpc.rpc_sync(OTHER, counts)["num_current_backward_passes"] == 3
    rpc.rpc_sync(OTHER, open_gate, args=("backward",))
    for thread in threads:
        thread.join(WAIT_SECONDS)
    for number in (1, 2, 3):
        torch.testing.assert_close(results[number], torch.full((3,), 2.0 * number * number))


@not_on_devices("PyTorch has one thread for the backwards of a device, and here a hook blocks it")
def test_three_backwards_of_different_contexts_run_side_by_side(run_workers: RunWorkers) -> None:
    tasks: list[Task] = [in_group(run_three_at_once), functools.partial(serve, num_worker_threads=1)]
    workers = run_workers.start(tasks, 2)
    for _ in range(3):
        workers[1].wait_for("at the gate")
    workers[0].tell("open")
    workers.results()


def leave_during_backward(worker: Worker) -> None:
    x = torch.ones(3, requires_grad=True)
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync(OTHER, guarded, args=(x,)).sum()
        errors: list[BaseException] = []

        def run() -> None:
            try:
                dist_autograd.backward(context_id, [loss])
            except AutogradError as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        worker.wait_for("leave")
    thread.join(WAIT_SECONDS)
    assert "was left during its backward" in str(errors[0])
    rpc.rpc_sync(OTHER, open_gate, args=("backward",))
    wait_until_nothing_is_left(OTHER)


def test_leaving_a_context_ends_its_backwards(run_workers: RunWorkers) -> None:
    workers = run_workers.start([in_group(leave_during_backward), serve], 2)
    workers[1].wait_for("at the gate")
    workers[0].tell("leave")
    workers.results()


def lack_threads() -> None:
    """Let this process start no more threads."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threading.Thread.start = start  # type: ignore[method-assign]


def double(x: Tensor) -> Tensor:
    return x * 2


@in_worker0()
def test_worker_that_gets_no_thread_for_its_part_says_so_and_cuts_off_nobody() -> None:
    rpc.rpc_sync(OTHER, lack_threads)
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context:
        y = through(OTHER, double, x) + through(OTHER, double, x)  # two messages, so that its part waits
        with pytest.raises(BackwardError, match="worker 'worker1' has no thread for its part"):
            dist_autograd.backward(context, [y.sum()])
    assert through(OTHER, double, x.detach()).tolist() == [2.0, 2.0]
    wait_until_nothing_is_left(OTHER)
