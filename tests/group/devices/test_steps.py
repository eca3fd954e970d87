"""What comes after an optimizer's step sees it, on any stream: requests, answers, backwards, callbacks."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn, optim

from dist_autograd import backward, context, get_gradients
from dist_optim import DistributedOptimizer
from dist_optim.local_optimizer import LocalOptimizer
from farcall import rpc
from rref.remote_module import RemoteModule
from tests.support.device_groups import in_device_group
from tests.support.devices import (
    FIRST,
    SIZE,
    LateSGD,
    device_kind,
    is_all,
    mode,
    seen,
    sleep,
)
from tests.support.streams import until

__all__ = ["device_kind", "mode"]


_kept: list[nn.Parameter] = []
"""A parameter that this worker's functions and threads find by themselves."""


def keep() -> rpc.RRef[Tensor]:
    _kept.append(nn.Parameter(torch.full((SIZE,), 3.0, device=FIRST)))
    torch.accelerator.synchronize(0)  # other requests do not know that this one has made it
    return rpc.RRef(_kept[0])


def multiplied_by_kept(tensor: Tensor) -> Tensor:
    return _kept[0] * tensor


def step_on(parameter: rpc.RRef[Tensor]) -> str:
    """Subtracts 1 from a parameter of another worker, by a step that this worker commands."""
    optimizer = DistributedOptimizer(LateSGD, [parameter], lr=1.0)
    with context() as number:
        ones = torch.ones(SIZE, device=FIRST)
        product = rpc.rpc_sync(parameter.owner(), multiplied_by_kept, args=(ones,))
        backward(number, [product.sum()])
        optimizer.step(number)
    return "stepped"


def ask_for_steps(parameter: rpc.RRef[Tensor]) -> list[bool]:
    """Whether the parameter's owner sees the steps that calls have made, however it waits for them."""
    found: list[bool] = []

    def call() -> rpc.Future[str]:
        return rpc.rpc_async("worker2", step_on, args=(parameter,))

    def look(value: float) -> None:
        found.append(is_all(_kept[0], value))

    with torch.Stream(device=FIRST):
        rpc.rpc_sync("worker2", step_on, args=(parameter,))
        look(2.0)
    future = call()
    with torch.Stream(device=FIRST):
        future.wait()
        look(1.0)
    done = threading.Event()
    future = call()
    future.add_done_callback(lambda _: look(0.0))
    future.add_done_callback(lambda _: done.set())
    done.wait(20)
    call().then(lambda _: look(-1.0)).wait()
    made = rpc.remote("worker2", step_on, args=(parameter,))
    with torch.Stream(device=FIRST):
        made.to_here()
        look(-2.0)
    return found


async def await_steps(parameter: rpc.RRef[Tensor]) -> list[bool]:
    found: list[bool] = []
    for value in (-3.0, -4.0):
        await rpc.rpc_async("worker2", step_on, args=(parameter,))
        found.append(is_all(_kept[0], value))
    return found


@in_device_group(3)
def test_what_comes_after_an_answer_sees_the_steps_of_its_call() -> None:
    parameter = keep()
    found = ask_for_steps(parameter)
    assert found + rpc.rpc_sync("worker0", await_steps, args=(parameter,)) == [True] * 7


_stepped = threading.Event()


def report_step() -> None:
    _stepped.set()


def step_and_report(parameter: rpc.RRef[Tensor]) -> None:
    step_on(parameter)
    rpc.rpc_sync(parameter.owner(), report_step)


@in_device_group(3)
def test_a_reference_shows_the_steps_on_its_value() -> None:
    parameter = keep()
    parameter.local_value()  # waits for the making
    future = rpc.rpc_async("worker2", step_and_report, args=(parameter,))
    assert _stepped.wait(20)  # on this thread, no answer has come
    with torch.Stream(device=FIRST):
        assert is_all(parameter.local_value(), 2.0)
    future.wait()


def see_kept(value: float) -> bool:
    return is_all(_kept[0], value)


@in_device_group()
def test_a_step_without_a_request_is_seen_by_requests() -> None:
    parameter = keep().local_value()
    optimizer = LocalOptimizer(LateSGD, [parameter], (), {"lr": 1.0})
    with context() as number:
        backward(number, [parameter.sum()])
        optimizer.step(number)
        assert rpc.rpc_sync("worker0", see_kept, args=(2.0,))


class Product(nn.Module):
    """The gradient of the first parameter needs the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.full((SIZE,), 2.0))
        self.second = nn.Parameter(torch.full((SIZE,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.first * x * self.second


def step_with(module: Callable[[Tensor], Tensor], optimizer: DistributedOptimizer) -> None:
    with context() as number:
        backward(number, [module(torch.ones(SIZE, device=FIRST)).sum()])
        optimizer.step(number)


def train_around_a_step(module: Any, parameters: list[rpc.RRef[nn.Parameter]]) -> dict[Tensor, Tensor]:
    """A backward that begins after another trainer's step has returned, which its forward has not seen.

    Returns:
        The gradients on this worker, by the second parameter as the backward has found it, and by the product
        of the forward; they are looked at before anything else waits for them.
    """
    optimizer = DistributedOptimizer(LateSGD, parameters, lr=1.0)
    with context() as number:
        loss = module(torch.ones(SIZE, device=FIRST)).sum()
        other = threading.Thread(target=step_with, args=(module, optimizer))  # (2, 3) becomes (-1, 1)
        other.start()
        other.join()
        backward(number, [loss])
        gradients = get_gradients(number)
        for gradient in gradients.values():
            seen(gradient)
        optimizer.step(number)
    return gradients


@in_device_group()
def test_a_backward_goes_on_with_the_parameters_of_a_step() -> None:
    remote = RemoteModule(f"worker1/{FIRST}", Product)
    here = Product().to(FIRST)
    stream = torch.Stream(device=FIRST)  # steps of other threads are on another one
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        train_around_a_step(remote, remote.remote_parameters())
        gradients = train_around_a_step(here, [rpc.RRef(each) for each in here.parameters()])
        assert is_all(gradients[here.first], 1.0)
        assert is_all(gradients[here.second], 2.0)
        for references in (remote.remote_parameters(), [rpc.RRef(each) for each in here.parameters()]):
            assert is_all(references[0].to_here(), -2.0)
            assert is_all(references[1].to_here(), -1.0)


class StepInBackward(torch.autograd.Function):
    """Its backward has another worker make a step on a parameter of a third one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: rpc.RRef[Tensor]) -> Tensor:
        ctx.parameter = parameter
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        rpc.rpc_sync("worker0", step_on, args=(ctx.parameter,))
        return gradients[0], None


def stepping_in_backward(x: Tensor, parameter: rpc.RRef[Tensor]) -> Tensor:
    result: Tensor = StepInBackward.apply(x, parameter)  # type: ignore[no-untyped-call]  # untyped in torch
    return result


_product: list[Tensor] = []
"""A tensor of this worker's part of the graph, of which two messages are made."""


def product_with_kept(x: Tensor) -> Tensor:
    _product.append(multiplied_by_kept(x))
    return _product[0]


def multiplied_by_product(x: Tensor) -> Tensor:
    return _product[0] * x


@in_device_group(3)
def test_gradients_that_come_after_a_step_meet_its_parameters() -> None:
    parameter = rpc.rpc_sync("worker1", keep)
    x = torch.ones(SIZE, device=FIRST, requires_grad=True)
    with context() as number:
        product = rpc.rpc_sync("worker1", product_with_kept, args=(x,))
        same = rpc.rpc_sync("worker2", stepping_in_backward, args=(product, parameter))
        square = rpc.rpc_sync("worker1", multiplied_by_product, args=(same,))
        backward(number, [square.sum()])
        assert is_all(get_gradients(number)[x], 2.0 * (3 + 3))  # by the parameter, which was 3 before


_both_step = threading.Event()


def _threads_in(function: Callable[..., Any]) -> int:
    """The number of threads that run a function."""
    stacks = [traceback.walk_stack(frame) for frame in sys._current_frames().values()]
    return sum(any(frame.f_code is function.__code__ for frame, _ in stack) for stack in stacks)


class Summing(optim.Optimizer):
    """Subtracts the sum of all gradients so far, which each step replaces. The first step waits for another
    one to be asked for.
    """

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        until(lambda: _both_step.is_set() or _threads_in(LocalOptimizer.step) == 2)
        _both_step.set()
        sleep(FIRST)
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["sum"] = state.get("sum", 0.0) + parameter.grad
            parameter.sub_(state["sum"])


@in_device_group(mode="eager")
def test_what_a_step_keeps_is_kept_until_the_next_one_that_waits_has_used_it() -> None:
    parameter = rpc.rpc_sync("worker1", keep)
    optimizer = DistributedOptimizer(Summing, [parameter])
    all_step = threading.Barrier(2)

    def train() -> None:
        with context() as number:
            ones = torch.ones(SIZE, device=FIRST)
            backward(number, [rpc.rpc_sync("worker1", multiplied_by_kept, args=(ones,)).sum()])
            all_step.wait()
            optimizer.step(number)

    with ThreadPoolExecutor(2) as trainers:
        for trained in [trainers.submit(train) for _ in range(2)]:
            trained.result()
    assert is_all(parameter.to_here(), 3.0 - 1.0 - 2.0)


class LateLinearLR(optim.lr_scheduler.LinearLR):
    """Changes the learning rate late: when it is made, in steps, and when a state is loaded."""

    def step(self, epoch: int | None = None) -> None:
        sleep(FIRST)
        super().step(epoch)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        sleep(FIRST)
        super().load_state_dict(state)
        self.optimizer.param_groups[0]["lr"].copy_(self.base_lrs[0])


@in_device_group()
def test_a_step_has_the_learning_rate_of_the_scheduler() -> None:
    parameter = rpc.rpc_sync("worker1", keep)
    rate = torch.ones((), device=FIRST)
    optimizer = DistributedOptimizer(optim.SGD, [parameter], lr=rate, foreach=False)

    def step_to(value: float) -> None:
        with context() as number:
            ones = torch.ones(SIZE, device=FIRST)
            backward(number, [rpc.rpc_sync("worker1", multiplied_by_kept, args=(ones,)).sum()])
            optimizer.step(number)
        assert is_all(parameter.to_here(), value)

    scheduler = optimizer.lr_scheduler(LateLinearLR, start_factor=0.5, total_iters=2)
    step_to(2.5)
    scheduler.step()
    step_to(1.75)
    scheduler.load_state_dict(scheduler.state_dict())
    step_to(0.75)


_locked = threading.Semaphore(0)


def until_locked() -> None:
    assert _locked.acquire(timeout=20)


class Awaited(LateSGD):
    """Its first step and its loading are in progress until another thread waits for their end."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.state:
            _locked.release()
            until(lambda: _threads_in(LocalOptimizer.state_dict) == 1)
        super().step(closure)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _locked.release()
        until(lambda: _threads_in(LocalOptimizer.step) == 1)
        sleep(FIRST)
        super().load_state_dict(state)


@in_device_group()
def test_a_state_is_taken_and_loaded_between_two_steps() -> None:
    parameter = rpc.rpc_sync("worker1", keep)
    optimizer = DistributedOptimizer(Awaited, [parameter], lr=1.0, momentum=0.5)
    with ThreadPoolExecutor(1) as other, context() as number:
        ones = torch.ones(SIZE, device=FIRST)
        backward(number, [rpc.rpc_sync("worker1", multiplied_by_kept, args=(ones,)).sum()])
        stepping = other.submit(optimizer.step, number)
        rpc.rpc_sync("worker1", until_locked)
        state = optimizer.state_dict()
        stepping.result()
        assert is_all(state["state"][0]["momentum_buffer"], 1.0)
        state["state"][0]["momentum_buffer"] = torch.full((SIZE,), 10.0, device=FIRST, dtype=torch.float64)
        loading = other.submit(optimizer.load_state_dict, state)
        rpc.rpc_sync("worker1", until_locked)
        optimizer.step(number)
        loading.result()
    assert is_all(parameter.to_here(), 3.0 - 1.0 - (0.5 * 10.0 + 1.0))
