"""``RemoteModule``: modules that live on other workers, as those see them who use them."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rpc
from rpc.errors import NotInitializedError, RRefError, UnknownWorkerError, WorkerLostError
from rref import RemoteModule
from rref.remote_module.unavailable import WithoutLocalState
from tests.support.default_device import placed
from tests.support.serving import in_standing_group, in_worker0, report, serve, wait_at_gate
from tests.support.tracked import Tracked
from tests.support.workers import RunWorkers, Worker

INPUT = torch.tensor([[1.0, 2.0]])


class Scale(nn.Module):
    """Multiplies by a factor; adds one where it is evaluated instead of trained."""

    def __init__(self, factor: float, parts: int = 0) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))
        self.parts = nn.ModuleList(Scale(factor) for _ in range(parts))

    def forward(self, x: Tensor, *, negative: bool = False) -> Tensor:
        scaled = x * self.factor
        scaled = -scaled if negative else scaled
        return scaled if self.training else scaled + 1


def worker_of(_: nn.Module, args: tuple[Tensor], output: Tensor) -> str:
    """A forward hook: in place of the output, which worker computed it."""
    return rpc.get_worker_info().name


class Located(Scale):
    def __init__(self) -> None:
        super().__init__(1.0)
        self.register_forward_hook(worker_of)


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ArithmeticError("no forward here")


# ---- calling


@pytest.mark.parametrize(
    "place", dict.fromkeys(["worker1/cpu", "worker1", "rank:1/cpu", "worker0/cpu", placed("worker1")])
)
@in_standing_group()
def test_it_is_called_like_a_local_module(place: str) -> None:
    module = RemoteModule(place, Scale, args=(3.0,), kwargs={"parts": 1})
    assert module(INPUT).tolist() == [[3, 6]]
    assert module.forward(INPUT, negative=True).tolist() == [[-3, -6]]
    assert module.forward_async(INPUT).wait().tolist() == [[3, 6]]
    assert nn.Sequential(module, nn.Flatten())(INPUT).tolist() == [[3, 6]]


@in_standing_group()
def test_it_computes_where_it_lives_with_the_hooks_registered_there() -> None:
    assert RemoteModule(placed("worker1"), Located)(INPUT) == "worker1"


@in_standing_group()
def test_training_and_evaluation_mode_are_those_of_the_remote_module() -> None:
    outputs = {True: [[2.0, 4.0]], False: [[3.0, 5.0]]}
    module = RemoteModule(placed("worker1"), Scale, args=(2.0,))
    for mode in (False, True, False):
        assert module.train(mode) is module
        assert module.training is mode
        assert module(INPUT).tolist() == outputs[mode]
    model = nn.Sequential(module).train()
    assert model.eval() is model
    assert module(INPUT).tolist() == outputs[False]


@in_standing_group()
def test_its_parameters_are_references() -> None:
    module = RemoteModule(placed("worker1"), Scale, args=(2.0,), kwargs={"parts": 2})
    every, own = module.remote_parameters(), module.remote_parameters(recurse=False)
    assert [parameter.owner_name() for parameter in every] == ["worker1"] * 3
    assert [type(parameter.to_here()) for parameter in every] == [nn.Parameter] * 3
    assert len(own) == 1
    assert module.get_module_rref() is module.module_rref


# ---- sending it


def use_elsewhere(module: RemoteModule) -> list[Any]:
    module.eval()
    return [module(INPUT).tolist(), nn.Sequential(module)(INPUT).tolist(), module.on, module.training]


@in_worker0(world_size=3)
def test_it_is_the_same_module_for_everybody_it_is_sent_to() -> None:
    evaluated = [[3.0, 5.0]]
    module = RemoteModule(placed("worker1"), Scale, args=(2.0,))
    seen = rpc.rpc_sync("worker2", use_elsewhere, args=(module,))
    assert seen == [evaluated, evaluated, "worker1", False]
    back: Any = rpc.rpc_sync("worker2", torch.nn.Identity().forward, args=(module,))
    assert back(INPUT).tolist() == evaluated
    shared = RemoteModule.init_from_module_rref(placed("worker1"), module.get_module_rref())
    assert shared(INPUT).tolist() == evaluated
    assert shared.device == (placed("").strip("/") or "cpu")


@in_standing_group()
def test_it_cannot_be_saved_or_copied() -> None:
    module = RemoteModule(placed("worker1"), Scale, args=(2.0,))
    for attempt in (lambda: torch.save(module, io.BytesIO()), lambda: copy.deepcopy(module)):
        with pytest.raises(RuntimeError, match="RemoteModule can only be pickled when using RPC"):
            attempt()


class TrackedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tracked = Tracked("module")

    def forward(self, x: Tensor) -> Tensor:
        return x


def use_and_drop(worker: Worker) -> None:
    with worker.group():
        module = RemoteModule(placed("worker1"), TrackedModule)
        module(INPUT)
        rpc.rpc_sync("worker1", report, args=("used",))
        del module
        worker.wait_for("freed")


def test_it_is_freed_when_nobody_has_it_any_more(run_workers: RunWorkers) -> None:
    workers = run_workers.start([use_and_drop, serve])
    workers[1].wait_for("used")
    assert workers[1].wait_for("freed") == "module"
    workers[0].tell("freed")
    workers.results()


# ---- what cannot be


def test_every_method_of_a_module_either_works_remotely_or_raises() -> None:
    works = {"forward", "train", "eval"}
    of_the_class = {"T_destination", "call_super_init", "dump_patches"}
    for_subclasses = {"get_extra_state", "set_extra_state"}
    decided = works | of_the_class | for_subclasses | set(vars(WithoutLocalState))
    assert not [name for name in dir(nn.Module) if not name.startswith("_") and name not in decided]


@pytest.mark.parametrize("name", sorted(name for name in vars(WithoutLocalState) if not name.startswith("_")))
def test_what_needs_local_state_raises_and_says_what_to_use(name: str) -> None:
    module = WithoutLocalState()
    with pytest.raises(ValueError, match=f"Method ``{name}`` not supported for RemoteModule. [A-Z].+"):
        getattr(module, name)(1, some=2)


def test_it_needs_an_agent() -> None:
    with pytest.raises(NotInitializedError, match=r"RemoteModule only works in RPC: call rpc\.init_rpc"):
        RemoteModule("worker1/cpu", Scale, args=(1.0,))


@in_standing_group()
def test_mistakes_in_making_one_are_raised_at_once() -> None:
    with pytest.raises(UnknownWorkerError, match="nobody"):
        RemoteModule("nobody/cpu", Scale, args=(1.0,))
    with pytest.raises(ValueError, match="names a device but no worker"):
        RemoteModule("cpu", Scale, args=(1.0,))
    with pytest.raises(RuntimeError, match=r"'worker1' has no cuda:99, since it sees .* CUDA devices"):
        RemoteModule("worker1/cuda:99", Scale, args=(1.0,))
    with pytest.raises(ValueError, match=r"decorated by @torch\.jit\.interface"):
        RemoteModule("worker1", Scale, (1.0,), _module_interface_cls=Scale)
    with pytest.raises(TypeError, match="module_rref is a Scale, not a reference to a module"):
        RemoteModule.init_from_module_rref("worker1", Scale(1.0))  # type: ignore[arg-type]
    module: Any = Scale(2.0)
    with pytest.raises(TypeError, match=r"module_cls is a Scale, not a class of modules: .* rpc\.RRef"):
        RemoteModule("worker1/cpu", module)
    name: Any = "Scale"
    with pytest.raises(TypeError, match=r"module_cls is a str, not a class derived from nn\.Module"):
        RemoteModule("worker1/cpu", name)
    here: Any = RemoteModule("worker1/cpu", nn.Linear, args=(2, 2))
    with pytest.raises(AttributeError, match=r"no attribute 'weight': .*get_module_rref\(\)\.to_here\(\)"):
        here.weight.sum()
    with pytest.raises(RuntimeError, match="without _module_interface_cls: it cannot be scripted"):
        torch.jit.script(RemoteModule("worker1", Scale, args=(1.0,)))


@pytest.mark.parametrize(
    ("module_cls", "kind", "text"),
    [
        (Scale, TypeError, "missing 1 required positional argument: 'factor'"),
        (dict, ValueError, r"returns an instance of <class nn.Module>, but .* <class 'dict'>"),
        (Broken, ArithmeticError, "no forward here"),
    ],
    ids=["arguments", "no module", "forward"],
)
@in_standing_group()
def test_what_goes_wrong_over_there_is_raised_by_its_use(
    module_cls: Any, kind: type[Exception], text: str
) -> None:
    module = RemoteModule(placed("worker1"), module_cls)
    attempts: list[Callable[[], Any]] = [lambda: module(INPUT), module.forward_async(INPUT).wait]
    for attempt in attempts:
        with pytest.raises(kind, match=text) as caught:
            attempt()
        assert "Traceback on worker 'worker1'" in "".join(caught.value.__notes__)


class Waiting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        wait_at_gate()
        return x


def use_after_loss(worker: Worker) -> None:
    with worker.group():
        module = RemoteModule(placed("worker1"), Waiting)
        pending = module.forward_async(INPUT)
        with pytest.raises(WorkerLostError, match="worker1"):
            pending.wait()
        for attempt in (module.forward, lambda _: module.remote_parameters(), lambda _: module.train()):
            with pytest.raises((WorkerLostError, RRefError), match="'worker1'"):
                attempt(INPUT)


def test_a_module_whose_worker_died_raises_at_once_and_names_it(run_workers: RunWorkers) -> None:
    workers = run_workers.start([use_after_loss, serve])
    workers[1].wait_for("at the gate")
    workers[1].kill()
    workers.results()


# ---- TorchScript


with warnings.catch_warnings(action="ignore", category=DeprecationWarning):

    @torch.jit.interface
    class RepeatInterface:
        def forward(self, x: Tensor, times: int = 2) -> dict[str, Tensor]:  # type: ignore[empty-body]
            pass

    @torch.jit.interface
    class RepeatLaterInterface:
        def forward_async(  # type: ignore[empty-body]
            self, x: Tensor, times: int = 2
        ) -> torch.futures.Future[dict[str, Tensor]]:
            pass


class Repeat(nn.Module):
    def forward(self, x: Tensor, times: int = 2) -> dict[str, Tensor]:
        return {"repeated": x.repeat(times)}


@in_standing_group()
def test_torchscript_calls_it_through_its_interface() -> None:
    @torch.jit.script
    def use(module: RepeatInterface, later: RepeatLaterInterface, x: Tensor) -> list[Tensor]:
        futures = [later.forward_async(x, times) for times in range(1, 9)]
        waited = [future.wait()["repeated"] for future in futures]
        return waited + [module.forward(x, 9)["repeated"]]  # noqa: RUF005  # as TorchScript wants it

    module = RemoteModule(placed("worker1"), Repeat, _module_interface_cls=RepeatInterface)
    assert module(torch.ones(1))["repeated"].tolist() == [1, 1]
    scripted = torch.jit.script(module)
    del module
    outputs = use(scripted, scripted, torch.ones(1))
    with pytest.raises(RuntimeError, match="Passing a script RemoteModule over RPC is not supported"):
        rpc.rpc_sync("worker1", id, args=(scripted,))
    assert [int(output.sum()) for output in outputs] == list(range(1, 10))
