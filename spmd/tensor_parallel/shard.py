"""A worker's part of a model that several workers serve: its part of every parameter.

A model is made in two steps, so that errors of a single worker are raised before all of them wait for each
other: ``make`` builds the module without memory, ``join`` forms the group and initializes the shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed.checkpoint
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dist_autograd.api import autograd, current_context
from dist_autograd.engine import owned
from dist_autograd.graph import Leaf
from dist_optim.local_optimizer import LocalOptimizer, mark_as_copy, mark_as_shard
from rpc.agent.border import Work
from rpc.agent.futures import Future
from rpc.errors import AutogradError
from rpc.functions import async_execution
from rpc.runtime.current import current_agent
from rpc.runtime.torch_internals import pytree
from rref import RRef
from spmd.collectives.group import Group
from spmd.collectives.node import Node
from spmd.collectives.process_group import FarcallProcessGroup
from spmd.tensor_parallel.errors import ParallelError, ParallelTypeError
from spmd.tensor_parallel.filling import materialize, reset
from spmd.tensor_parallel.random_numbers import draw_parts
from spmd.tensor_parallel.state_parts import StatePart, part_of
from spmd.torch_internals import DropoutNd, default_store, register_group
from spmd.workers.forming import Forming
from spmd.workers.step_queue import StepQueue

__all__ = ["Call", "ModelShard", "Outcome", "ShardMembership", "Task", "make"]

Parallelize = Callable[[nn.Module, DeviceMesh], nn.Module]
Initialize = Callable[[nn.Module], object]

dcp: Any = torch.distributed.checkpoint


@dataclass(frozen=True)
class ShardMembership:
    """The group of a shard.

    Attributes:
        name: name of the model, the same on all of its workers and unique among models.
        workers: names of the workers, by rank in the model.
        world: their ranks in PyTorch's default process group; None if there is none, and they become it.
        timeout: timeout in seconds for forming it, and for each collective.
    """

    name: str
    workers: tuple[str, ...]
    world: tuple[int, ...] | None
    timeout: float


@dataclass(frozen=True)
class Task:
    """A task for a shard.

    Attributes:
        sequence: from 0; tasks are done in this order.
        name: of a method of ``ModelShard``.
        args: for it.
    """

    sequence: int
    name: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Call:
    """A call of the model.

    Attributes:
        args, kwargs: of ``forward``.
        wanted: for each tensor among them whether its gradient is wanted; None: nothing is differentiated.
        number: the call's, if it is differentiated.
        seed: of its random numbers.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    wanted: tuple[bool, ...] | None = None
    number: int = 0
    seed: int = 0


@dataclass(frozen=True)
class _Arrived:
    """A task, and the device work that its tensors come with, if it has any on devices."""

    task: Task
    work: Work | None

    @property
    def sequence(self) -> int:
        return self.task.sequence


@dataclass(frozen=True)
class Outcome:
    """The outcome of a call.

    Attributes:
        value: what ``forward`` returned.
        differentiable: for each tensor in it whether it has a gradient.
        number: the call's.
    """

    value: Any
    differentiable: tuple[bool, ...]
    number: int


@dataclass(eq=False)
class _Tape:
    """A call that may be differentiated: the tensors whose gradients are wanted, and the results."""

    inputs: list[Tensor]
    outputs: list[Tensor] = field(default_factory=list)


def make(factory: Callable[[], nn.Module], device: torch.device) -> tuple[RRef[ModelShard], int | None]:
    """The first step. Called remotely.

    Args:
        factory: makes the module.
        device: where this worker's part of it is to be.

    Returns:
        The shard, and this worker's rank in the default process group, if there is one.

    Raises:
        ParallelTypeError: ``factory`` does not return a module.
    """
    with torch.device("meta"):
        module: Any = factory()
    if not isinstance(module, nn.Module):
        raise ParallelTypeError(
            f"expected what makes the model to return a torch.nn.Module, got {type(module).__name__}"
        )
    return RRef(ModelShard(module, device)), dist.get_rank() if dist.is_initialized() else None


class ModelShard:
    """One worker's part of a model. All but ``abort`` and ``error`` are called for one thing at a time.

    Args:
        module: on the meta device.
        device: where this worker's part of it is to be.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module = module
        self._device = device
        self._seeded: dict[str, Any] = {"devices": []}  # the generators beside the CPU's
        if device.type != "cpu":
            self._seeded = {"devices": [device.index or 0], "device_type": device.type}
        self.rank = -1
        self._worker = ""
        self._aborted = ""
        self._forming: Forming | None = None
        self._steps: StepQueue | None = None
        self._group: Group | None = None
        self._process_group: Any = None
        self._mesh: Any = None
        self._locals: dict[nn.Parameter, Tensor] = {}
        self._tapes: weakref.WeakValueDictionary[int, _Tape] = weakref.WeakValueDictionary()

    # ---- making it

    def join(
        self,
        us: ShardMembership,
        rank: int,
        parallelize: Parallelize,
        initialize: Initialize | None,
        seed: int,
    ) -> None:
        """The second step: all workers of the model do it at the same time.

        Args:
            us: the group.
            rank: this worker's, in it.
            parallelize: cuts the module over a mesh.
            initialize: fills the module; None: ``reset_parameters`` of the modules in it.
            seed: of its random numbers.
        """
        self.rank, self._worker = rank, us.workers[rank]
        self._form(us)
        try:
            with self._on_device():
                self._fill(parallelize, initialize, seed)
        except BaseException:
            self.close()
            raise
        self._steps = StepQueue(self._do, us.workers[0], self.abort, _ended)

    def _fill(self, parallelize: Parallelize, initialize: Initialize | None, seed: int) -> None:
        self.module = parallelize(self.module, self._mesh)
        materialize(self.module, self._device)
        with torch.random.fork_rng(**self._seeded), torch.no_grad(), draw_parts():
            torch.manual_seed(seed)
            (reset if initialize is None else initialize)(self.module)
        for parameter in self.module.parameters():
            twin = self._locals[parameter] = _local_twin(parameter)
            mark_as_shard(twin)
            if self.rank and not _is_sharded(parameter):
                mark_as_copy(twin)

    def _form(self, us: ShardMembership) -> None:
        agent: Any = current_agent()
        world = us.world or tuple(range(len(us.workers)))
        timeout = timedelta(seconds=us.timeout)
        if us.world is None:
            self._forming = Forming(us.workers, us.name)
            if self._aborted:  # before there was a group to give up
                raise ParallelError(self._aborted)
            self._forming.form(rank=self.rank, timeout=timeout)
        node = Node.of(agent, [agent.group.peers.find(each) for each in us.workers], us.name, owned=False)
        self._group = Group(node, range(len(world)), self.rank, us.name, us.timeout)
        self._process_group = FarcallProcessGroup(self._group)
        ranks = {global_rank: place for place, global_rank in enumerate(world)}
        kind = self._device.type
        registered: Any = (
            self._process_group,
            "farcall",
            default_store(),
            us.name,
            "cpu:farcall" if kind == "cpu" else f"cpu:farcall,{kind}:farcall",
            ranks,
        )
        register_group(*registered)
        self._mesh = DeviceMesh.from_group(self._process_group, kind)

    def close(self) -> None:
        """Leave the group and free the module. Idempotent."""
        if self._steps is not None:
            self._steps.stop()
        if self._process_group is not None:
            dist.destroy_process_group(self._process_group)
        self._group = self._process_group = self._mesh = None
        self.module = nn.Module()
        self._locals.clear()

    # ---- running it

    @async_execution
    def do(self, task: Task) -> Future[Any]:
        """Do a task when those before it are done."""
        assert self._steps is not None, "not before join"
        agent: Any = current_agent()
        return self._steps.put(_Arrived(task, agent.calls.requests.border.work()))

    def skip(self, number: int) -> None:
        """Do not wait for a task, which rank 0 could not send."""
        if self._steps is not None:
            self._steps.skip(number)

    def _do(self, arrived: _Arrived) -> Any:
        task = arrived.task
        if arrived.work is not None:
            arrived.work.join(task.args)
        with self._on_device():
            return getattr(self, task.name)(*task.args)

    def _on_device(self) -> AbstractContextManager[Any]:
        """Make the device the current one."""
        if self._device.type == "cpu":
            return nullcontext()
        return torch.accelerator.device_index(self._device.index or 0)

    def forward(self, call: Call) -> Outcome | None:
        """Run the module; rank 0 returns what it gives."""
        if call.wanted is None:
            with torch.no_grad():
                value = self._run(call)
            return Outcome(value, (), 0) if self.rank == 0 else None
        tensors = _tensors((call.args, call.kwargs))
        for tensor, wanted in zip(tensors, call.wanted, strict=True):
            tensor.requires_grad_(wanted)
        tape = _Tape([tensor for tensor in tensors if tensor.requires_grad])
        with torch.enable_grad():
            value = self._run(call)
        outputs = _tensors(value)
        tape.outputs += [tensor for tensor in outputs if tensor.requires_grad]
        if tape.outputs:
            self._tapes[call.number] = tape
            current_context().kept.append(tape)
        if self.rank:
            return None
        differentiable = tuple(tensor.requires_grad for tensor in outputs)
        return Outcome(pytree.tree_map_only(Tensor, Tensor.detach, value), differentiable, call.number)

    def _run(self, call: Call) -> Any:
        drops = self.module.training and any(
            isinstance(each, DropoutNd) and each.p for each in self.module.modules()
        )
        args, kwargs = pytree.tree_map_only(Tensor, self._here, (call.args, call.kwargs))
        with torch.random.fork_rng(**self._seeded) if drops else nullcontext():
            if drops:
                torch.manual_seed(call.seed)  # all shards drop the same elements
            value = self.module(*args, **kwargs)
            return pytree.tree_map_only(DTensor, DTensor.full_tensor, value)

    def _here(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device)

    def backward(
        self, number: int, gradients: Sequence[Tensor | None], context_id: int, keep: bool
    ) -> list[Tensor | None] | None:
        """Differentiate a call. Gradients of parameters go into the context.

        Args:
            number: the call's.
            gradients: of the differentiable tensors in its value.
            context_id: of distributed autograd.
            keep: it may be differentiated again.

        Returns:
            At rank 0, the gradients that were wanted.
        """
        tape = self._tapes.get(number)
        if tape is None or not tape.outputs:
            raise AutogradError(
                "Trying to backward through the graph a second time: this call of the model is not kept any "
                "more. Specify retain_graph=True in the first backward, inside the context of the call"
            )
        parameters = [each for each in self.module.parameters() if each.requires_grad]
        found = torch.autograd.grad(
            tape.outputs,
            [*tape.inputs, *parameters],
            pytree.tree_map_only(Tensor, self._here, list(gradients)),
            retain_graph=keep,
            allow_unused=True,
        )
        count = len(tape.inputs)
        leaves = [Leaf(self._locals[each], None, 0) for each in parameters]
        local = [_local_gradient(*each) for each in zip(found[count:], parameters, strict=True)]
        context = autograd().contexts.get(context_id)
        context.accumulate(leaves, owned(local))
        if not keep:
            tape.inputs, tape.outputs = [], []
        return list(found[:count]) if self.rank == 0 else None

    def step(self, optimizers: Mapping[str, RRef[LocalOptimizer]], context_id: int) -> None:
        """Take a step with this worker's part of an optimizer, if it has one."""
        mine = optimizers.get(self._worker)
        if mine is not None:
            mine.local_value().step(context_id)

    def train(self, mode: bool) -> None:
        """Training mode, or evaluation mode."""
        self.module.train(mode)

    # ---- its state

    def parameters(self) -> list[RRef[Tensor]]:
        """References to this worker's parts of the parameters: plain tensors that share their memory."""
        return [RRef(self._locals[each]) for each in self.module.parameters()]

    def parts(self) -> dict[str, StatePart]:
        """Return this shard's part of the state, by name."""
        return {name: part_of(value, self.rank) for name, value in self.module.state_dict().items()}

    def take(self, parts: Mapping[str, Tensor]) -> None:
        """Take over this shard's part of a state."""
        own = self.module.state_dict()
        with torch.no_grad():
            for name, part in parts.items():
                value = own[name]
                # From the CPU, this returns when it is there: operations are not on this request's streams.
                (value.to_local() if isinstance(value, DTensor) else value).copy_(part.cpu())

    def save(self, directory: str) -> None:
        """Write the state into a distributed checkpoint; all shards at once."""
        dcp.save(self.module.state_dict(), checkpoint_id=directory, process_group=self._process_group)

    def load(self, directory: str) -> None:
        """Read the state from a distributed checkpoint; all shards at once."""
        state = self.module.state_dict()
        dcp.load(state, checkpoint_id=directory, process_group=self._process_group)

    # ---- its group

    def abort(self, reason: str) -> None:
        """End what is under way on all shards, and the model with it; also while the group is formed."""
        self._aborted = reason
        if self._group is not None:
            self._group.abort(reason)
        elif self._forming is not None:
            self._forming.give_up(reason)

    @property
    def failed(self) -> bool:
        """Whether the group has failed."""
        return self._group is None or self._group.members.failed


def _ended() -> ParallelError:
    return ParallelError("the model is closed")


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _is_sharded(parameter: Any) -> bool:
    return isinstance(parameter, DTensor) and any(isinstance(each, Shard) for each in parameter.placements)


def _local_twin(parameter: nn.Parameter) -> Tensor:
    """A plain parameter that shares the memory of a rank's part, for optimizers."""
    if not isinstance(parameter, DTensor):
        return parameter
    local: Any = parameter._local_tensor
    return nn.Parameter(local, requires_grad=parameter.requires_grad)


def _local_gradient(gradient: Tensor | None, parameter: Any) -> Tensor | None:
    """This rank's part of a gradient, laid out as the parameter is."""
    if not isinstance(gradient, DTensor):
        return gradient
    laid_out: Any = gradient
    if gradient.placements != parameter.placements:
        laid_out = gradient.redistribute(placements=parameter.placements)
    local: Tensor = laid_out.to_local()
    return local
